"""Set-up of all tests."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from cluster import build

# A shell starts background processes with both ignored, and the processes that tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)

# Time is no property: a busy machine pauses a process for longer than hypothesis allows for one example.
_ANY_MACHINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("short", _ANY_MACHINE, max_examples=25)
settings.register_profile("deep", _ANY_MACHINE, max_examples=100)
settings.load_profile("short")

# Two processes that train on two cores with two threads each wait for each other's threads, and burn processor time.
# Tests of what a process has by default take the variable away (`own_threads`).
os.environ.setdefault("OMP_NUM_THREADS", "1")

_OF_PYTEST = "PYTEST_CURRENT_TEST"
"""The environment variable that pytest itself changes while a test runs."""
_DESELECTED = pytest.StashKey[int]()


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """Undo what a test changes in the environment: the product sets variables of torch, which later tests pass on."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys() - {_OF_PYTEST}:
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


@pytest.fixture
def own_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch and NumPy start as many threads as they do by default."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def pytest_collection(session: pytest.Session) -> None:
    """Import the tests without garbage collections: what they create stays, and each one reads all of it again."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave thousands of tests and modules out of the garbage collections that follow, which took a second each."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose feature gate the chosen Kubernetes has not on, or has on (`needs_gate`)."""
    for mark in item.iter_markers("needs_gate"):
        (name,), on, release = mark.args, mark.kwargs.get("on", True), build.find_release()
        if (name in release.gates) != on:
            has = "no" if on else "the"
            pytest.skip(f"Kubernetes {release.minor} of the test cluster has {has} feature gate {name} on")


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Count, in a worker of pytest-xdist, what it leaves out: the summary of the run has no number for it."""
    if items and hasattr(items[0].config, "workeroutput"):
        config: Any = items[0].config
        config.workeroutput["deselected"] = config.workeroutput.get("deselected", 0) + len(items)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Keep the number that a worker of pytest-xdist has counted; all workers collect the same tests."""
    node.config.stash[_DESELECTED] = getattr(node, "workeroutput", {}).get("deselected", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if number := config.stash.get(_DESELECTED, 0):
        terminalreporter.write_line(f"{number} tests were left out (deselected)")

"""Whether a script uses elasticjob is seen in its modules."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

import elasticjob
from elasticjob.frameworks.own_callbacks import uses_elasticjob
from elasticjob.training.progress_channel import Stopped, channel, progress

USES = {"module": elasticjob, "function": progress, "class": Stopped, "object": Stopped(0)}


def run_with(monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> bool:
    """Return what is found if the only module of a script has this value, and nothing else does."""
    modules = {
        name: module for name, module in sys.modules.items() if name.partition(".")[0] in sys.stdlib_module_names
    }
    monkeypatch.setattr(channel, "callbacks", [])
    script = ModuleType(name)
    script.__dict__["value"] = value
    monkeypatch.setattr(sys, "modules", {**modules, "__main__": ModuleType("__main__"), name: script})
    return uses_elasticjob()


@pytest.mark.parametrize("kind", USES)
@pytest.mark.parametrize("name", ["__main__", "project.train"])
def test_a_script_that_imports_elasticjob_uses_it(monkeypatch: pytest.MonkeyPatch, kind: str, name: str) -> None:
    assert run_with(monkeypatch, name, USES[kind])


@pytest.mark.parametrize(
    ("name", "value"),
    [("project.train", print), ("project.train", ModuleType("elasticjobs")), ("__mp_main__", progress)],
    ids=["other", "another name", "the fork server's program"],
)
def test_other_scripts_do_not(monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> None:
    assert not run_with(monkeypatch, name, value)

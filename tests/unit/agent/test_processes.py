"""Which processes count as ended, which clean up after others, and who gets a group's signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elasticjob._runtime.agent.processes import cleaners, descendants, is_in_masks, signal_group

MAIN_THREAD_ENDS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
print("ready", flush=True)
ctypes.CDLL(None).syscall({exit}, 0)
"""
EXIT = {"x86_64": 60, "aarch64": 93}[os.uname().machine]
"""Number of the system call that ends one thread."""


@contextmanager
def child(text: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def test_a_process_whose_first_thread_has_ended_is_alive_as_long_as_another_thread_runs() -> None:
    with child(MAIN_THREAD_ENDS.format(exit=EXIT)) as process:
        assert process.stdout is not None
        process.stdout.readline()
        until(lambda: state(process.pid) == "Z")
        assert process.pid in descendants(os.getpid())
        process.kill()
        until(lambda: process.pid not in descendants(os.getpid()))


TRACKERS = {
    "multiprocessing": "from multiprocessing import resource_tracker as r; r.ensure_running(); p = r._resource_tracker",
    "no tracker": "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=-1); "
    "p._pid = p.pid",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACKERS)
def test_the_processes_that_clean_up_shared_memory(name: str) -> None:
    text = f"{TRACKERS[name]}\nprint(p._pid, flush=True)\nimport signal; signal.pause()"
    with child(text) as process:
        assert process.stdout is not None
        helper = int(process.stdout.readline())
        until(lambda: cleaners({process.pid, helper}) == (({helper} if name == "multiprocessing" else set()), set()))
        process.kill()
        until(lambda: not Path(f"/proc/{helper}").exists())


STARTS_TRACKERS = """
import signal, sys
from multiprocessing import resource_tracker
for line in sys.stdin:
    tracker = resource_tracker.ResourceTracker()
    tracker.ensure_running()
    print(tracker._pid, flush=True)
"""


def test_a_process_may_be_a_cleaner_while_its_program_is_loaded() -> None:
    command = [sys.executable, "-c", STARTS_TRACKERS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(40):  # about half of them are still loaded when their parent goes on
            process.stdin.write("\n")
            process.stdin.flush()
            tracker = int(process.stdout.readline())
            known, loading = cleaners({tracker})
            assert known | loading == {tracker}
        until(lambda: cleaners({tracker}) == ({tracker}, set()))
        os.kill(tracker, signal.SIGKILL)
        until(lambda: state(tracker) == "Z")
        assert cleaners({tracker}) == (set(), set())
        process.stdin.close()


def test_a_process_without_a_group_of_its_own_gets_the_groups_signal() -> None:
    with child("print('ready', flush=True); import signal; signal.pause()") as process:
        assert process.stdout is not None
        process.stdout.readline()
        signal_group(process.pid, signal.SIGTERM)
        assert process.wait(30) == -signal.SIGTERM


def test_children_of_the_other_threads_are_found_when_one_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter([folder / "0", *listed(folder)]))
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            assert process.pid in descendants(os.getpid())
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("status", "found"),
    [
        ("Name:\tx\nSigCgt:\t0000000000004000\n", True),
        ("Name:\tx\nSigBlk:\t0000000000000000\nSigCgt:\t0000000000000002\n", False),
        ("Name:\tx\nState:\tS\n", False),
    ],
    ids=["has a handler", "has none", "a kernel that does not say"],
)
def test_a_signal_is_searched_in_the_masks_that_there_are(status: str, found: bool) -> None:
    assert is_in_masks(status, signal.SIGTERM, "SigCgt") is found

"""How long killed processes may take to end, and which of them count as stuck in the kernel."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from elasticjob._runtime.agent.monitoring.exits.stuck_processes import (
    BLOCKED_POLLS,
    KILL_TIMEOUT,
    LONGEST_KILL,
    BlockedThreads,
    HeldResources,
    blocked_threads,
    held_resources,
    kill_timeout,
)

GIB = 1 << 30


@pytest.mark.parametrize(
    ("held", "seconds"),
    [
        (HeldResources(), KILL_TIMEOUT),
        (HeldResources(resident=20 * GIB), KILL_TIMEOUT + 20),
        (HeldResources(pinned=8 * GIB), KILL_TIMEOUT + 32),
        (HeldResources(gpus=8), KILL_TIMEOUT + 120),
        (HeldResources(resident=100 * GIB, pinned=16 * GIB, gpus=8), KILL_TIMEOUT + 284),
        (HeldResources(resident=4096 * GIB, gpus=8), LONGEST_KILL),
    ],
)
def test_the_time_to_end_grows_with_what_processes_hold(held: HeldResources, seconds: float) -> None:
    assert kill_timeout(held) == seconds


SAME = frozenset({(7, 100)})


@pytest.mark.parametrize(
    ("looks", "stuck"),
    [
        ([SAME] * BLOCKED_POLLS, True),
        ([SAME] * (BLOCKED_POLLS - 1), False),
        ([frozenset()] * 99, False),
        ([frozenset({(7, ticks)}) for ticks in range(99)], False),
        ([frozenset({(thread, 100)}) for thread in range(99)], False),
        ([SAME, frozenset()] * 99, False),
        ([SAME, *[SAME | {(8, n)} for n in range(BLOCKED_POLLS - 1)]], True),
        ([frozenset({(8, 1)}), *[SAME] * BLOCKED_POLLS], True),
    ],
    ids=[
        "the same thread", "too few looks", "none", "at work", "others", "now and then", "beside others", "after others"
    ],
)  # fmt: skip
def test_a_thread_is_stuck_that_sleeps_and_does_nothing(looks: list[frozenset[tuple[int, int]]], stuck: bool) -> None:
    seen = BlockedThreads()
    for look in looks:
        seen = seen.poll(look)
    assert seen.stuck is stuck


def process(folder: Path, pid: int, *, status: str = "", files: tuple[str, ...] = (), states: str = "S") -> None:
    """Write the folder of one process as in /proc, with a thread for each of `states`."""
    made = folder / str(pid)
    (made / "fd").mkdir(parents=True)
    (made / "status").write_text(f"Name:\tpython\nVmSize:\t  999999 kB\n{status}Threads:\t1\n")
    for number, path in enumerate(files):
        (made / "fd" / str(number)).symlink_to(path)
    for number, state in enumerate(states):
        task = made / "task" / str(pid + number)
        task.mkdir(parents=True)
        fields = " ".join(["1"] * 10 + ["30", "4"] + ["0"] * 20)
        (task / "stat").write_text(f"{pid + number} (a) b) {state} {fields}\n")


def test_what_processes_hold(tmp_path: Path) -> None:
    process(
        tmp_path, 10, status="VmLck:\t    1024 kB\nVmPin:\t 2048 kB\nVmRSS:\t    4096 kB\n",
        files=("/dev/null", "/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm", "/dev/nvidia1", "/dev/nvidia1"),
    )  # fmt: skip
    process(tmp_path, 20, status="VmRSS:\t    1 kB\n", files=("/dev/nvidia1", "socket:[1]", "/dev/dri/renderD128"))
    (tmp_path / "30").mkdir()  # it ends meanwhile
    assert held_resources([10, 20, 30, 40], tmp_path) == HeldResources(4097 << 10, 3072 << 10, 3)


def test_threads_in_an_uninterruptible_sleep(tmp_path: Path) -> None:
    process(tmp_path, 10, states="SDRD")
    process(tmp_path, 20, states="Z")
    assert blocked_threads([10, 20, 30], tmp_path) == {(11, 34), (13, 34)}


def test_what_this_process_holds() -> None:
    held = held_resources([os.getpid()])
    assert 0 < held.resident < 2 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

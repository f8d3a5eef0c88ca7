"""Hangs: when one is noticed, and who is named. Real stacks of torch and of plain Python are the evidence."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticjob.agent.monitoring.hangs import HangMonitor, StackDump, dump_stacks, farthest_behind
from elasticjob.agent.monitoring.worker_progress import ProgressReport
from elasticjob.contract.messages import Failure, FailureClass
from elasticjob.contract.names import STACK_DUMP_SIGNAL
from elasticjob.diagnosis import root_cause

IDLE = """Thread 0x00007f12 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait

"""
ASLEEP = (
    IDLE
    + """Current thread 0x00007f99 (most recent call first):
  File "/app/train.py", line 12 in stands_still
  File "/app/train.py", line 30 in <module>
"""
)
REDUCING = (
    IDLE
    + """Current thread 0x00007f99 (most recent call first):
  File "/usr/lib/python3/site-packages/torch/distributed/distributed_c10d.py", line 4181 in all_reduce
  File "/app/train.py", line 30 in <module>
"""
)
BACKWARD = """Current thread 0x00007f99 (most recent call first):
  File "/usr/lib/python3/site-packages/torch/autograd/graph.py", line 1113 in _engine_run_backward
"""
LOADING = """Current thread 0x00007f99 (most recent call first):
  File "/usr/lib/python3/site-packages/torch/utils/data/dataloader.py", line 1131 in _try_get_data
"""


@pytest.mark.parametrize(
    ("stacks", "waiting"), [(ASLEEP, False), (REDUCING, True), (BACKWARD, True), (LOADING, False), ("", False)]
)
def test_who_waits_for_others(stacks: str, waiting: bool) -> None:
    assert StackDump(0, 5, 10.0, stacks).waits_for_peers is waiting


def test_the_failure_of_a_hang_says_where_it_stands() -> None:
    failure = StackDump(3, 6, 10.04, ASLEEP).failure("job-1-0", 1.0)
    first, *rest = failure.message.splitlines()
    assert first == "no progress for 10.0 s after step 6: stands in stands_still (/app/train.py:12)"
    assert "line 30 in <module>" in rest[-1]
    assert (failure.kind, failure.rank, failure.step, failure.waits_for_peers) == (FailureClass.HANG, 3, 6, False)
    silent = StackDump(3, 6, 10.0, "").failure("job-1-0", 1.0)
    assert silent.message.splitlines()[0] == "no progress for 10.0 s after step 6: stands and does not answer"
    assert len(StackDump(3, 6, 10.0, ASLEEP * 100).failure("job-1-0", 1.0).message) <= 1024


def hang(rank: int, step: int | None, stacks: str = REDUCING) -> StackDump:
    return StackDump(rank, step, 1.0, stacks)


STANDING = [
    ("the lowest step", [hang(0, 7), hang(1, 6), hang(2, 7)], 1),
    ("of one step the one that does not wait", [hang(0, 6), hang(1, 6), hang(2, 6, ASLEEP)], 2),
    ("of one step the one that does not answer", [hang(0, 6), hang(1, 6, ""), hang(2, 6)], 1),
    ("not one that never made a step", [hang(0, 6), hang(1, None, ASLEEP)], 0),
]


@pytest.mark.parametrize(("name", "standing", "blamed"), STANDING, ids=[s[0] for s in STANDING])
def test_who_is_named_on_a_node_and_among_nodes(name: str, standing: list[StackDump], blamed: int) -> None:
    found = farthest_behind(standing)
    assert found is not None
    assert found.rank == blamed
    told = [s.failure(f"job-{s.rank}-0", 1.0) for s in standing]
    for order in (told, told[::-1]):
        cause = root_cause(f for f in order if f.step is not None)
        assert cause is not None
        assert cause.rank == blamed


def test_a_failure_that_came_before_a_hang_is_its_cause() -> None:
    failed = Failure(FailureClass.USER_ERROR, "job-0-0", 1.0, rank=0, exit_code=1)
    assert root_cause((failed, hang(1, 6).failure("job-1-0", 1.0))) == failed
    assert farthest_behind([]) is None


# ---- the watch -------------------------------------------------------------------------------------------------------


class Signs:
    """Signs of life as a test gives them, and how often somebody looked."""

    def __init__(self) -> None:
        self.signs: list[ProgressReport] = []
        self.looks = 0
        self.looked = asyncio.Event()
        self.stalled = asyncio.Event()

    def look(self) -> list[ProgressReport]:
        self.looks += 1
        self.looked.set()
        return self.signs


async def test_a_hang_is_noticed_at_the_deadline_of_the_oldest_sign() -> None:
    signs = Signs()
    signs.signs = [ProgressReport(0, 5, time.monotonic()), ProgressReport(1, 5, time.monotonic() - 0.5)]
    watch = HangMonitor(signs.look, signs.stalled.set)
    watch.start(0.6)
    await asyncio.wait_for(signs.stalled.wait(), 10)
    assert time.monotonic() - signs.signs[1].time >= 0.6
    assert signs.looks == 1, "nobody looked before"


async def test_a_first_step_arms_the_watch() -> None:
    signs = Signs()
    watch = HangMonitor(signs.look, signs.stalled.set)
    watch.start(0.02)
    for _ in range(3):
        signs.looked.clear()
        await asyncio.wait_for(signs.looked.wait(), 10)
    assert not signs.stalled.is_set()
    signs.signs = [ProgressReport(0, 0, time.monotonic())]
    await asyncio.wait_for(signs.stalled.wait(), 10)


@pytest.mark.parametrize("timeout", [0.0, 0.02])
async def test_a_watch_that_is_off_or_stopped_looks_at_nothing(timeout: float) -> None:
    signs = Signs()
    watch = HangMonitor(signs.look, signs.stalled.set)
    watch.start(timeout)
    watch.stop()
    for _ in range(3):
        await asyncio.get_running_loop().run_in_executor(None, sys.intern, "x")
    assert signs.looks == 0


async def test_a_standstill_is_told_again_only_after_progress() -> None:
    signs, told = Signs(), list[int]()

    def stalled() -> None:
        told.append(signs.looks)
        signs.stalled.set()

    watch = HangMonitor(signs.look, stalled)
    signs.signs = [ProgressReport(0, 5, time.monotonic())]
    watch.start(0.02, again=True)
    await asyncio.wait_for(signs.stalled.wait(), 10)
    for _ in range(3):
        signs.looked.clear()
        await asyncio.wait_for(signs.looked.wait(), 10)
    assert told == [signs.looks - 3], "it looks on, and tells nothing new"
    signs.stalled.clear()
    signs.signs = [ProgressReport(0, 6, time.monotonic())]
    await asyncio.wait_for(signs.stalled.wait(), 10)
    assert len(told) == 2
    watch.stop()


# ---- stacks of real processes ----------------------------------------------------------------------------------------

LISTENS = f"""
import faulthandler, sys, threading
faulthandler.register({STACK_DUMP_SIGNAL}, file=open(sys.argv[1], "a"), all_threads=True)
threading.Thread(target=threading.Event().wait, daemon=True).start()
def stands_still():
    print("ready", flush=True)
    sys.stdin.read()
stands_still()
"""
DEAF = "import sys; print('ready', flush=True); sys.stdin.read()"


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[dict[int, str]]:
    """Two that listen, one that does not; files of their stacks by process id."""
    started: dict[int, tuple[subprocess.Popen[str], str]] = {}
    for i, program in enumerate((LISTENS, DEAF, LISTENS)):
        path = str(tmp_path / f"stacks-{i}")
        process = subprocess.Popen(
            [sys.executable, "-c", program, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        started[process.pid] = (process, path)
    yield {pid: path for pid, (_, path) in started.items()}
    for process, _ in started.values():
        process.communicate("", 10)
        assert process.returncode == 0, "the signal killed nobody"


async def test_stacks_of_all_threads_and_only_of_who_listens(processes: dict[int, str]) -> None:
    for _ in range(2):
        first, deaf, third = (await dump_stacks(processes)).values()
        assert deaf == ""
        for stacks in (first, third):
            assert stacks.count("most recent call first") == 2
            assert "in stands_still" in StackDump(0, 1, 1.0, stacks).main_thread

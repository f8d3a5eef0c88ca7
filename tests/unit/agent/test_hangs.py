"""Hangs: when the monitor detects one, and which worker is named; the stacks are those of torch and plain Python."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from elasticjob._runtime.agent.execution.round_monitors import RoundMonitors
from elasticjob._runtime.agent.execution.worker_executor import WorkerExecutor
from elasticjob._runtime.agent.monitoring.progress import hangs
from elasticjob._runtime.agent.monitoring.progress.hang_guard import HangGuard, without_steps
from elasticjob._runtime.agent.monitoring.progress.hangs import HangMonitor, StackDump, dump_stacks, farthest_behind
from elasticjob._runtime.agent.monitoring.progress.worker_progress import ProgressReport
from elasticjob._runtime.agent.reporting.log_watch import LogWatch
from elasticjob._runtime.agent.state_machine.effects import FreezeWorkers
from elasticjob._runtime.agent.state_machine.events import HangGuardKnown, ProgressTimedOut
from elasticjob._runtime.agent.state_machine.state import AgentRound, AgentState
from elasticjob._runtime.contract.messages import Announce, Failure, FailureClass, StartRound
from elasticjob._runtime.contract.names import STACK_DUMP_SIGNAL, RoundId
from elasticjob._runtime.diagnosis import root_cause
from elasticjob._runtime.system.code_root import OWN_PACKAGE

ROUND = RoundId(1, 0, 1)
IDLE = """Thread 0x00007f12 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait

"""
ASLEEP = (
    IDLE
    + """Current thread 0x00007f99 (most recent call first):
  File "/app/train.py", line 12 in hangs_here
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
FORMING = f"""Current thread 0x00007f99 (most recent call first):
  File "{OWN_PACKAGE}inprocess/_groups/store_connection.py", line 54 in _connect
"""
LOADING = """Current thread 0x00007f99 (most recent call first):
  File "/usr/lib/python3/site-packages/torch/utils/data/dataloader.py", line 1131 in _try_get_data
"""


def in_round(start: StartRound) -> AgentState:
    announcement = Announce(0, 0, "agent", "pod", "127.0.0.1", 1, 1)
    return AgentState(announcement, 1.0, last_round=AgentRound(start, frozenset({0})))


async def test_workers_that_continue_are_watched_as_from_their_start() -> None:
    """A hang that is detected while they are frozen counts for nothing."""

    monitors, dispatched = guarded_monitors(None, progress_timeout=0.01)
    unused: Any = None
    executor = WorkerExecutor(
        unused, unused, FreezableWorkers(), unused, monitors, unused, unused,  # type: ignore[arg-type]
        state=lambda: in_round(round_start(0.01)), dispatch=unused, spawn=unused, start_store=unused,
    )  # fmt: skip
    monitors.watch_for_hangs(round_start(0.01))
    await until_hung(dispatched)
    dispatched.clear()
    executor.execute(FreezeWorkers(True))
    executor.execute(FreezeWorkers(False))
    await until_hung(dispatched)


@pytest.mark.parametrize(
    ("stacks", "waits"),
    [(ASLEEP, False), (REDUCING, True), (BACKWARD, True), (FORMING, True), (LOADING, False), ("", False)],
)
def test_workers_inside_torch_wait_for_peers(stacks: str, waits: bool) -> None:
    assert StackDump(0, 5, 10.0, stacks).waits_for_peers is waits


def test_the_failure_of_a_hang_names_the_place_in_the_code() -> None:
    failure = StackDump(3, 6, 10.04, ASLEEP).failure("job-1-0", 1.0)
    first, *rest = failure.message.splitlines()
    assert first == "no progress for 10.0 s after step 6: main thread is in hangs_here (/app/train.py:12)"
    assert "line 30 in <module>" in rest[-1]
    assert (failure.kind, failure.rank, failure.step, failure.waits_for_peers) == (FailureClass.HANG, 3, 6, False)
    silent = StackDump(3, 6, 10.0, "").failure("job-1-0", 1.0)
    assert silent.message.splitlines()[0] == "no progress for 10.0 s after step 6: the process does not respond"
    assert len(StackDump(3, 6, 10.0, ASLEEP * 100).failure("job-1-0", 1.0).message) <= 1024


OF_A_FORK = f"""Current thread 0x00007f99 (most recent call first):
  File "{OWN_PACKAGE}training/progress_channel.py", line 9 in step
  File "/app/train.py", line 12 in hangs_here
  File "/app/train.py", line 30 in <module>
  File "{OWN_PACKAGE}_runtime/agent/start_workers/fork_server/run_main.py", line 199 in _execute
  File "<string>", line 1 in <module>
"""


def test_the_message_of_a_hang_has_whole_lines_and_the_users_frames() -> None:
    assert StackDump(3, 6, 10.0, IDLE + OF_A_FORK).failure("job-1-0", 1.0).message.splitlines()[1:] == [
        "Current thread 0x00007f99 (most recent call first):",
        '  File "/app/train.py", line 12 in hangs_here',
        '  File "/app/train.py", line 30 in <module>',
    ]
    assert "_connect" in StackDump(3, 6, 10.0, FORMING).failure("job-1-0", 1.0).message.splitlines()[-1]
    deep = ASLEEP.replace('  File "/app/train.py", line 30', '  File "/app/model.py", line 7 in forward\n' * 50)
    message = StackDump(3, 6, 10.0, deep).failure("job-1-0", 1.0).message
    assert message.endswith("line 7 in forward")
    assert 950 < len(message) <= 1024


def test_the_stack_of_a_process_with_one_thread_begins_with_its_first_line() -> None:
    assert StackDump(0, 6, 1.0, BACKWARD).main_thread == BACKWARD
    assert StackDump(0, 6, 1.0, "").main_thread == ""


def hang(rank: int, step: int | None, stacks: str = REDUCING) -> StackDump:
    return StackDump(rank, step, 1.0, stacks)


DUMPS = [
    ("the lowest step", [hang(0, 7), hang(1, 6), hang(2, 7)], 1),
    ("at one step the one that does not wait", [hang(0, 6), hang(1, 6), hang(2, 6, ASLEEP)], 2),
    ("at one step the one that does not respond", [hang(0, 6), hang(1, 6, ""), hang(2, 6)], 1),
    ("not one that never made a step", [hang(0, 6), hang(1, None, ASLEEP)], 0),
    ("without a step of any worker, one that does not wait", [hang(0, None), hang(1, None, ASLEEP)], 1),
]


@pytest.mark.parametrize(("name", "dumps", "named"), DUMPS, ids=[case[0] for case in DUMPS])
def test_the_worker_named_on_one_node_and_among_nodes(name: str, dumps: list[StackDump], named: int) -> None:
    found = farthest_behind(dumps)
    assert found is not None
    assert found.rank == named
    failures = [dump.failure(f"job-{dump.rank}-0", 1.0) for dump in dumps]
    for order in (failures, failures[::-1]):
        cause = root_cause(order)
        assert cause is not None
        assert cause.rank == named


def test_a_failure_that_came_before_a_hang_is_its_cause() -> None:
    failed = Failure(FailureClass.USER_ERROR, "job-0-0", 1.0, rank=0, exit_code=1)
    assert root_cause((failed, hang(1, 6).failure("job-1-0", 1.0))) == failed
    assert farthest_behind([]) is None


# ---- the monitor -----------------------------------------------------------------------------------------------------


class Heartbeats:
    """Times of heartbeats that a test sets, and the number of times the monitor has read them."""

    def __init__(self) -> None:
        self.last: list[float] = []
        self.reads = 0
        self.was_read = asyncio.Event()
        self.timed_out = asyncio.Event()

    def read(self) -> list[float]:
        self.reads += 1
        self.was_read.set()
        return self.last


async def test_a_hang_is_detected_at_the_deadline_of_the_oldest_heartbeat() -> None:
    heartbeats = Heartbeats()
    heartbeats.last = [time.monotonic(), time.monotonic() - 0.5]
    monitor = HangMonitor(heartbeats.read, heartbeats.timed_out.set)
    monitor.start(0.6)
    await asyncio.wait_for(heartbeats.timed_out.wait(), 10)
    assert time.monotonic() - heartbeats.last[1] >= 0.6
    assert heartbeats.reads == 1, "the monitor did not read them before"


@pytest.mark.parametrize("later", [(), (600.0,)], ids=["no other worker", "another that may still begin"])
async def test_the_first_step_arms_the_monitor(later: tuple[float, ...]) -> None:
    """`later`: in how many seconds other workers should have begun."""
    heartbeats = Heartbeats()
    heartbeats.last = [time.monotonic() + seconds for seconds in later]
    monitor = HangMonitor(heartbeats.read, heartbeats.timed_out.set)
    monitor.start(0.02)
    for _ in range(3):
        heartbeats.was_read.clear()
        await asyncio.wait_for(heartbeats.was_read.wait(), 10)
    assert not heartbeats.timed_out.is_set()
    heartbeats.last.append(time.monotonic())
    await asyncio.wait_for(heartbeats.timed_out.wait(), 10)


@pytest.mark.parametrize("timeout", [0.0, 0.02])
async def test_a_disabled_or_stopped_hang_monitor_reads_no_heartbeats(timeout: float) -> None:
    heartbeats = Heartbeats()
    monitor = HangMonitor(heartbeats.read, heartbeats.timed_out.set)
    monitor.start(timeout)
    monitor.stop()
    for _ in range(3):
        await asyncio.get_running_loop().run_in_executor(None, sys.intern, "x")
    assert heartbeats.reads == 0


async def test_a_hang_is_reported_again_only_after_progress() -> None:
    heartbeats, reported = Heartbeats(), list[int]()

    def timed_out() -> None:
        reported.append(heartbeats.reads)
        heartbeats.timed_out.set()

    monitor = HangMonitor(heartbeats.read, timed_out)
    heartbeats.last = [time.monotonic()]
    monitor.start(0.02, repeat=True)
    await asyncio.wait_for(heartbeats.timed_out.wait(), 10)
    for _ in range(3):
        heartbeats.was_read.clear()
        await asyncio.wait_for(heartbeats.was_read.wait(), 10)
    assert reported == [heartbeats.reads - 3], "the monitor continues, and reports nothing new"
    heartbeats.timed_out.clear()
    heartbeats.last = [time.monotonic()]
    await asyncio.wait_for(heartbeats.timed_out.wait(), 10)
    assert len(reported) == 2
    monitor.stop()


# ---- stacks of real processes ----------------------------------------------------------------------------------------

HANDLES_SIGNAL = f"""
import faulthandler, sys, threading
faulthandler.register({STACK_DUMP_SIGNAL}, file=open(sys.argv[1], "a"), all_threads=True)
threading.Thread(target=threading.Event().wait, daemon=True).start()
def hangs_here():
    print("ready", flush=True)
    sys.stdin.read()
hangs_here()
"""
WITHOUT_HANDLER = "import sys; print('ready', flush=True); sys.stdin.read()"
BLOCKS_SIGNAL = HANDLES_SIGNAL.replace(
    "hangs_here()\n", f"import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [{STACK_DUMP_SIGNAL}])\nhangs_here()\n"
)
DEEP = HANDLES_SIGNAL.replace("def hangs_here():", "def hangs_here(depth=90):").replace(
    '    print("ready"', '    if depth:\n        return hangs_here(depth - 1)\n    print("ready"'
)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[dict[int, str]]:
    """Two processes with a handler, and one without between them; their stack dump files by process id."""
    with start(tmp_path, HANDLES_SIGNAL, WITHOUT_HANDLER, HANDLES_SIGNAL) as started:
        yield started


@contextmanager
def start(folder: Path, *programs: str) -> Iterator[dict[int, str]]:
    """Run programs; yield their stack dump files by process id."""
    started: dict[int, tuple[subprocess.Popen[str], str]] = {}
    for i, program in enumerate(programs):
        path = str(folder / f"stacks-{i}")
        process = subprocess.Popen(
            [sys.executable, "-c", program, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        started[process.pid] = (process, path)
    yield {pid: path for pid, (_, path) in started.items()}
    for process, _ in started.values():
        process.communicate("", 10)
        assert process.returncode == 0, "the signal must not kill the process"


async def test_a_stopped_process_is_not_waited_for(processes: dict[int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hangs, "STACKS_TIMEOUT", 600.0)
    stopped, _, other = processes
    os.kill(stopped, signal.SIGSTOP)
    await asyncio.to_thread(os.waitpid, stopped, os.WUNTRACED)
    stacks = await asyncio.wait_for(dump_stacks(processes), 60)
    os.kill(stopped, signal.SIGCONT)
    assert stacks[stopped] == ""
    assert "in hangs_here" in stacks[other]


@pytest.mark.parametrize("program", [DEEP, BLOCKS_SIGNAL], ids=["deep", "blocked in the main thread"])
async def test_stacks_are_complete(tmp_path: Path, program: str) -> None:
    with start(tmp_path, program) as processes:
        for _ in range(20):
            (stacks,) = (await dump_stacks(processes)).values()
            assert stacks.count("most recent call first") == 2
            assert "in <module>" in stacks


async def test_stacks_of_all_threads_but_only_of_processes_that_handle_the_signal(processes: dict[int, str]) -> None:
    for _ in range(2):
        first, without_handler, third = (await dump_stacks(processes)).values()
        assert without_handler == ""
        for stacks in (first, third):
            assert stacks.count("most recent call first") == 2
            assert "in hangs_here" in StackDump(0, 1, 1.0, stacks).main_thread


class GuardedWorkers:
    """Workers of which only the guard and the steps are known."""

    def __init__(self, guard: HangGuard | None, last_steps: Sequence[float]) -> None:
        self.guard = guard
        self.log_watch = LogWatch("pod")
        self._last_steps = last_steps

    def last_steps(self) -> Sequence[float]:
        return self._last_steps

    def heartbeats(self) -> Sequence[ProgressReport]:
        return ()


class FreezableWorkers:
    def freeze(self, on: bool) -> None:
        pass


def round_start(progress_timeout: float) -> StartRound:
    return StartRound(ROUND, 0, 1, 0, 1, 0, 1, "127.0.0.1", 1, 0, 3, progress_timeout=progress_timeout)


def guarded_monitors(
    guard: HangGuard | None, progress_timeout: float = 0.0, last_steps: Sequence[float] = (0.0,)
) -> tuple[RoundMonitors, list[object]]:
    """Return the monitors of an agent in a round, and the events that they dispatch."""
    dispatched = list[object]()
    monitors = RoundMonitors(
        GuardedWorkers(guard, last_steps),
        lambda: None,
        processes=1,
        step_time_window=60.0,
        state=lambda: in_round(round_start(progress_timeout)),
        dispatch=dispatched.append,
        send=dispatched.append,
    )
    return monitors, dispatched


async def until_hung(dispatched: Sequence[object]) -> None:
    async with asyncio.timeout(60):
        while ProgressTimedOut(ROUND) not in dispatched:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_without_torchs_word_the_steps_of_a_script_are_watched_for_its_time_out() -> None:
    """It is known only once the round runs, from a process group of the script."""
    guard = HangGuard(0.01, by_collectives=False)
    monitors, dispatched = guarded_monitors(guard)
    monitors.guard_reported()
    assert dispatched == [HangGuardKnown(guard.status)]
    await until_hung(dispatched)


async def until_guarded(dispatched: Sequence[object], status: str) -> None:
    async with asyncio.timeout(60):
        while HangGuardKnown(status) not in dispatched:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_a_hang_policy_without_steps_says_what_to_do_until_the_first_step() -> None:
    steps = list[float]()
    monitors, dispatched = guarded_monitors(None, progress_timeout=0.01, last_steps=steps)
    monitors.watch_for_hangs(round_start(0.01))
    said = without_steps("pod", 0.02)
    await until_guarded(dispatched, said)
    assert dispatched == [HangGuardKnown(said)], "it is reported once, and not as a hang"
    monitors.guard_reported()
    assert dispatched[1:] == [HangGuardKnown(said)], "what torch's groups report does not hide it"
    steps.append(time.monotonic() + 600)
    await until_guarded(dispatched, "")
    assert ProgressTimedOut(ROUND) not in dispatched
    monitors.stop()


async def test_a_hang_policy_that_is_removed_misses_no_steps() -> None:
    monitors, dispatched = guarded_monitors(None, progress_timeout=0.01, last_steps=())
    monitors.watch_for_hangs(round_start(0.01))
    await until_guarded(dispatched, without_steps("pod", 0.02))
    monitors.watch_for_hangs(round_start(0.0))
    await until_guarded(dispatched, "")


async def test_a_first_step_may_take_twice_the_time_out_unless_it_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    for patient, watched in ((600.0, 0.02), (0.01, 0.01)):
        monkeypatch.setattr("elasticjob._runtime.agent.monitoring.progress.hangs.PATIENT_SECONDS", patient)
        told = asyncio.get_running_loop().create_future()
        monitor = HangMonitor(lambda: (), lambda: None, told.set_result)
        monitor.start(0.01)
        assert await asyncio.wait_for(told, 10) == watched
        monitor.stop()


async def test_an_overdue_collective_ends_the_round_unless_a_hang_policy_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = []
    monkeypatch.setattr(HangMonitor, "start", lambda _self, timeout, **_: watched.append(timeout))
    guard = HangGuard(600.0, by_collectives=True)
    monitors, dispatched = guarded_monitors(guard)
    monitors.guard_reported()
    assert not watched, "torch finds the collective"
    monitors.collective_overdue()
    assert dispatched == [HangGuardKnown(guard.status), ProgressTimedOut(ROUND)]
    monitors, dispatched = guarded_monitors(None, progress_timeout=600.0)
    monitors.guard_reported()
    monitors.collective_overdue()
    assert dispatched == [HangGuardKnown("")], "the hangPolicy watches a rank that has made a step"
    monitors, dispatched = guarded_monitors(None, progress_timeout=600.0, last_steps=())
    monitors.guard_reported()
    monitors.collective_overdue()
    assert dispatched == [HangGuardKnown(""), ProgressTimedOut(ROUND)], "it does not watch a rank before its first step"

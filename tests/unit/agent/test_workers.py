"""Workers that cannot be started, and workers that survive SIGKILL."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elasticjob._runtime.agent.config import AgentConfig, read_config
from elasticjob._runtime.agent.monitoring.exits import stuck_processes
from elasticjob._runtime.agent.monitoring.exits.stuck_processes import BLOCKED_POLLS, BlockedThread
from elasticjob._runtime.agent.processes import descendants, signal_one
from elasticjob._runtime.agent.reporting.worker_output import OutputSink
from elasticjob._runtime.agent.start_workers.command import parse_command
from elasticjob._runtime.agent.start_workers.launcher import Launcher
from elasticjob._runtime.agent.workers import stop_sequence
from elasticjob._runtime.agent.workers import worker_group as workers_module
from elasticjob._runtime.agent.workers.processes.worker_process import IN_ROUND
from elasticjob._runtime.agent.workers.spares import spare_decisions, spares
from elasticjob._runtime.agent.workers.worker_group import WorkerGroup
from elasticjob._runtime.contract.messages import FailureClass, StartRound
from elasticjob._runtime.contract.names import Env, RoundId
from elasticjob._runtime.system.code_root import CODE_ROOT

START = StartRound(RoundId(1, 0, 1), 0, 1, 0, 1, 0, 1, "127.0.0.1", 4567, 0, 3)


@pytest.fixture
def config() -> AgentConfig:
    return read_config(
        {
            **os.environ, Env.RUN_ID: "uid", Env.NODE_KEY: "00ff", Env.INDEX: "0", Env.POD_NAME: "job-0-0",
            Env.POD_IP: "127.0.0.1", Env.STORE_ENDPOINT: "127.0.0.1:1", Env.PRELOAD: "",
        }
    )  # fmt: skip


@pytest.fixture
def unkillable(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Process ids that the agent signals; no signal has an effect, as in an uninterruptible sleep."""
    signalled: list[int] = []
    monkeypatch.setattr(stop_sequence, "kill", signalled.extend)
    monkeypatch.setattr(stuck_processes, "KILL_TIMEOUT", 0.05)
    monkeypatch.setattr(stop_sequence, "POLL_INTERVAL", 0.01)
    yield signalled
    for pid in set(signalled):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


ASKS_FOR_SPARE = """
import os, socket, time
from elasticjob._runtime.contract.names import Env, RoundId
from elasticjob._runtime.contract.restart_messages import Calling, Parked, to_packet
from elasticjob.training import progress_channel
round_id = RoundId.parse(os.environ[Env.ROUND])
agent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
agent.connect(os.environ[Env.RESTART_SOCKET])
agent.send(to_packet(Parked(round_id) if round_id.is_prestarted else Calling(round_id, spare_process=True)))
progress_channel.progress(1)
time.sleep(600)
"""


def open_descriptors() -> list[Path]:
    return sorted(Path("/proc/self/fd").iterdir())


async def sleeping_worker(config: AgentConfig, folder: Path) -> WorkerGroup:
    return await started(config, folder, ["sleep", "600"])


async def started(config: AgentConfig, folder: Path, command: list[str]) -> WorkerGroup:
    launcher = Launcher(parse_command(command), config.env, (), 2)
    null = os.open(os.devnull, os.O_WRONLY)
    workers = WorkerGroup(config, launcher, folder, OutputSink(null), OutputSink(null))
    workers.expect_start()
    assert await workers.start(START) is None
    return workers


async def test_a_worker_stuck_in_the_kernel_is_abandoned_and_the_node_is_unhealthy(
    config: AgentConfig, tmp_path: Path, unkillable: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_sequence, "blocked_threads", lambda pids: frozenset((pid, 7) for pid in pids))
    workers = await sleeping_worker(config, tmp_path)
    failure = await workers.stop(0.0)
    assert failure is not None
    assert failure.kind is FailureClass.DEVICE_UNHEALTHY
    assert str(unkillable[0]) in failure.message
    assert "in an uninterruptible sleep" in failure.message
    assert failure.suspected, "the first time, the machine is not avoided"
    assert await workers.stop(0.0) is None, "the agent's exit does not wait for it again"


async def test_a_worker_whose_memory_is_being_freed_is_waited_for(
    config: AgentConfig, tmp_path: Path, unkillable: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is never seen in an uninterruptible sleep, or uses the processor between two looks."""
    looks = 0

    def at_work(pids: set[int]) -> frozenset[BlockedThread]:
        nonlocal looks
        looks += 1
        if looks == 4 * BLOCKED_POLLS:  # all is freed
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        return frozenset((pid, looks) for pid in pids) if looks < 2 * BLOCKED_POLLS else frozenset()

    monkeypatch.setattr(stop_sequence, "blocked_threads", at_work)
    workers = await sleeping_worker(config, tmp_path)
    asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, workers.reap)
    assert await workers.stop(0.0) is None
    asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
    assert looks >= 4 * BLOCKED_POLLS
    unkillable.clear()  # it has been reaped


async def test_the_agent_does_not_wait_for_ever(
    config: AgentConfig, tmp_path: Path, unkillable: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_sequence, "LONGEST_KILL", 0.2)
    workers = await sleeping_worker(config, tmp_path)
    failure = await workers.stop(0.0)
    assert failure is not None
    assert f"still alive 0 s after SIGKILL: {unkillable[0]}" in failure.message
    assert failure.suspected


@pytest.mark.parametrize("pipes", [0, 1, 3], ids=["no pipe", "one pipe", "the first worker's pipes"])
async def test_workers_that_cannot_be_prepared_are_a_start_error_and_leave_nothing_open(
    config: AgentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipes: int
) -> None:
    made: list[tuple[int, int]] = []
    pipe = os.pipe

    def limited_pipe() -> tuple[int, int]:
        if len(made) == pipes:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        made.append(pipe())
        return made[-1]

    launcher = Launcher(parse_command(["true"]), config.env, (), 2)
    null = os.open(os.devnull, os.O_WRONLY)
    workers = WorkerGroup(replace(config, local_world_size=2), launcher, tmp_path, OutputSink(null), OutputSink(null))
    gc.collect()  # what earlier tests left must not be closed meanwhile
    before = open_descriptors()
    monkeypatch.setattr(os, "pipe", limited_pipe)
    workers.expect_start()
    failure = await workers.start(START)
    assert failure is not None
    assert (failure.kind, failure.pod) == (FailureClass.START_ERROR, "job-0-0")
    assert "Too many open files" in failure.message
    assert await workers.stop(0.0) is None
    assert open_descriptors() == before


async def test_a_grace_period_in_progress_can_be_shortened(config: AgentConfig, tmp_path: Path) -> None:
    launcher = Launcher(parse_command(["sh", "-c", "trap '' TERM; while :; do sleep 1; done"]), config.env, (), 2)
    null = os.open(os.devnull, os.O_WRONLY)
    workers = WorkerGroup(config, launcher, tmp_path, OutputSink(null), OutputSink(null))
    asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, workers.reap)
    workers.expect_start()
    assert await workers.start(START) is None
    stop = asyncio.create_task(workers.stop(600.0))
    await asyncio.sleep(0)  # the stop begins
    assert workers.stopping
    workers.limit_grace(600.0)
    workers.limit_grace(0.05)
    assert await asyncio.wait_for(stop, 60) is None
    asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)


async def end(workers: WorkerGroup, pid: int) -> None:
    """Kill a worker that counts as exiting, and wait until it is reaped."""
    signal_one(pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        while workers.table.get(pid) is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def remove_handler() -> None:
    asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)


@pytest.mark.parametrize("reason", ["", "it has /dev/nvidia0 open"])
async def test_a_start_waits_for_an_exiting_worker_only_if_it_holds_what_the_new_one_may_need(
    config: AgentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    monkeypatch.setattr(workers_module, "why_new_workers_must_wait", lambda _: reason)
    workers = await sleeping_worker(config, tmp_path)
    asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, workers.reap)
    (pid,) = workers.table.pids(IN_ROUND)
    workers.process_exits(pid, -signal.SIGKILL)
    (ended,) = workers.reap()
    assert ended.failure is not None
    assert ended.failure.signal == "SIGKILL"
    assert await workers.stop(0.0) is None
    assert pid in descendants(os.getpid()), "a stop does not wait for it"

    workers.expect_start()
    start = asyncio.create_task(workers.start(replace(START, round=RoundId(1, 0, 2))))
    await asyncio.sleep(0)  # the start begins
    assert bool(workers.table.pids(IN_ROUND)) == (not reason)
    await end(workers, pid)
    assert workers.reap() == [], "it is reported once"
    assert await start is None
    assert await workers.stop(0.0) is None
    remove_handler()


async def test_a_workers_end_is_reported_before_it_is_known_what_the_worker_holds(
    config: AgentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All nodes wait for the report."""
    order: list[object] = []

    def why_new_workers_must_wait(pid: int) -> str:
        order.append(pid)
        return ""

    monkeypatch.setattr(workers_module, "why_new_workers_must_wait", why_new_workers_must_wait)
    workers = await sleeping_worker(config, tmp_path)
    workers.on_end = lambda: order.extend(ended.local_rank for ended in workers.reap())
    (pid,) = workers.table.pids(IN_ROUND)
    workers.process_exits(pid, -signal.SIGKILL)
    assert order == [0, pid]
    os.kill(pid, signal.SIGKILL)
    await asyncio.to_thread(os.waitpid, pid, 0)


async def test_a_start_that_waits_for_an_exiting_worker_does_not_delay_a_stop(
    config: AgentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_module, "why_new_workers_must_wait", lambda _: "it has /dev/nvidia0 open")
    workers = await sleeping_worker(config, tmp_path)
    asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, workers.reap)
    (pid,) = workers.table.pids(IN_ROUND)
    workers.process_exits(pid, -signal.SIGKILL)
    assert await workers.stop(0.0) is None
    workers.expect_start()
    start = asyncio.create_task(workers.start(replace(START, round=RoundId(1, 0, 2))))
    await asyncio.sleep(0)  # the start begins
    assert await asyncio.wait_for(workers.stop(0.0), 60) is None
    assert await start is None
    assert descendants(os.getpid()) == {pid}, "what started meanwhile was killed"
    await end(workers, pid)
    remove_handler()


async def test_a_stop_kills_what_an_exiting_worker_has_started(
    config: AgentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing reports the end of these processes to the agent: they are not its children yet."""
    monkeypatch.setattr(stuck_processes, "KILL_TIMEOUT", 600.0)
    os.mkfifo(tmp_path / "ready")
    command = f"sleep 600 & echo ready > {tmp_path}/ready; wait; sleep 600"
    workers = await started(config, tmp_path, ["sh", "-c", command])
    ready = await asyncio.to_thread((tmp_path / "ready").open)
    asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, workers.reap)
    (pid,) = workers.table.pids(IN_ROUND)
    assert await asyncio.to_thread(ready.read, 6) == "ready\n"
    ready.close()
    (child,) = descendants(pid)
    workers.process_exits(pid, -signal.SIGKILL)
    assert await asyncio.wait_for(workers.stop(0.0), 60) is None
    assert child not in descendants(os.getpid())
    await end(workers, pid)
    assert await workers.stop(0.0) is None
    remove_handler()


async def test_an_exiting_worker_that_does_not_end_makes_the_node_unhealthy(
    config: AgentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_module, "why_new_workers_must_wait", lambda _: "it has /dev/nvidia0 open")
    monkeypatch.setattr(stop_sequence, "LONGEST_KILL", 0.1)
    workers = await sleeping_worker(config, tmp_path)
    (pid,) = workers.table.pids(IN_ROUND)
    workers.process_exits(pid, -signal.SIGKILL)
    assert await workers.stop(0.0) is None
    workers.expect_start()
    failure = await workers.start(replace(START, round=RoundId(1, 0, 2)))
    assert failure is not None
    assert failure.kind is FailureClass.DEVICE_UNHEALTHY
    assert str(pid) in failure.message
    os.kill(pid, signal.SIGKILL)
    await asyncio.to_thread(os.waitpid, pid, 0)


async def test_an_exit_code_of_0_counts_before_the_worker_is_reaped_only_if_the_agent_stops_it(
    config: AgentConfig, tmp_path: Path
) -> None:
    """The code may be unknown."""
    workers = await sleeping_worker(config, tmp_path)
    asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, workers.reap)
    (pid,) = workers.table.pids(IN_ROUND)
    workers.process_exits(pid, 0)
    assert workers.reap() == []
    stop = asyncio.create_task(workers.stop(600.0, signal.SIGCONT))
    await asyncio.sleep(0)  # the stop begins
    workers.process_exits(pid, 0)
    (ended,) = workers.reap()
    assert ended.failure is None
    assert await stop is None
    await end(workers, pid)
    remove_handler()


async def test_spare_processes_end_on_a_frozen_node_and_come_back_with_its_next_round(
    config: AgentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that was cut off kills its workers, and takes part in rounds again."""
    monkeypatch.setattr(spares, "SPARE_INTERVAL", 0.01)
    config = replace(config, env={**config.env, "PYTHONPATH": CODE_ROOT})
    others = descendants(os.getpid())

    async def until_running(processes: int) -> None:
        for _ in range(3000):
            if len(descendants(os.getpid()) - others) == processes:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"there are never {processes} processes")

    workers = await started(config, tmp_path, [sys.executable, "-c", ASKS_FOR_SPARE])
    asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, workers.reap)
    await until_running(2)
    workers.freeze(True)
    await until_running(1)
    assert await workers.stop(0.0) is None
    workers.expect_start()
    assert await workers.start(replace(START, round=RoundId(1, 0, 2))) is None
    await until_running(2)
    assert await workers.stop(0.0) is None
    asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
    await until_running(0)


@pytest.fixture
async def spare_log(
    config: AgentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[Callable[..., Awaitable[str]]]:
    """Returns what the log says of the spare process of a worker, up to a text; the worker runs this script."""
    monkeypatch.setattr(spares, "SPARE_INTERVAL", 0.01)
    monkeypatch.setattr(spare_decisions, "SHORTEST_WAIT", 0.05)
    monkeypatch.setattr(spare_decisions, "FIRST_NOTE", 0.05)
    caplog.set_level("INFO")
    config = replace(config, env={**config.env, "PYTHONPATH": CODE_ROOT})
    running: list[WorkerGroup] = []

    async def text(source: str, end: str) -> str:
        running.append(workers := await started(config, tmp_path, [sys.executable, "-c", source]))
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, workers.reap)
        async with asyncio.timeout(60):
            while end not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return caplog.text

    yield text
    for workers in running:
        await workers.stop(0.0)
    asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)


SpareLog = Callable[[str, str], Awaitable[str]]


async def test_a_script_that_reports_no_steps_gets_its_spare_process_after_a_time(spare_log: SpareLog) -> None:
    text = await spare_log(ASKS_FOR_SPARE.replace("progress_channel.progress(1)", ""), "waits at its function")
    order = [
        "spare processes of local ranks 0 start once all workers of this pod have made a step",
        "starts as the spare of local rank 0",
        "waits at its function, as the spare of local rank 0",
    ]
    assert sorted(order, key=text.index) == order


async def test_a_spare_process_that_does_not_come_to_its_function_says_where_it_is(spare_log: SpareLog) -> None:
    late = """if round_id.is_prestarted:
    progress_channel.enable_stack_dumps()
    time.sleep(600)
agent = socket"""
    text = await spare_log(ASKS_FOR_SPARE.replace("agent = socket", late, 1), "is not at its function after")
    assert "main thread is in <module>" in text.partition("is not at its function after")[2]


async def test_nor_does_one_that_writes_no_stacks_stay_unexplained(spare_log: SpareLog) -> None:
    late = "if round_id.is_prestarted: time.sleep(600)\nagent = socket"
    text = await spare_log(ASKS_FOR_SPARE.replace("agent = socket", late, 1), "is not at its function after")
    assert "it writes no stacks; its main thread: S (sleeping)" in text

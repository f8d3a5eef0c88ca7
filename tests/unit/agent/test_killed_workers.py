"""A worker that is killed in any state of its process is reported once, unless the end of its function was before."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from elasticjob._runtime.agent.config import read_config
from elasticjob._runtime.agent.reporting.worker_output import OutputSink, Tail
from elasticjob._runtime.agent.start_workers.command import parse_command
from elasticjob._runtime.agent.start_workers.launcher import Launcher
from elasticjob._runtime.agent.workers import worker_group as group_module
from elasticjob._runtime.agent.workers.processes.process_table import ProcessTable
from elasticjob._runtime.agent.workers.processes.restartable_workers import RestartableWorkers
from elasticjob._runtime.agent.workers.processes.worker_process import ProcessEvent, ProcessState
from elasticjob._runtime.agent.workers.start_window import StartWindow
from elasticjob._runtime.agent.workers.worker import Worker
from elasticjob._runtime.agent.workers.worker_group import WorkerGroup
from elasticjob._runtime.contract.messages import FailureClass
from elasticjob._runtime.contract.names import Env, RoundId

S, E = ProcessState, ProcessEvent
PID = 1 << 30
"""No process has this id."""
PATHS: dict[ProcessState, tuple[ProcessState, list[ProcessEvent]]] = {
    S.LOADING: (S.LOADING, []),
    S.PARKED: (S.LOADING, [E.AT_FUNCTION]),
    S.SPARE_LOADING: (S.SPARE_LOADING, []),
    S.SPARE: (S.SPARE_LOADING, [E.AT_FUNCTION]),
    S.CALLED: (S.LOADING, [E.AT_FUNCTION, E.CALL]),
    S.RUNNING: (S.RUNNING, []),
    S.RETURNED: (S.RUNNING, [E.AT_FUNCTION]),
    S.INTERRUPTED: (S.RUNNING, [E.INTERRUPT]),
    S.KILLED: (S.LOADING, [E.KILL]),
    S.EXITING: (S.LOADING, [E.DISCARD]),
    S.ABANDONED: (S.RUNNING, [E.ABANDON]),
}
"""How a process comes to each state."""
REPORTED = {S.RUNNING, S.INTERRUPTED}
"""The states in which its end is news to the agent."""


class NoPipe:
    def drain(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def reaped(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What the kernel has for the agent to reap: (process id, exit code)."""
    waiting: list[tuple[int, int]] = []

    def reap() -> list[tuple[int, int]]:
        found, waiting[:] = list(waiting), []
        return found

    monkeypatch.setattr(group_module, "reap", reap)
    return waiting


@pytest.fixture
async def workers(tmp_path: Path) -> WorkerGroup:
    environ = {
        **os.environ, Env.RUN_ID: "uid", Env.NODE_KEY: "00ff", Env.INDEX: "0", Env.POD_NAME: "job-0-0",
        Env.POD_IP: "127.0.0.1", Env.STORE_ENDPOINT: "127.0.0.1:1", Env.PRELOAD: "",
    }  # fmt: skip
    config = read_config(environ)
    null = os.open(os.devnull, os.O_WRONLY)
    launcher = Launcher(parse_command(["true"]), config.env, (), 2)
    return WorkerGroup(config, launcher, tmp_path, OutputSink(null), OutputSink(null))


def add(workers: WorkerGroup, folder: Path, state: ProcessState) -> None:
    pipes = cast(Any, (NoPipe(), NoPipe()))
    worker = Worker(RoundId(1, 0, 1), 0, 0, str(folder / "error.json"), str(folder / "stacks"), pipes, (Tail(), Tail()))
    begin, events = PATHS[state]
    workers.table.add(PID, worker, begin)
    for event in events:
        workers.table.apply(PID, event)
    assert workers.table.state(PID) is state


def test_there_is_a_way_to_each_state_that_the_table_has() -> None:
    assert PATHS.keys() == set(S) - {S.ENDED}


@pytest.mark.parametrize("state", PATHS)
@pytest.mark.parametrize("seen", ["reaped", "exiting first", "exiting twice"])
async def test_its_end_is_reported_once(
    workers: WorkerGroup, reaped: list[tuple[int, int]], tmp_path: Path, state: ProcessState, seen: str
) -> None:
    add(workers, tmp_path, state)
    ended = []
    for _ in range(["reaped", "exiting first", "exiting twice"].index(seen)):
        workers.process_exits(PID, -signal.SIGKILL)
        ended += workers.reap()
    reaped.append((PID, -signal.SIGKILL))
    ended += workers.reap()
    assert workers.table.get(PID) is None
    assert len(ended) == (state in REPORTED)
    for worker in ended:
        assert worker.failure is not None
        assert (worker.failure.kind, worker.failure.signal) == (FailureClass.KILLED, "SIGKILL")
    reaped.append((PID, 0))
    assert workers.reap() == [], "another process with this id is no worker"


async def test_the_end_of_a_called_process_is_reported_once_its_round_has_started(
    workers: WorkerGroup, reaped: list[tuple[int, int]], tmp_path: Path
) -> None:
    add(workers, tmp_path, S.CALLED)
    workers.expect_start()
    reaped.append((PID, -signal.SIGKILL))
    assert workers.reap() == []
    workers.table.apply(PID, E.START_OVER)
    workers.expect_no_start()
    (ended,) = workers.reap()
    assert ended.failure is not None


@pytest.fixture
async def window(tmp_path: Path) -> AsyncIterator[StartWindow]:
    restartable = RestartableWorkers(tmp_path)
    yield StartWindow(ProcessTable(), restartable)
    restartable.close()


async def test_exit_codes_of_unknown_children_are_kept_only_while_processes_start(window: StartWindow) -> None:
    window.keep_exit_code(PID, 1)
    assert not window.take_exit_codes()
    window.open()
    window.keep_exit_code(PID, 1)
    window.close()
    assert window.take_exit_codes() == {PID: 1}
    assert not window.take_exit_codes()


async def test_a_stop_waits_until_processes_have_started_or_never_will(window: StartWindow) -> None:
    for end in (window.close, window.release_waiters):
        window.open()
        stop = asyncio.create_task(window.until_closed())
        await asyncio.sleep(0)
        assert window.is_open
        assert not stop.done()
        end()
        await asyncio.wait_for(stop, 10)

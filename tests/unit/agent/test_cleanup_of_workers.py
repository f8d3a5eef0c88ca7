"""The helpers that remove what workers left in shared memory have seconds for it, and not for ever."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from elasticjob._runtime.agent import processes
from elasticjob._runtime.agent.config import read_config
from elasticjob._runtime.agent.processes import become_subreaper
from elasticjob._runtime.agent.reporting.worker_output import OutputSink
from elasticjob._runtime.agent.start_workers.command import parse_command
from elasticjob._runtime.agent.start_workers.launcher import Launcher
from elasticjob._runtime.agent.workers.stop_sequence import CLEANUP_TIMEOUT, LOAD_TIMEOUT
from elasticjob._runtime.agent.workers.worker_group import WorkerGroup
from elasticjob._runtime.contract.messages import StartRound
from elasticjob._runtime.contract.names import Env, RoundId
from support.agent.slow_tracker import CODE

START = StartRound(RoundId(1, 0, 1), 0, 1, 0, 1, 0, 1, "127.0.0.1", 4567, 0, 3)
PR_SET_CHILD_SUBREAPER = 36
BUSY = 8
"""Seconds that a tracker may need on a busy machine to get to its work."""


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


@dataclass
class Stopping:
    """A worker that a stop has killed, while its tracker waits for the gate."""

    stop: asyncio.Task[object]
    tracker: int
    memory: Path
    gate: Path
    commands: dict[int, list[bytes]]
    """What /proc shows as command lines, where it is not what it is."""
    ahead: float = 0.0
    """By how many seconds the event loop's clock is ahead of the machine's."""

    async def pass_seconds(self, seconds: int) -> None:
        for _ in range(seconds):
            self.ahead += 1.0
            await asyncio.sleep(0.01)  # the timers that are due run


@pytest.fixture
def subreaper() -> Iterator[None]:
    """Let this process adopt orphans in one test only: in others their end could not be seen."""
    become_subreaper()
    yield
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.fixture
async def stopping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subreaper: None, request: pytest.FixtureRequest
) -> AsyncIterator[Stopping]:
    """With the parameter "loading" the kernel seems to load the program of the tracker still."""
    gate, loop = tmp_path / "gate", asyncio.get_running_loop()
    script = tmp_path / "script.py"
    script.write_text(f"{CODE}\ncreate({str(gate)!r})\nsignal.pause()\n")
    environ = {
        **os.environ, Env.RUN_ID: "uid", Env.NODE_KEY: "00ff", Env.INDEX: "0", Env.POD_NAME: "job-0-0",
        Env.POD_IP: "127.0.0.1", Env.STORE_ENDPOINT: "127.0.0.1:1", Env.PRELOAD: "",
    }  # fmt: skip
    config = read_config(environ)
    launcher = Launcher(parse_command([sys.executable, str(script)]), config.env, (), 2)
    output = tmp_path / "output"
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    workers = WorkerGroup(config, launcher, tmp_path, OutputSink(file), OutputSink(file))
    loop.add_signal_handler(signal.SIGCHLD, workers.reap)
    workers.expect_start()
    assert await workers.start(START) is None
    await until(lambda: "memory" in output.read_text())
    found = re.search(r"worker (\d+) tracker (\d+) memory (\S+)\n", output.read_text())
    assert found is not None
    worker, tracker, memory = int(found[1]), int(found[2]), Path("/dev/shm") / found[3]
    assert memory.exists()
    commands = {tracker: [b""]} if getattr(request, "param", "") == "loading" else {}
    command_line = processes.read_command_line
    monkeypatch.setattr(processes, "read_command_line", lambda pid: commands.get(pid) or command_line(pid))
    stopping = Stopping(asyncio.create_task(workers.stop(0.0)), tracker, memory, gate, commands)
    monkeypatch.setattr(loop, "time", lambda: time.monotonic() + stopping.ahead)
    await until(lambda: not Path(f"/proc/{worker}").exists())
    yield stopping
    loop.remove_signal_handler(signal.SIGCHLD)
    with suppress(ProcessLookupError):
        os.kill(tracker, signal.SIGKILL)
    memory.unlink(missing_ok=True)
    os.close(file)


async def test_a_tracker_that_takes_seconds_removes_what_a_worker_left(stopping: Stopping) -> None:
    await stopping.pass_seconds(BUSY)
    assert not stopping.stop.done()
    stopping.gate.touch()
    assert await asyncio.wait_for(stopping.stop, 30) is None
    assert not stopping.memory.exists()


async def test_a_tracker_that_does_not_end_is_killed(stopping: Stopping) -> None:
    await stopping.pass_seconds(int(CLEANUP_TIMEOUT) + 1)
    assert await asyncio.wait_for(stopping.stop, 30) is None
    await until(lambda: not Path(f"/proc/{stopping.tracker}").exists())
    assert stopping.memory.exists(), "nothing else removes it"


@pytest.mark.parametrize("stopping", ["loading"], indirect=True)
async def test_a_tracker_whose_program_is_loaded_late_removes_what_a_worker_left(stopping: Stopping) -> None:
    stopping.commands.clear()
    await stopping.pass_seconds(BUSY)
    stopping.gate.touch()
    assert await asyncio.wait_for(stopping.stop, 30) is None
    assert not stopping.memory.exists()


@pytest.mark.parametrize("stopping", ["loading"], indirect=True)
async def test_another_program_is_killed_once_it_is_loaded(stopping: Stopping) -> None:
    assert not stopping.stop.done()
    stopping.commands[stopping.tracker] = [b"other"]
    assert await asyncio.wait_for(stopping.stop, CLEANUP_TIMEOUT / 2) is None, "it does not get the time of a tracker"
    assert stopping.memory.exists(), "no tracker has removed it"


@pytest.mark.parametrize("stopping", ["loading"], indirect=True)
async def test_a_program_that_is_not_loaded_in_time_is_killed(stopping: Stopping) -> None:
    assert not stopping.stop.done()
    await stopping.pass_seconds(int(LOAD_TIMEOUT) + 1)
    assert await asyncio.wait_for(stopping.stop, 30) is None
    assert stopping.memory.exists()

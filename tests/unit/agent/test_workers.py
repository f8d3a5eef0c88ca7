"""Workers that cannot be ended: the kernel's part is played at the seam to processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticjob.agent import workers as workers_module
from elasticjob.agent.config import AgentConfig, read_config
from elasticjob.agent.reporting.worker_output import OutputSink
from elasticjob.agent.start_workers.command import parse_command
from elasticjob.agent.start_workers.launcher import Launcher
from elasticjob.agent.workers import WorkerGroup
from elasticjob.contract.messages import FailureClass, StartRound
from elasticjob.contract.names import Env, RoundId

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
    """Signals reach no process, as in an uninterruptible sleep; the processes they were meant for."""
    meant: list[int] = []
    monkeypatch.setattr(workers_module, "signal_group", lambda pid, _: meant.append(pid))
    monkeypatch.setattr(workers_module, "kill", lambda _: None)
    monkeypatch.setattr(workers_module, "KILL_TIMEOUT", 0.05)
    yield meant
    for pid in set(meant):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


async def test_a_worker_stuck_in_the_kernel_is_abandoned_and_the_node_is_not_fit(
    config: AgentConfig, tmp_path: Path, unkillable: list[int]
) -> None:
    launcher = Launcher(parse_command(["sleep", "600"]), config.env, (), 2)
    null = os.open(os.devnull, os.O_WRONLY)
    workers = WorkerGroup(config, launcher, tmp_path, OutputSink(null), OutputSink(null))
    workers.expect_start()
    assert await workers.start(START) is None
    failure = await workers.stop(0.0)
    assert failure is not None
    assert failure.kind is FailureClass.DEVICE_UNHEALTHY
    assert str(unkillable[0]) in failure.message
    assert await workers.stop(0.0) is None, "the agent's own end does not wait for it again"

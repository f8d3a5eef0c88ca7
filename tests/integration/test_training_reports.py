"""What a script reports of its training reaches the coordinator, through a real agent."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from elasticjob._runtime.contract.messages import (
    ExpectedPod,
    Metric,
    OperatorView,
    Outcome,
    PodState,
    Report,
    RoundSettings,
)
from elasticjob._runtime.contract.names import Env
from elasticjob._runtime.control_link.link import LinkGate, LinkRole, Welcome, connect
from elasticjob._runtime.rendezvous.state import initial_state
from elasticjob._runtime.store.server import StoreServer
from elasticjob._runtime.store_pod.coordinator import Coordinator
from support.local.run import PROGRAM

KEYS = {LinkRole.AGENT: b"n" * 32, LinkRole.OPERATOR: b"o" * 32}
SETTINGS = RoundSettings(min_nodes=1, max_nodes=1, target=1)
TRAINS = """
import elasticjob
for step in range(1, 4):
    elasticjob.progress(step, total=3, metrics={"loss": 1 / step})
"""


async def test_the_last_report_arrives_with_the_outcome(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    coordinator = Coordinator(initial_state(SETTINGS, attempt=1, store=0, now=time.monotonic()))
    server = StoreServer(links=LinkGate(Welcome("run", 1, 0), KEYS, coordinator.serve).accept)
    port = await server.start("127.0.0.1")
    coordinator.start()
    env = {
        Env.JOB: "j", Env.RUN_ID: "run", Env.EXECUTION_ATTEMPT: "1", Env.NODE_KEY: KEYS[LinkRole.AGENT].hex(),
        Env.INDEX: "0", Env.INCARNATION: "0", Env.POD_NAME: "j-0-0", Env.POD_IP: "127.0.0.1", Env.PRELOAD: "",
        Env.NPROC_PER_NODE: "2", Env.STORE_ENDPOINT: f"127.0.0.1:{port}",
        Env.TERMINATION_LOG: str(tmp_path / "end"),
    }  # fmt: skip
    operator = await connect("127.0.0.1", port, role=LinkRole.OPERATOR, key=KEYS[LinkRole.OPERATOR], run_id="run")
    operator.send(OperatorView(1, 1, SETTINGS, 0, None, (ExpectedPod(0, 0, "j-0-0", PodState.RUNNING),)))
    agent = await asyncio.create_subprocess_exec(
        *PROGRAM, "agent", "--", sys.executable, str(tmp_path / "train.py"), env={**os.environ, **env}
    )
    try:
        report: object = None
        while not (isinstance(report, Report) and report.outcome is not None):
            report = await asyncio.wait_for(operator.receive(), 30)
        assert (report.outcome, await asyncio.wait_for(agent.wait(), 30)) == (Outcome.SUCCEEDED, 0)
        progress = report.progress
        assert progress is not None
        assert (progress.step, progress.total, progress.metrics) == (3, 3, (Metric("loss", "0.333333"),))
    finally:
        if agent.returncode is None:
            agent.kill()
            await agent.wait()
        operator.close()
        coordinator.stop()
        await server.close()

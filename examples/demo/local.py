"""The demo without a cluster: the same job and the same deeds, as processes of this machine."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from elasticjob.contract.messages import EndReason, Report
from elasticjob.local.local_run import LocalRun
from elasticjob.local.manifest import LocalJob, load_manifest, parse_local_job
from elasticjob.local.screen import RunView
from support.logbook import Step
from timeline import Deed, Snapshot

SCRIPT = Path(__file__).resolve().parents[1] / "digits/train.py"
_STEP = re.compile(r"\bstep=(\d+)\b.*\bloss=([-\d.e]+)\b.*\bworld=(\d+)\b.*\btime=([\d.]+)")
FAULTS = (EndReason.WORKER_FAILED, EndReason.AGENT_LOST, EndReason.NODE_LEFT)
PATIENCE = 180.0
"""Seconds until a deed counts as failed."""


@dataclass
class Stage:
    """The `Screen` of the run, which remembers steps and statuses for the timeline."""

    console: Console
    captures_output: bool = True
    steps: list[Step] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    deeds: list[Deed] = field(default_factory=list)
    view: RunView | None = None
    said: dict[str, Any] = field(default_factory=dict)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def print_status(self, text: str) -> None:
        self.console.print(f"    {text}", markup=False, soft_wrap=True)

    def print_output(self, text: str) -> None:
        if found := _STEP.search(text):
            self.steps.append(Step(float(found[4]), "", int(found[1]), float(found[2]), int(found[3])))
            self._news.set()

    def show(self, view: RunView) -> None:
        self.view = view
        if view.report is not None:
            self._remember(view.report)
            self.snapshots.append(Snapshot(time.time(), _status(view.report, self.said)))
        self._news.set()

    def close(self) -> None:
        """Nothing to put back."""

    def _remember(self, report: Report) -> None:
        ended = [e for e in report.ended_rounds if e.reason in FAULTS]
        if ended:
            last = ended[-1]
            self.said = {"ended": last.reason.value, "failure": last.failure or self.said.get("failure")}

    async def until(self, reached: Callable[[], bool]) -> None:
        """Wait for news until `reached` holds."""
        async with asyncio.timeout(PATIENCE):
            while not reached():
                self._news.clear()
                await self._news.wait()


def _status(report: Report, said: dict[str, Any]) -> dict[str, Any]:
    """What a job's status would say, as far as the timeline reads it."""
    status: dict[str, Any] = {"worldSize": report.world_size, "conditions": []}
    if report.formed_at:
        status["lastRendezvousTime"] = datetime.fromtimestamp(report.formed_at, UTC).isoformat()
    if said:
        reason = "WorldFormed" if report.formed_at else said["ended"]
        status["conditions"].append({"type": "Restarting", "reason": reason})
    if said.get("failure"):
        failure = said["failure"]
        status["lastFailure"] = {
            "class": failure.kind.value,
            "rank": failure.rank,
            "pod": failure.pod,
            "signal": failure.signal,
        }
    return status


def read(manifest: Path, checkpoints: str) -> LocalJob:
    """The example's manifest with this checkout's script in the place of the image's."""
    job = parse_local_job(load_manifest(str(manifest)))
    words = [w for w in job.command[2:] if not w.startswith("--checkpoint=")]
    return replace(job, command=(sys.executable, str(SCRIPT), *words, f"--checkpoint={checkpoints}"))


async def play(manifest: Path, console: Console) -> tuple[Stage, int]:
    """Run the job, do the deeds; what was seen, and the job's exit code."""
    with tempfile.TemporaryDirectory() as checkpoints:
        job, stage = read(manifest, checkpoints), Stage(console)
        driver = LocalRun(job, stage)
        size = job.settings.target
        stage.deeds.append(Deed(time.time(), f"elasticjob run {manifest.name}", size))
        run = asyncio.create_task(driver.run())
        try:
            await _act(stage, driver, size)
        finally:
            if not run.done() and sys.exc_info()[0] is not None:
                os.kill(os.getpid(), signal.SIGINT)  # the driver's own: its nodes leave
            code = await run
    return stage, code


async def _act(stage: Stage, driver: LocalRun, size: int) -> None:
    await stage.until(lambda: len(stage.steps) >= 25 * size)
    await _do(stage, "SIGKILL a worker process of node 1", lambda: _kill_worker(stage, 1), size)
    await _do(stage, "SIGKILL node 2, agent and worker", lambda: driver.kill(2), size)
    await _do(stage, "SIGKILL node 0, which has rank 0", lambda: driver.kill(0), size)
    await _do(stage, "scale to 4 nodes", lambda: driver.scale(4), 4)
    await _do(stage, "scale to 2 nodes", lambda: driver.scale(2), 2)


async def _do(stage: Stage, what: str, deed: Callable[[], object], world: int) -> None:
    moment = time.time()
    before = _formed(stage)
    stage.deeds.append(Deed(moment, what, world))
    stage.console.print(f"[bold red]>>>[/] {what}")
    deed()
    await stage.until(lambda: _formed(stage) > before and _size(stage) == world)
    formed = _formed(stage)
    await stage.until(lambda: sum(s.time > formed for s in stage.steps) >= 20 * world)


def _formed(stage: Stage) -> float:
    return stage.view.report.formed_at if stage.view and stage.view.report else 0.0


def _size(stage: Stage) -> int:
    return stage.view.report.world_size if stage.view and stage.view.report else 0


def _kill_worker(stage: Stage, index: int) -> None:
    """SIGKILL the newest child of a node's agent that leads a session: that is a worker."""
    assert stage.view is not None
    agent = next(p.pid for p in stage.view.pods if p.index == index)
    children = [int(c) for c in Path(f"/proc/{agent}/task/{agent}/children").read_text().split()]
    workers = [c for c in children if os.getsid(c) == c]
    os.kill(max(workers), signal.SIGKILL)

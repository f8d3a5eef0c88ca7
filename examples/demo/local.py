"""The demo without a cluster: the same job and the same faults, with processes of this machine."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from elasticjob._runtime.contract.messages import EndReason, Report
from elasticjob._runtime.local.local_run import LocalRun
from elasticjob._runtime.local.manifest.manifest import LocalJob, load_manifest, parse_local_job
from elasticjob._runtime.local.terminal.screen import RunView
from support.cluster.logbook import Step
from timeline import Action, Snapshot

EXAMPLES = Path(__file__).resolve().parents[1]
_STEP = re.compile(r"\bstep=(\d+)\b.*\bloss=([-\d.e]+)\b.*\bworld=(\d+)\b.*\btime=([\d.]+)")
FAULTS = (EndReason.WORKER_FAILED, EndReason.AGENT_LOST, EndReason.NODE_LEFT)
STEP_TIMEOUT = 180.0
"""Seconds within which training must recover after an action."""


@dataclass
class Stage:
    """The `Screen` of the run. It records steps and statuses for the timeline."""

    console: Console
    captures_output: bool = True
    steps: list[Step] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    view: RunView | None = None
    restart: dict[str, Any] = field(default_factory=dict)
    """Reason and failure of the last round that a fault ended."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def print_status(self, text: str) -> None:
        self.console.print(f"    {text}", markup=False, soft_wrap=True)

    def print_output(self, lines: Sequence[str]) -> None:
        for found in filter(None, map(_STEP.search, lines)):
            self.steps.append(Step(float(found[4]), "", int(found[1]), float(found[2]), int(found[3])))
            self._changed.set()

    def show(self, view: RunView) -> None:
        self.view = view
        if view.report is not None:
            self._record(view.report)
            self.snapshots.append(Snapshot(time.time(), _status(view.report, self.restart)))
        self._changed.set()

    def close(self) -> None:
        """Do nothing: the terminal is unchanged."""

    def _record(self, report: Report) -> None:
        ended = [e for e in report.ended_rounds if e.reason in FAULTS]
        if ended:
            last = ended[-1]
            self.restart = {"reason": last.reason.value, "failure": last.failure or self.restart.get("failure")}

    async def until(self, reached: Callable[[], bool]) -> None:
        """Wait until `reached` holds. It is evaluated again after each change."""
        async with asyncio.timeout(STEP_TIMEOUT):
            while not reached():
                self._changed.clear()
                await self._changed.wait()


def _status(report: Report, restart: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a job's status that the timeline reads."""
    status: dict[str, Any] = {"worldSize": report.world_size, "conditions": []}
    if report.formed_at:
        status["lastRendezvousTime"] = datetime.fromtimestamp(report.formed_at, UTC).isoformat()
    if restart:
        reason = "WorldFormed" if report.formed_at else restart["reason"]
        status["conditions"].append({"type": "Restarting", "reason": reason})
    if restart.get("failure"):
        failure = restart["failure"]
        status["lastFailure"] = {
            "class": failure.kind.value,
            "rank": failure.rank,
            "pod": failure.pod,
            "signal": failure.signal,
        }
    return status


def read(manifest: Path, checkpoints: str) -> LocalJob:
    """Return the manifest's job with the script of this checkout instead of the cluster's."""
    job = parse_local_job(load_manifest(str(manifest)))
    script = EXAMPLES / manifest.stem / "train.py"
    arguments = [f"--checkpoint={checkpoints}" if a.startswith("--checkpoint=") else a for a in job.command[2:]]
    return replace(job, command=(sys.executable, str(script), *arguments))


async def play(manifest: Path, console: Console) -> tuple[Stage, int]:
    """Run the job and all actions. Return the recorded stage and the job's exit code."""
    with tempfile.TemporaryDirectory() as checkpoints:
        job, stage = read(manifest, checkpoints), Stage(console)
        run = LocalRun(job, stage)
        size = job.settings.target
        stage.actions.append(Action(time.time(), f"elasticjob run {manifest.name}", size))
        task = asyncio.create_task(run.run())
        try:
            await _act(stage, run, size)
        finally:
            if not task.done() and sys.exc_info()[0] is not None:
                os.kill(os.getpid(), signal.SIGINT)  # handled by the run, which drains its nodes
            code = await task
    return stage, code


async def _act(stage: Stage, run: LocalRun, size: int) -> None:
    await stage.until(lambda: len(stage.steps) >= 25 * size)
    await _perform(stage, "SIGKILL a worker process of pod 1", lambda: _kill_worker(stage, 1), size)
    await _perform(stage, "SIGKILL pod 2, agent and worker", lambda: run.kill(2), size)
    await _perform(stage, "SIGKILL pod 0, which has rank 0", lambda: run.kill(0), size)
    await _perform(stage, "scale to 4 pods", lambda: run.scale(4), 4)
    await _perform(stage, "scale to 2 pods", lambda: run.scale(2), 2)


async def _perform(stage: Stage, what: str, action: Callable[[], object], world: int) -> None:
    """Perform the action, then wait until a new world of this size has trained some steps."""
    moment = time.time()
    before = _formed(stage)
    stage.actions.append(Action(moment, what, world))
    stage.console.print(f"[bold red]>>>[/] {what}")
    action()
    await stage.until(lambda: _formed(stage) > before and _size(stage) == world)
    formed = _formed(stage)
    await stage.until(lambda: sum(s.time > formed for s in stage.steps) >= 20 * world)


def _formed(stage: Stage) -> float:
    return stage.view.report.formed_at if stage.view and stage.view.report else 0.0


def _size(stage: Stage) -> int:
    return stage.view.report.world_size if stage.view and stage.view.report else 0


def _kill_worker(stage: Stage, index: int) -> None:
    """Send SIGKILL to a worker: the newest child of the node's agent that leads a session."""
    assert stage.view is not None
    agent = next(p.pid for p in stage.view.pods if p.index == index)
    children = [int(c) for c in Path(f"/proc/{agent}/task/{agent}/children").read_text().split()]
    workers = [c for c in children if os.getsid(c) == c]
    os.kill(max(workers), signal.SIGKILL)

"""Runs a job as processes of this machine: one store, N agents, and what the operator does for a job in a cluster."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from elasticjob.agent.machine import describe
from elasticjob.agent.processes import die_with_parent
from elasticjob.contract import codec
from elasticjob.contract.messages import Facts, Outcome, PodFact, PodState, Report, RoundEnded
from elasticjob.contract.names import Env, ExitCode, RoundId
from elasticjob.local.manifest import LocalJob
from elasticjob.store.link import LinkError, LinkRole, connect

INTERRUPTED = 130
_SHORT_LIFE = 5.0
"""Seconds: an agent that ends sooner is replaced after a delay that doubles."""
_MAX_DELAY = 30.0
_ROOT = Path(__file__).parents[2]


def program() -> list[str]:
    """The command line that runs this very code: the zip archive, or the package's folder."""
    return [sys.executable, str(_ROOT if _ROOT.is_file() else _ROOT / "elasticjob")]


class Driver:
    """One local run: `await Driver(job).run()` is the exit code."""

    def __init__(self, job: LocalJob) -> None:
        self._job = job
        self._keys = {role: secrets.token_hex(32) for role in LinkRole}
        self._run_id = str(uuid.uuid4())
        self._pods: dict[int, PodFact] = {}
        self._agents: dict[int, asyncio.subprocess.Process] = {}
        self._store: asyncio.subprocess.Process | None = None
        self._report: Report | None = None
        self._charged = 0
        self._charged_round: RoundId | None = None
        self._sequence = 0
        self._draining = False
        self._broken = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._link_send: Any = None

    async def run(self) -> int:
        """Start everything, follow the job to its end, leave no process behind."""
        loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupted)
        with tempfile.TemporaryDirectory(prefix=f"elasticjob-{self._job.name}-") as scratch:
            self._scratch = Path(scratch)
            self._port = _free_port()
            self._spawn(self._keep_store())
            self._spawn(self._follow())
            for slot in range(self._job.settings.target):
                self._spawn(self._keep_agent(slot))
            await self._over.wait()
            await self._shut_down()
        return self._conclude()

    # ---- processes -------------------------------------------------------------------------------------------------

    async def _keep_store(self) -> None:
        """As a pod with restartPolicy Always: the same store again, which knows that it is not the first."""
        environ = {
            **os.environ,
            Env.JOB: self._job.name,
            Env.RUN_ID: self._run_id,
            Env.NODE_KEY: self._keys[LinkRole.NODE],
            Env.OPERATOR_KEY: self._keys[LinkRole.OPERATOR],
            Env.EXECUTION_ATTEMPT: "1",
            Env.STORE_INCARNATION: "0",
            Env.PORT: str(self._port),
            Env.SETTINGS: codec.dumps(self._job.settings).decode(),
            Env.STATE_DIR: str(self._scratch),
        }
        log = self._scratch / "store.log"
        while not self._over.is_set():
            with log.open("ab") as output:
                self._store = await _start([*program(), "store"], environ, output.fileno())
            code = await self._store.wait()
            if self._over.is_set():
                return
            if code == ExitCode.USAGE or self._report is None:
                self._break(f"the store ended with {code}: {log.read_text()[-2000:].strip()}")
                return
            say(f"the store ended ({_ending(code)}); starting it again")

    async def _keep_agent(self, slot: int) -> None:
        """One pod of a slot after the other, each with the next incarnation."""
        incarnation, delay = 0, 0.25
        while not (self._over.is_set() or self._draining):
            pod = f"{self._job.name}-{slot}-{incarnation}"
            started = time.monotonic()
            code = await self._run_agent(slot, incarnation, pod)
            del self._pods[slot]
            self._tell()
            if code in (ExitCode.SUCCEEDED, ExitCode.FAILED) or self._ended():
                return
            if code == ExitCode.USAGE:
                self._break(f"{pod} could not start")
                return
            incarnation += 1
            delay = min(2 * delay, _MAX_DELAY) if time.monotonic() - started < _SHORT_LIFE else 0.25
            if not self._draining:
                say(f"{pod} ended ({_ending(code)}); {self._job.name}-{slot}-{incarnation} takes its place")
                await asyncio.sleep(0 if delay == 0.25 else delay)

    async def _run_agent(self, slot: int, incarnation: int, pod: str) -> int:
        job = self._job
        environ = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            **job.env,
            Env.JOB: job.name,
            Env.RUN_ID: self._run_id,
            Env.NODE_KEY: self._keys[LinkRole.NODE],
            Env.EXECUTION_ATTEMPT: "1",
            Env.SLOT: str(slot),
            Env.POD_NAME: pod,
            Env.POD_IP: "127.0.0.1",
            Env.POD_INCARNATION: str(incarnation),
            Env.STORE_ENDPOINT: f"127.0.0.1:{self._port}",
            Env.NPROC_PER_NODE: str(job.nproc_per_node),
            Env.PRELOAD: ",".join(job.preload),
            Env.STOP_GRACE_SECONDS: str(job.settings.stop_grace),
            Env.JOIN_TIMEOUT_SECONDS: str(job.settings.join_timeout),
            Env.KEEP_ALIVE: f"{job.settings.keep_alive_interval:g}x{job.settings.keep_alive_max_attempts}",
            Env.TERMINATION_LOG: str(self._scratch / f"{pod}.json"),
        }
        agent = await _start([*program(), "agent", "--", *job.command], environ, None, job.working_dir)
        self._agents[slot] = agent
        self._pods[slot] = PodFact(slot, incarnation, pod, PodState.RUNNING)
        self._tell()
        return await agent.wait()

    # ---- the operator's side of the link ---------------------------------------------------------------------------

    async def _follow(self) -> None:
        while not self._over.is_set():
            try:
                link = await connect(
                    "127.0.0.1",
                    self._port,
                    role=LinkRole.OPERATOR,
                    key=bytes.fromhex(self._keys[LinkRole.OPERATOR]),
                    run_id=self._run_id,
                )
            except (OSError, LinkError):
                await asyncio.sleep(0.05)
                continue
            self._link_send = link.send
            self._tell()
            while (message := await link.receive()) is not None:
                if isinstance(message, Report):
                    self._heard(message)
            self._link_send = None

    def _tell(self) -> None:
        """All that an operator would know, in its words."""
        if self._link_send is None:
            return
        self._sequence += 1
        pods = tuple(replace(p, state=PodState.DRAINING) if self._draining else p for p in self._pods.values())
        self._link_send(
            Facts(1, self._sequence, self._job.settings, self._charged, self._charged_round, pods),
        )

    def _heard(self, report: Report) -> None:
        before, self._report = self._report, report
        news = [e for e in report.ended if self._charged_round is None or e.round > self._charged_round]
        for ended in news:
            self._charged += ended.charged
            self._charged_round = ended.round
            _say_ended(ended)
        if report.formed_at and (before is None or before.formed_at != report.formed_at):
            say(f"round {report.round} runs: {report.world_size} workers on {report.active} nodes")
        elif not report.formed_at and report.reason and (before is None or before.reason != report.reason):
            say(f"{report.phase.value.lower()}: {report.reason}")
        if news:
            self._tell()
        if report.outcome is not None:
            self._over.set()

    # ---- the end ---------------------------------------------------------------------------------------------------

    def _interrupted(self) -> None:
        if self._draining:
            say("interrupted again: killing")
            self._over.set()
            for agent in self._alive():
                agent.kill()
            return
        self._draining = True
        say("interrupted: the nodes leave; once more kills them")
        self._tell()
        for agent in self._alive():
            agent.terminate()
        self._spawn(self._drained())

    async def _drained(self) -> None:
        await asyncio.gather(*(agent.wait() for agent in self._agents.values()))
        self._over.set()

    def _break(self, why: str) -> None:
        self._broken = why
        self._over.set()

    def _ended(self) -> bool:
        return self._report is not None and self._report.outcome is not None

    def _alive(self) -> list[asyncio.subprocess.Process]:
        return [agent for agent in self._agents.values() if agent.returncode is None]

    async def _shut_down(self) -> None:
        """Agents end by themselves once the outcome is declared; then the store."""
        if not self._ended():
            for agent in self._alive():
                agent.terminate()
        grace = self._job.settings.stop_grace + 15
        waiting = [asyncio.ensure_future(agent.wait()) for agent in self._alive()]
        if waiting and (late := (await asyncio.wait(waiting, timeout=grace))[1]):
            say(f"{len(late)} agents do not end; killing them")
        for agent in self._alive():
            agent.kill()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._store is not None and self._store.returncode is None:
            self._store.terminate()
            await self._store.wait()

    def _conclude(self) -> int:
        report = self._report
        if report is not None and report.outcome is Outcome.SUCCEEDED:
            say(f"{self._job.name} succeeded; {self._charged} restarts")
            return ExitCode.SUCCEEDED
        if report is not None and report.outcome is Outcome.FAILED:
            why = describe(report.failure) + f" on {report.failure.pod}" if report.failure else report.reason
            say(f"{self._job.name} failed: {why}; {self._charged} restarts")
            return ExitCode.FAILED
        if self._broken:
            say(f"{self._job.name} failed: {self._broken}")
            return ExitCode.FAILED
        say(f"{self._job.name} was interrupted")
        return INTERRUPTED

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._break(f"internal error: {type(error).__name__}: {error}")


def say(text: str) -> None:
    """One status line."""
    print(f"[job] {text}", file=sys.stderr, flush=True)


def _say_ended(ended: RoundEnded) -> None:
    if ended.reason.value == "Succeeded":
        return
    cause = describe(ended.failure) if ended.failure else ended.message
    say(f"round {ended.round} ended: {ended.reason.value}: {cause}{' (counts as a restart)' if ended.charged else ''}")


def _ending(code: int) -> str:
    if code < 0:
        return signal.Signals(-code).name
    known = {e.value: e.name.lower() for e in ExitCode}
    return f"exit {code}{', ' + known[code] if code in known else ''}"


async def _start(
    argv: list[str], environ: Mapping[str, str], output: int | None, directory: str | None = None
) -> asyncio.subprocess.Process:
    """A process that dies with this one, out of reach of the terminal's Ctrl-C."""
    return await asyncio.create_subprocess_exec(
        *argv,
        env=environ,
        cwd=directory,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port

"""Runs a job as processes of this machine: one store, N agents, and what the operator does for a job in a cluster."""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
import tempfile
import time
import uuid
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from elasticjob.agent.machine.outcomes import describe_failure
from elasticjob.contract.messages import (
    EndReason,
    ExpectedPod,
    Failure,
    OperatorView,
    Outcome,
    PodState,
    Report,
    RoundEnded,
    Straggler,
)
from elasticjob.contract.names import ExitCode, RoundId
from elasticjob.control_link.link import LinkError, LinkRole, connect
from elasticjob.local.child_processes import RunEnvironment, describe_exit_code
from elasticjob.local.manifest import LocalJob
from elasticjob.local.screen import NodeRow, PlainScreen, RunView, Screen

INTERRUPTED = 130
_SHORT_LIFE = 5.0
"""Seconds: an agent that ends sooner is replaced after a delay that doubles."""
_MAX_DELAY = 30.0
_LAST_WORDS = 2.0
"""Seconds for output that is still on its way when everybody has ended."""
_LONGEST_LINE = 1 << 20
"""Bytes of one line of a node's output; a longer one is shown in parts."""


class LocalRun:
    """One local run: `await Driver(job).run()` is the exit code. `kill`, `kill_store` and `scale` work meanwhile."""

    def __init__(self, job: LocalJob, screen: Screen | None = None) -> None:
        self._job = job
        self._settings = job.settings
        self._screen: Screen = screen or PlainScreen()
        self._keys = {role: secrets.token_hex(32) for role in LinkRole}
        self._run_id = str(uuid.uuid4())
        self._pods: dict[int, ExpectedPod] = {}
        self._agents: dict[int, asyncio.subprocess.Process] = {}
        self._incarnations: dict[int, int] = {}
        self._kept: set[int] = set()
        """Slots that somebody keeps a pod in."""
        self._copies: set[asyncio.Task[None]] = set()
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
            self._site = RunEnvironment(self._job, self._run_id, self._keys, _free_port(), Path(scratch))
            self._spawn(self._keep_store())
            self._spawn(self._follow())
            for index in range(self._settings.desired_pods):
                self._spawn(self._keep_agent(index))
            await self._over.wait()
            await self._shut_down()
        return self._conclude()

    @property
    def failure(self) -> Failure | None:
        """The root cause of a run that failed."""
        return self._report.failure if self._report is not None else None

    # ---- what can be done to a run ---------------------------------------------------------------------------------

    @property
    def target(self) -> int:
        """The number of nodes the run should have."""
        return self._settings.target

    def kill(self, index: int) -> None:
        """SIGKILL a node: its agent, and with it all its workers."""
        agent = self._agents.get(index)
        if agent is not None and agent.returncode is None:
            self._say(f"killing {self._pods[index].pod}")
            agent.kill()

    def kill_store(self) -> None:
        """SIGKILL the store; it is started again."""
        if self._store is not None and self._store.returncode is None:
            self._say("killing the store")
            self._store.kill()

    def scale(self, nodes: int) -> None:
        """Another number of nodes, kept within minReplicas and maxReplicas; spares come on top of it. Nodes beyond it
        leave in good order."""
        before, low, high = self._settings.target, self._settings.min_nodes, self._settings.max_nodes
        indices = self._settings.desired_pods
        target = max(low, min(nodes, high))
        if target != nodes:
            self._say(f"{nodes} nodes are not within minReplicas, {low}, and maxReplicas, {high}")
        if target == before or self._draining:
            return
        self._say(f"scaling from {before} to {target} nodes")
        self._settings = replace(self._settings, target=target)
        self._tell()
        for index in set(range(self._settings.desired_pods)) - self._kept:
            self._spawn(self._keep_agent(index))
        for index in range(self._settings.desired_pods, indices):
            if index in self._pods:
                self._agents[index].terminate()

    # ---- processes -------------------------------------------------------------------------------------------------

    async def _keep_store(self) -> None:
        """As a pod with restartPolicy Always: the same store again, which knows that it is not the first."""
        log = self._site.scratch / "store.log"
        while not self._over.is_set():
            with log.open("ab") as output:
                self._store = await self._site.store(output.fileno())
            self._show()
            code = await self._store.wait()
            if self._over.is_set():
                return
            if code == ExitCode.USAGE or self._report is None:
                self._break(f"the store ended with {code}: {log.read_text()[-2000:].strip()}")
                return
            self._say(f"the store ended ({describe_exit_code(code)}); starting it again")

    async def _keep_agent(self, index: int) -> None:
        self._kept.add(index)
        try:
            await self._one_pod_after_the_other(index)
        finally:
            self._kept.discard(index)

    async def _one_pod_after_the_other(self, index: int) -> None:
        """Each with the next incarnation, while the index is wanted."""
        delay = 0.25
        while not (self._over.is_set() or self._draining or index >= self._settings.desired_pods):
            incarnation = self._incarnations[index] = self._incarnations.get(index, -1) + 1
            pod = f"{self._job.name}-{index}-{incarnation}"
            started = time.monotonic()
            code = await self._run_agent(index, incarnation, pod)
            del self._pods[index]
            self._tell()
            if code in (ExitCode.SUCCEEDED, ExitCode.FAILED) or self._ended():
                return
            if code == ExitCode.USAGE:
                self._break(f"{pod} could not start")
                return
            delay = min(2 * delay, _MAX_DELAY) if time.monotonic() - started < _SHORT_LIFE else 0.25
            if self._draining:
                return
            if index >= self._settings.desired_pods:
                self._say(f"{pod} ended ({describe_exit_code(code)})")
                return
            self._say(
                f"{pod} ended ({describe_exit_code(code)}); {self._job.name}-{index}-{incarnation + 1} takes its place"
            )
            await asyncio.sleep(0 if delay == 0.25 else delay)

    async def _run_agent(self, index: int, incarnation: int, pod: str) -> int:
        output = asyncio.subprocess.PIPE if self._screen.captures_output else None
        agent = await self._site.agent(index, incarnation, pod, output)
        self._agents[index] = agent
        self._pods[index] = ExpectedPod(index, incarnation, pod, PodState.RUNNING)
        self._tell()
        if agent.stdout is not None:
            self._copies.add(asyncio.create_task(self._copy(agent.stdout)))
        return await agent.wait()

    async def _copy(self, output: asyncio.StreamReader) -> None:
        """A node's output to the screen, line by line."""
        rest = b""
        while data := await output.read(1 << 16):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > _LONGEST_LINE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._screen.print_output(line.decode(errors="replace"))

    # ---- the operator's side of the link ---------------------------------------------------------------------------

    async def _follow(self) -> None:
        while not self._over.is_set():
            try:
                link = await connect(
                    "127.0.0.1",
                    self._site.port,
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
        self._show()
        if self._link_send is None:
            return
        self._sequence += 1
        pods = tuple(replace(p, state=PodState.DRAINING) if self._goes(p) else p for p in self._pods.values())
        facts = OperatorView(1, self._sequence, self._settings, self._charged, self._charged_round, pods)
        self._link_send(replace(facts, confirmed_request=self._report.confirmation_request if self._report else 0.0))

    def _goes(self, pod: ExpectedPod) -> bool:
        return self._draining or pod.index >= self._settings.desired_pods

    def _heard(self, report: Report) -> None:
        before, self._report = self._report, report
        news = [e for e in report.ended_rounds if self._charged_round is None or e.round > self._charged_round]
        for ended in news:
            self._charged += ended.charged
            self._charged_round = ended.round
            if ended.reason is not EndReason.SUCCEEDED:
                self._say(_tell_end(ended))
        if report.formed_at and (before is None or before.formed_at != report.formed_at):
            self._say(f"round {report.round} runs: {report.world_size} workers on {report.active} nodes")
        elif not report.formed_at and report.reason and (before is None or before.reason != report.reason):
            self._say(f"{report.phase.value.lower()}: {report.reason}")
        if report.stall is not None and (before is None or before.stall != report.stall):
            self._say(f"{describe_failure(report.stall)} on {report.stall.pod}; nothing is restarted")
        if before is not None and before.round == report.round and before.straggler != report.straggler:
            self._say(_tell_straggler(report.straggler))
        if news or report.confirmation_request:
            self._tell()
        self._show()
        if report.outcome is not None:
            self._over.set()

    # ---- the end ---------------------------------------------------------------------------------------------------

    def _interrupted(self) -> None:
        if self._draining:
            self._say("interrupted again: killing")
            self._over.set()
            for agent in self._alive():
                agent.kill()
            return
        self._draining = True
        self._say("interrupted: the nodes leave; once more kills them")
        self._tell()
        for agent in self._alive():
            agent.terminate()
        self._spawn(self._drained())

    async def _drained(self) -> None:
        await asyncio.gather(*(agent.wait() for agent in self._agents.values()))
        self._over.set()

    def _say(self, text: str) -> None:
        self._screen.print_status(text)

    def _show(self) -> None:
        pods = tuple(NodeRow(index, pod.pod, self._agents[index].pid) for index, pod in self._pods.items())
        store = self._store.pid if self._store else 0
        self._screen.show(RunView(self._job.name, self._settings.target, self._charged, store, pods, self._report))

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
        grace = self._settings.stop_grace + 15
        waiting = [asyncio.ensure_future(agent.wait()) for agent in self._alive()]
        if waiting and (late := (await asyncio.wait(waiting, timeout=grace))[1]):
            self._say(f"{len(late)} agents do not end; killing them")
        for agent in self._alive():
            agent.kill()
        if self._copies:
            await asyncio.wait(self._copies, timeout=_LAST_WORDS)
        for task in (*self._tasks, *self._copies):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._copies, return_exceptions=True)
        if self._store is not None and self._store.returncode is None:
            self._store.terminate()
            await self._store.wait()

    def _conclude(self) -> int:
        report = self._report
        if report is not None and report.outcome is Outcome.SUCCEEDED:
            self._say(f"{self._job.name} succeeded; {self._charged} restarts")
            return ExitCode.SUCCEEDED
        if report is not None and report.outcome is Outcome.FAILED:
            why = describe_failure(report.failure) + f" on {report.failure.pod}" if report.failure else report.reason
            self._say(f"{self._job.name} failed: {why}; {self._charged} restarts")
            return ExitCode.FAILED
        if self._broken:
            self._say(f"{self._job.name} failed: {self._broken}")
            return ExitCode.FAILED
        self._say(f"{self._job.name} was interrupted")
        return INTERRUPTED

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._break(f"internal error: {type(error).__name__}: {error}")


def _tell_end(ended: RoundEnded) -> str:
    cause = describe_failure(ended.failure) if ended.failure else ended.message
    return (
        f"round {ended.round} ended: {ended.reason.value}: {cause}{' (counts as a restart)' if ended.charged else ''}"
    )


def _tell_straggler(slow: Straggler | None) -> str:
    if slow is None:
        return "all ranks keep up again"
    times = f"{1000 * slow.own_seconds:.0f} ms of its own, {1000 * slow.median_seconds:.0f} ms in the other ranks"
    return f"rank {slow.rank} on {slow.pod} holds up every step: {times}"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port

"""Run a job as local processes: one store and one agent per pod.

This process does the operator's work: it replaces agents that end, restarts the store, and sends the operator's view.
"""

from __future__ import annotations

import asyncio
import contextlib
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

from elasticjob._runtime.contract.failures.restart_window import RestartWindow
from elasticjob._runtime.contract.messages import (
    ExpectedPod,
    Failure,
    OperatorView,
    Outcome,
    PodState,
    Report,
    allowed_size,
)
from elasticjob._runtime.contract.names import ExitCode, RoundId
from elasticjob._runtime.contract.text import with_noun
from elasticjob._runtime.control_link.link import LinkError, LinkRole, connect
from elasticjob._runtime.local.manifest.manifest import LocalJob
from elasticjob._runtime.local.processes.child_processes import RunEnvironment, describe_exit_code
from elasticjob._runtime.local.processes.guardian import Guardian
from elasticjob._runtime.local.processes.leftovers import end_leftovers
from elasticjob._runtime.local.processes.own_port import listen_below_connections
from elasticjob._runtime.local.processes.process_backoff import ProcessBackoff
from elasticjob._runtime.local.report_lines import ReportLines, run_result
from elasticjob._runtime.local.store_confirmation import request_to_confirm
from elasticjob._runtime.local.terminal.node_output import print_output
from elasticjob._runtime.local.terminal.screen import NodeRow, PlainScreen, RunView, Screen
from elasticjob._runtime.local.waits import WaitLines, current_wait
from elasticjob._runtime.system.loop_errors import background_task, call_on_error

_UNCHARGED_EXITS = (ExitCode.LEFT, ExitCode.SUPERSEDED, ExitCode.UNAVAILABLE)
"""Exit codes of an agent that has not failed."""
_OUTPUT_TIMEOUT = 2.0
"""Seconds to wait for the rest of the output after all agents have ended."""
_BACKLOG = 4096
"""Connections that wait until the first store accepts them."""


class LocalRun:
    """One local run. `await LocalRun(job).run()` returns the exit code.

    Call `kill`, `kill_store` and `scale` while it runs.
    """

    def __init__(self, job: LocalJob, screen: Screen | None = None) -> None:
        self._job = job
        self._settings = job.settings
        self._screen: Screen = screen or PlainScreen()
        self._keys = {role: secrets.token_hex(32) for role in LinkRole}
        self._run_id = str(uuid.uuid4())
        self._pods: dict[int, ExpectedPod] = {}
        self._agents: dict[int, asyncio.subprocess.Process] = {}
        self._incarnations: dict[int, int] = {}
        self._supervised: set[int] = set()
        """Indices with a task that runs their agents."""
        self._output_tasks: set[asyncio.Task[None]] = set()
        self._store: asyncio.subprocess.Process | None = None
        self._report: Report | None = None
        self._charged = 0
        self._restarts = RestartWindow()
        self._charged_round: RoundId | None = None
        self._sequence = 0
        self._draining = False
        self._problem = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._link_send: Any = None
        self._report_lines = ReportLines()

    async def run(self) -> int:
        """Run the job to its end, stop every process and return the exit code."""
        loop = asyncio.get_running_loop()
        self._finished = asyncio.Event()
        call_on_error(loop, self._fail_by_error)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt)
        listener = listen_below_connections("127.0.0.1", _BACKLOG)
        with listener, tempfile.TemporaryDirectory(prefix=f"elasticjob-{self._job.name}-") as scratch:
            port = listener.getsockname()[1]
            self._environment = RunEnvironment(self._job, self._run_id, self._keys, port, Path(scratch))
            async with Guardian(self._run_id, scratch):
                self._spawn(self._supervise_store(listener))
                self._spawn(self._run_operator_link())
                self._spawn(self._report_waits())
                for index in range(self._settings.desired_pods):
                    self._spawn(self._supervise_agent(index))
                await self._finished.wait()
                await self._shut_down()
        code, how = run_result(self._report, self._problem, self._charged)
        self._print(f"{self._job.name} {how}")
        return code

    @property
    def failure(self) -> Failure | None:
        """The root cause of a failed run. None if the run did not fail or no worker caused the failure."""
        return self._report.failure if self._report is not None else None

    # ---- actions on a run ------------------------------------------------------------------------------------------

    @property
    def target(self) -> int:
        """The number of pods that the round should have."""
        return self._settings.target

    @property
    def increment(self) -> int:
        """By how many pods the job grows or shrinks."""
        return self._settings.increment

    def kill(self, index: int) -> None:
        """Send SIGKILL to a pod's agent. Its workers die with it."""
        agent = self._agents.get(index)
        if agent is not None and agent.returncode is None:
            self._print(f"killing {self._pods[index].pod}")
            agent.kill()

    def kill_store(self) -> None:
        """Send SIGKILL to the store. The run starts it again."""
        if self._store is not None and self._store.returncode is None:
            self._print("killing the store")
            self._store.kill()

    def scale(self, nodes: int) -> None:
        """Change the number of pods, within minReplicas and maxReplicas. Spares come on top. Surplus pods drain."""
        before, low, high = self._settings.target, self._settings.min_nodes, self._settings.max_nodes
        pods_before = self._settings.desired_pods
        step = self._settings.increment
        target = allowed_size(max(low, min(nodes, high)), low, step)
        if target != nodes:
            steps = f" in steps of {step}" if step > 1 else ""
            self._print(f"the job can have {low} to {high} pods (minReplicas, maxReplicas){steps}, not {nodes}")
        if target == before or self._draining:
            return
        self._print(f"scaling from {before} to {with_noun(target, 'pod')}")
        self._settings = replace(self._settings, target=target)
        self._send_view()
        for index in set(range(self._settings.desired_pods)) - self._supervised:
            self._spawn(self._supervise_agent(index))
        for index in range(self._settings.desired_pods, pods_before):
            if index in self._pods:
                self._agents[index].terminate()

    # ---- processes -------------------------------------------------------------------------------------------------

    async def _supervise_store(self, listener: socket.socket | None) -> None:
        """Run the store and start it again when it ends, as a pod with restartPolicy Always does.

        The first one inherits `listener`, which is open already: no agent starts with a refused connection.
        The new process reads in the state folder that it is not the first one.
        """
        log, backoff = self._environment.scratch / "store.log", ProcessBackoff()
        while not self._finished.is_set():
            with log.open("ab") as output:
                self._store = await self._environment.store(output.fileno(), listener)
            if listener is not None:
                listener.close()  # the port closes with the store, as that of a pod does
                listener = None
            self._show()
            started = time.monotonic()
            code = await self._store.wait()
            if self._finished.is_set():
                return
            if code == ExitCode.USAGE or self._report is None:
                self._fail(f"the store ended ({describe_exit_code(code)}): {log.read_text()[-2000:].strip()}")
                return
            delay = backoff.delay_after(time.monotonic() - started)
            when = f" in {delay:g} s" if delay else ""
            self._print(f"the store ended ({describe_exit_code(code)}); starting it again{when}")
            await asyncio.sleep(delay)

    async def _supervise_agent(self, index: int) -> None:
        self._supervised.add(index)
        try:
            await self._run_agents(index)
        finally:
            self._supervised.discard(index)

    async def _run_agents(self, index: int) -> None:
        """Run one agent after the other, each with the next incarnation, until the job needs this index no more."""
        backoff = ProcessBackoff()
        while not (self._finished.is_set() or self._draining or index >= self._settings.desired_pods):
            incarnation = self._incarnations[index] = self._incarnations.get(index, -1) + 1
            pod = f"{self._job.name}-{index}-{incarnation}"
            started = time.monotonic()
            code = await self._run_agent(index, incarnation, pod)
            # Before the store learns that the pod has ended, so that another pod may take its place.
            await self._end_leftovers(pod)
            self._environment.remove_files(index, incarnation)
            del self._pods[index]
            self._send_view()
            outcome = self._environment.outcome(pod)
            if code == ExitCode.SUCCEEDED or outcome is Outcome.FAILED or self._ended():
                return
            if code == ExitCode.USAGE:
                self._fail(f"{pod} did not start: its configuration is invalid; see its output")
                return
            if self._exhausts_restarts(code, outcome):
                self._fail(f"{pod} ended ({describe_exit_code(code)}); {with_noun(self._charged, 'restart')}")
                return
            delay = backoff.delay_after(time.monotonic() - started)
            if self._draining:
                return
            if index >= self._settings.desired_pods:
                self._print(f"{pod} ended ({describe_exit_code(code)})")
                return
            successor = f"{self._job.name}-{index}-{incarnation + 1}"
            self._print(f"{pod} ended ({describe_exit_code(code)}); {successor} takes its place")
            await asyncio.sleep(delay)

    async def _end_leftovers(self, *pods: str) -> None:
        if alive := await end_leftovers(self._run_id, pods):
            self._print(f"processes of {', '.join(pods)} are alive after SIGKILL: {', '.join(map(str, sorted(alive)))}")

    def _exhausts_restarts(self, code: int, outcome: Outcome | None) -> bool:
        """Charge an agent that failed by itself, as the operator does; return whether no restart was left for that."""
        declared = outcome not in (None, Outcome.ERROR)
        if code < 0 or declared or code in _UNCHARGED_EXITS or self._draining:
            return False
        now, window = time.time(), self._settings.restart_window
        if self._restarts.at(now, window).count >= self._settings.max_restarts:
            return True
        self._charge(now)
        self._send_view()
        return False

    def _charge(self, failed_at: float) -> None:
        self._charged += 1
        self._restarts = self._restarts.with_restart(failed_at, self._settings.restart_window)

    async def _run_agent(self, index: int, incarnation: int, pod: str) -> int:
        output = asyncio.subprocess.PIPE if self._screen.captures_output else None
        agent = await self._environment.agent(index, incarnation, pod, output)
        self._agents[index] = agent
        self._pods[index] = ExpectedPod(index, incarnation, pod, PodState.RUNNING)
        self._send_view()
        if agent.stdout is not None:
            self._output_tasks.add(background_task(print_output(agent.stdout, self._screen)))
        return await agent.wait()

    # ---- the operator's side of the link ---------------------------------------------------------------------------

    async def _run_operator_link(self) -> None:
        while not self._finished.is_set():
            try:
                link = await connect(
                    "127.0.0.1",
                    self._environment.port,
                    role=LinkRole.OPERATOR,
                    key=bytes.fromhex(self._keys[LinkRole.OPERATOR]),
                    run_id=self._run_id,
                )
            except (OSError, LinkError):
                await asyncio.sleep(0.05)
                continue
            self._link_send = link.send
            self._send_view()
            with contextlib.suppress(LinkError):  # the link is closed; the next one continues
                while (message := await link.receive()) is not None:
                    if isinstance(message, Report):
                        self._receive(message)
            self._link_send = None

    def _send_view(self) -> None:
        """Show the state, and send the coordinator the view that an operator would send."""
        self._show()
        if self._link_send is None:
            return
        self._sequence += 1
        pods = tuple(replace(p, state=PodState.DRAINING) if self._is_draining(p) else p for p in self._pods.values())
        confirmed = request_to_confirm(self._report, pods)
        restarts = self._restarts
        view = OperatorView(1, self._sequence, self._settings, restarts.count, self._charged_round, pods)
        self._link_send(replace(view, charged_since=restarts.start, confirmed_request=confirmed))

    def _is_draining(self, pod: ExpectedPod) -> bool:
        return self._draining or pod.index >= self._settings.desired_pods

    def _receive(self, report: Report) -> None:
        self._report = report
        newly_ended = [e for e in report.ended_rounds if self._charged_round is None or e.round > self._charged_round]
        for ended in newly_ended:
            if ended.charged:
                self._charge(ended.time)
            self._charged_round = ended.round
        for line in self._report_lines.lines(report, newly_ended):
            self._print(line)
        if newly_ended or report.confirmation_request:
            self._send_view()
        self._show()
        if report.outcome is not None:
            self._finished.set()

    async def _report_waits(self) -> None:
        """Say what the run waits for while that takes long."""
        lines = WaitLines()
        while not self._finished.is_set():
            wait = None if self._draining else current_wait(self._report)
            if line := lines.line(wait, time.monotonic()):
                self._print(line)
            await asyncio.sleep(1)

    # ---- the end ---------------------------------------------------------------------------------------------------

    def _interrupt(self) -> None:
        if self._draining:
            self._print("interrupted again: killing the pods")
            self._finished.set()
            for agent in self._alive():
                agent.kill()
            return
        self._draining = True
        self._print("interrupted: draining the pods; interrupt again to kill them")
        self._send_view()
        for agent in self._alive():
            agent.terminate()
        self._spawn(self._wait_until_drained())

    async def _wait_until_drained(self) -> None:
        await asyncio.gather(*(agent.wait() for agent in self._agents.values()))
        self._finished.set()

    def _print(self, text: str) -> None:
        self._screen.print_status(text)

    def _show(self) -> None:
        pods = tuple(NodeRow(index, pod.pod, self._agents[index].pid) for index, pod in self._pods.items())
        store = self._store.pid if self._store else 0
        self._screen.show(RunView(self._job.name, self._settings.target, self._charged, store, pods, self._report))

    def _fail(self, why: str) -> None:
        self._problem = why
        self._finished.set()

    def _fail_by_error(self, error: BaseException) -> None:
        self._fail(f"internal error: {type(error).__name__}: {error}")

    def _ended(self) -> bool:
        return self._report is not None and self._report.outcome is not None

    def _alive(self) -> list[asyncio.subprocess.Process]:
        return [agent for agent in self._agents.values() if agent.returncode is None]

    async def _shut_down(self) -> None:
        """Wait for the agents, kill those that do not end, then stop the store.

        The agents end by themselves once the coordinator has declared the outcome.
        """
        if not self._ended():
            for agent in self._alive():
                agent.terminate()
        grace = self._settings.stop_grace + 15
        waiting = [asyncio.ensure_future(agent.wait()) for agent in self._alive()]
        if waiting and (late := (await asyncio.wait(waiting, timeout=grace))[1]):
            self._print(f"{with_noun(len(late), 'agent')} did not end within {grace:g} s; killing")
        for agent in self._alive():
            agent.kill()
        if self._output_tasks:
            await asyncio.wait(self._output_tasks, timeout=_OUTPUT_TIMEOUT)
        for task in (*self._tasks, *self._output_tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._output_tasks, return_exceptions=True)
        await self._end_leftovers(*(pod.pod for pod in self._pods.values()))
        if self._store is not None and self._store.returncode is None:
            self._store.terminate()
            await self._store.wait()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = background_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

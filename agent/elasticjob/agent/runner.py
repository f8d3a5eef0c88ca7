"""The agent at work: carries out what `machine` decides, and tells it what happens. One event loop, nothing polls."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import tempfile
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path

from elasticjob.agent.config import AgentConfig
from elasticjob.agent.machine import decide as machine
from elasticjob.agent.machine import events
from elasticjob.agent.machine.effects import (
    CheckHealth,
    DumpStacks,
    Effect,
    Exit,
    FreezeWorkers,
    HoldWorkers,
    LaunchWorkers,
    Log,
    Send,
    StartLeaveTimer,
    StopWorkers,
    StopWorkersAt,
)
from elasticjob.agent.machine.events import AgentEvent
from elasticjob.agent.machine.outcomes import assert_never
from elasticjob.agent.machine.state import AgentState
from elasticjob.agent.monitoring.hangs import HangMonitor
from elasticjob.agent.monitoring.node_health import NodeHealth
from elasticjob.agent.monitoring.reachability import ReachabilityMonitor
from elasticjob.agent.monitoring.step_times import StepTimeMonitor
from elasticjob.agent.processes import become_subreaper
from elasticjob.agent.reporting import health_endpoint, telemetry
from elasticjob.agent.reporting.termination_message import write_termination
from elasticjob.agent.reporting.worker_output import OutputSink, WorkerPipe
from elasticjob.agent.start_workers.command import UserCommand
from elasticjob.agent.start_workers.launcher import Launcher
from elasticjob.agent.worker_environment import node_env
from elasticjob.agent.workers import WorkerGroup
from elasticjob.code_root import CODE_ROOT
from elasticjob.contract.messages import Announce, Failure, FailureClass, StartRound, StepTimes
from elasticjob.contract.names import ExitCode, RoundId
from elasticjob.control_link.link import ControlLink, LinkRole, connect
from elasticjob.control_link.node_client import NoCoordinatorError, NodeClient
from elasticjob.keep_alive import KeepAlive
from elasticjob.store.server import StoreServer
from elasticjob.training import state_block

log = logging.getLogger(__name__)

FLUSH_TIMEOUT = 5.0
"""Seconds that a slow reader of the agent's output may hold up its end."""


CLOSE_TIMEOUT = 15.0


class Agent:
    """One agent, from its first breath to its exit code: `await Agent(config, command).run()`."""

    def __init__(
        self,
        config: AgentConfig,
        command: UserCommand,
        early: Sequence[str] = (),
        signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT),
    ) -> None:
        """`signals` on which it leaves; `early`: names of those that arrived before the loop ran."""
        self._config = config
        self._command = command
        self._signals = signals
        self._early = early  # may grow until `_start` takes over the handlers
        self._tasks: set[asyncio.Task[object]] = set()
        self._answer: asyncio.TimerHandle | None = None
        self._stores: list[StoreServer] = []
        self._keep_alive = KeepAlive(config.keep_alive_interval, config.keep_alive_attempts)
        self._contact = ReachabilityMonitor(
            config.run_id, config.key, self._keep_alive, lambda: self._dispatch(events.CutOff())
        )

    async def run(self) -> ExitCode:
        """Join, work, leave. The termination message is written when this returns."""
        self._loop = asyncio.get_running_loop()
        self._finished: asyncio.Future[Exit] = self._loop.create_future()
        self._stdout, self._stderr = OutputSink(1), OutputSink(2)
        handler = _SinkHandler(self._stderr, self._config.pod)
        logging.getLogger("elasticjob").addHandler(handler)
        logging.getLogger("elasticjob").setLevel(logging.INFO)
        become_subreaper()
        with tempfile.TemporaryDirectory(prefix="elasticjob-", dir=_scratch()) as scratch:
            await self._start(Path(scratch))
            try:
                exit_ = await self._finished
                if exit_.code is ExitCode.LEFT:
                    await self._save_state()
                self._write(exit_)
                self._record(exit_)
            finally:
                await asyncio.wait_for(self._close(), CLOSE_TIMEOUT)
        logging.getLogger("elasticjob").removeHandler(handler)
        for number in (signal.SIGCHLD, *self._signals):
            self._loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)  # what is left is to exit
        self._stdout.close(FLUSH_TIMEOUT)
        self._stderr.close(FLUSH_TIMEOUT)
        return exit_.code

    async def _start(self, scratch: Path) -> None:
        config = self._config
        helper_out, helper_in = os.pipe()
        self._helper = WorkerPipe(helper_out, "[warm]: ", self._stderr)
        env = node_env(config.env, config.local_world_size, CODE_ROOT)
        self._launcher = Launcher(
            self._command, env, config.preload, helper_in, config.processes, scratch, config.torchruns_workers
        )
        self._workers = WorkerGroup(config, self._launcher, scratch, self._stdout, self._stderr)
        self._watch = HangMonitor(self._workers.heartbeats, self._stalled)
        self._pace = StepTimeMonitor(self._workers.heartbeats, self._took, config.pace_window)
        self._workers.progress.on_worker_connected = lambda: self._pace.start(config.processes)
        self._health = NodeHealth(str(scratch), config.gpus, env, self._workers.non_workers)
        self._state = AgentState(
            announcement=await self._announcement(), stop_grace=config.stop_grace, processes=config.processes
        )
        self._tally = telemetry.AgentCounts(self._loop.time(), self._loop.time())
        self._endpoint = await health_endpoint.serve_health(
            config.env,
            lambda: telemetry.health(self._tally, self._state, self._loop.time()),
            lambda: telemetry.metrics(self._tally, self._state, self._loop.time()),
        )
        self._node = NodeClient(
            self._dial,
            lambda: machine.greeting(self._state),
            lambda message: self._dispatch(events.Received(message)),
            had_round=lambda: self._state.assignment is not None,
            join_timeout=config.join_timeout,
            linked=self._contact.coordinator_link_changed,
        )
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)
        for number in self._signals:
            self._loop.add_signal_handler(number, self._dispatch, events.SignalReceived(number.name))
        for name in self._early:
            self._dispatch(events.SignalReceived(name))
        self._spawn(self._connect())
        self._spawn(self._prepare(helper_in))

    async def _announcement(self) -> Announce:
        config = self._config
        return Announce(
            index=config.index,
            incarnation=config.incarnation,
            agent_id=config.agent_id,
            pod=config.pod,
            address=config.address,
            store_port=await self._fresh_store(),
            local_world_size=config.local_world_size,
            role=config.role,
        )

    async def _dial(self) -> ControlLink:
        config = self._config
        return await connect(
            config.host, config.port, role=LinkRole.NODE, key=config.key, run_id=config.run_id,
            keep_alive=self._keep_alive,
        )  # fmt: skip

    async def _fresh_store(self) -> int:
        """Bind the store of the next round. The last one stays up: peers that still stop may use it."""
        loopback = self._config.address.startswith("127.")
        store = StoreServer(links=self._contact.gate().accept)
        host = "127.0.0.1" if loopback else "::" if ":" in self._config.address else "0.0.0.0"  # noqa: S104
        port = await store.start(host)
        self._stores.append(store)
        return port

    # ---- deciding and doing --------------------------------------------------------------------------------------

    def _dispatch(self, event: AgentEvent) -> None:
        decision = machine.decide(self._state, event)
        self._tally = telemetry.update_counts(self._tally, self._state, decision.state, self._loop.time())
        self._state = decision.state
        for effect in decision.effects:
            self._do(effect)

    def _do(self, effect: Effect) -> None:
        match effect:
            case Send(message):
                self._node.send(message)
            case Log(text):
                log.info("%s", text)
            case LaunchWorkers(start):
                self._contact.begin_round(start)
                self._pace.stop()
                self._workers.expect_start()
                self._spawn(self._launch(start))
            case HoldWorkers(round_id):
                self._spawn(self._hold(round_id))
            case StopWorkersAt(round_id, step):
                if not self._workers.progress.stop_at(step):
                    self._dispatch(events.LastStepMissed(round_id))
            case StopWorkers(grace, stacks):
                self._contact.end_round()
                self._stop(grace, stacks)
            case DumpStacks(round_id):
                self._spawn(self._look(round_id))
            case FreezeWorkers(on):
                self._workers.freeze(on)
            case CheckHealth():
                self._spawn(self._check_health())
            case StartLeaveTimer(seconds):
                if self._answer:
                    self._answer.cancel()
                self._answer = self._loop.call_later(seconds, self._dispatch, events.LeaveTimedOut())
            case Exit():
                self._finished.set_result(effect)
            case _ as never:
                assert_never(never)

    def _spawn(self, work: Coroutine[None, None, object]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self._finished.done():
            self._finished.set_exception(error)

    # ---- what goes on --------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        try:
            await self._node.run()
        except NoCoordinatorError as error:
            self._dispatch(events.StoreUnreachable(str(error)))

    async def _prepare(self, helper_in: int) -> None:
        what, fit = await asyncio.gather(self._launcher.prepare(), self._check_health())
        os.close(helper_in)
        log.info("%s", what)
        if fit:
            self._dispatch(events.LauncherReady(self._launcher.fork_disabled_reason))

    async def _check_health(self) -> bool:
        trouble = await self._health.find_problem()
        if trouble:
            failure = Failure(FailureClass.DEVICE_UNHEALTHY, self._config.pod, time.time(), message=trouble[:1024])
            self._dispatch(events.NodeUnhealthy(failure))
        return not trouble

    async def _launch(self, start: StartRound) -> None:
        failure = await self._workers.start(start)
        if self._launcher.fork_disabled_reason != self._state.announcement.fork_disabled_reason:
            self._dispatch(events.LauncherReady(self._launcher.fork_disabled_reason))
        if failure is not None:
            self._dispatch(events.WorkerEnded(start.round, 0, failure))
            return
        self._watch.start(start.progress_timeout, again=not start.hang_ends_round)
        self._dispatch(events.WorkersLaunched(start.round))
        self._reap()
        while len(self._stores) > 1:
            await self._stores.pop(0).close()

    async def _hold(self, round_id: RoundId) -> None:
        self._dispatch(events.WorkersHeld(round_id, await self._workers.progress.hold(self._config.local_world_size)))

    def _stalled(self) -> None:
        if self._state.round is not None:
            self._dispatch(events.ProgressTimedOut(self._state.round))

    async def _look(self, round_id: RoundId) -> None:
        if (failure := await self._workers.dump_stacks()) is not None:
            self._dispatch(events.StackReport(round_id, failure))

    def _took(self, whole: float, own: tuple[float, ...]) -> None:
        if self._state.round is not None:
            self._node.send(StepTimes(self._state.round, whole, own))

    def _stop(self, grace: float, stacks: bool) -> None:
        self._watch.stop()
        self._pace.stop()
        if self._workers.stopping:
            self._workers.skip_grace()
        else:
            self._spawn(self._stopped(grace, stacks))

    async def _stopped(self, grace: float, stacks: bool) -> None:
        round_id = self._state.round
        first = signal.Signals.__members__.get(self._state.leaving, signal.SIGTERM)

        def stood(failure: Failure) -> None:
            if round_id is not None:
                self._dispatch(events.StackReport(round_id, failure))

        stuck = await self._workers.stop(grace, first, stood if stacks else None)
        self._dispatch(events.AllWorkersStopped(await self._fresh_store(), stuck))

    def _reap(self) -> None:
        for ended in self._workers.reap():
            self._dispatch(events.WorkerEnded(ended.round, ended.local_rank, ended.failure, ended.on_plan))

    async def _save_state(self) -> None:
        """This node goes, and with it the copy that `elasticjob.State` keeps here: save it where the script says."""
        try:
            if path := await asyncio.to_thread(state_block.save_to_recorded_path, self._workers.progress.memory):
                log.info("training state saved to %s", path)
        except (OSError, ValueError) as error:
            log.warning("training state not saved: %s", error)

    # ---- the end -------------------------------------------------------------------------------------------------

    async def _close(self) -> None:
        self._contact.end_round()
        await self._workers.stop(0.0)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._launcher.close()
        if self._endpoint is not None:
            self._endpoint.close()
        self._workers.progress.close()
        self._helper.close()
        for store in self._stores:
            await store.close()

    def _record(self, exit_: Exit) -> None:
        """torch's events, as its `console` handler writes them."""
        config = self._config
        if config.event_log_handler != "console":
            return
        name = self._command.argv[0].rsplit("/", 1)[-1]
        names = telemetry.EventSubject(config.run_id, config.role, socket.gethostname(), name)
        seconds = self._loop.time() - self._tally.began
        for event in telemetry.final_events(names, self._state, exit_.termination.outcome, seconds):
            self._stderr.put(json.dumps(event).encode() + b"\n")

    def _write(self, exit_: Exit) -> None:
        try:
            write_termination(self._config.termination_log, exit_.termination)
        except OSError as error:
            log.warning("no termination message: %s", error)


class _SinkHandler(logging.Handler):
    """The agent's own lines go where the workers' standard error goes, and never block the loop."""

    def __init__(self, sink: OutputSink, pod: str) -> None:
        super().__init__()
        self._sink = sink
        self._pod = pod

    def emit(self, record: logging.LogRecord) -> None:
        self._sink.put(f"[agent] {self._pod}: {record.getMessage()}\n".encode(errors="replace"))


def _scratch() -> str | None:
    """A directory for error files: the usual one, or memory where the file system is read-only."""
    for path in (tempfile.gettempdir, lambda: "/dev/shm"):  # noqa: S108
        try:
            if os.access(path(), os.W_OK):
                return path()
        except FileNotFoundError:
            continue
    return None

"""The agent's I/O: pass events to `machine`, carry out the effects it decides. One event loop, no polling."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path

from elasticjob._runtime.agent.config import AgentConfig
from elasticjob._runtime.agent.monitoring.node.node_health import NodeHealth
from elasticjob._runtime.agent.monitoring.node.reachability import ReachabilityMonitor
from elasticjob._runtime.agent.monitoring.progress.hangs import HangMonitor
from elasticjob._runtime.agent.monitoring.progress.step_times import StepTimeMonitor
from elasticjob._runtime.agent.monitoring.progress.training_reports import TrainingReports
from elasticjob._runtime.agent.processes import become_subreaper, child_setup, descendants, kill
from elasticjob._runtime.agent.reporting import health_endpoint, telemetry
from elasticjob._runtime.agent.reporting.state_saver import StateSaver
from elasticjob._runtime.agent.reporting.termination_message import write_round, write_termination
from elasticjob._runtime.agent.reporting.worker_output import OutputSink, WorkerPipe
from elasticjob._runtime.agent.round_stores import RoundStores, admit_workers
from elasticjob._runtime.agent.start_workers.command import UserCommand
from elasticjob._runtime.agent.start_workers.fork_fallback import AT_ONCE
from elasticjob._runtime.agent.start_workers.launcher import Launcher
from elasticjob._runtime.agent.start_workers.worker_environment import node_env
from elasticjob._runtime.agent.state_machine import decide as machine
from elasticjob._runtime.agent.state_machine import events
from elasticjob._runtime.agent.state_machine.effects import (
    AdmitWorkers,
    CheckHealth,
    DumpStacks,
    Effect,
    Exit,
    FreezeWorkers,
    HoldWorkers,
    LaunchWorkers,
    LeaveCollectives,
    Log,
    Send,
    SetMachineEnd,
    StartAhead,
    StartLeaveTimer,
    StopWorkers,
    StopWorkersAt,
)
from elasticjob._runtime.agent.state_machine.events import AgentEvent
from elasticjob._runtime.agent.state_machine.outcomes import assert_never
from elasticjob._runtime.agent.state_machine.state import AgentState, LastStep
from elasticjob._runtime.agent.workers.worker_group import WorkerGroup
from elasticjob._runtime.contract.messages import (
    Announce,
    BreakRound,
    Failure,
    FailureClass,
    NodeResultsEnded,
    StandbyStore,
    StartRound,
    StateReceived,
    StepTimes,
    WorkersStopped,
)
from elasticjob._runtime.contract.names import Backend, ExitCode, RoundId, round_store_clients
from elasticjob._runtime.contract.text import describe_speed, printable
from elasticjob._runtime.control_link.link import ControlLink, LinkRole, connect
from elasticjob._runtime.control_link.node_client import CoordinatorClient, NoCoordinatorError
from elasticjob._runtime.store.open_files import raise_open_file_limit
from elasticjob._runtime.store.server import StoreServer
from elasticjob._runtime.system.code_root import CODE_ROOT
from elasticjob._runtime.system.ip_addresses import is_loopback
from elasticjob._runtime.system.keep_alive import KeepAlive
from elasticjob._runtime.system.listening_socket import ALL_ADDRESSES
from elasticjob._runtime.system.loop_errors import background_task, call_on_error, call_on_thread_error

log = logging.getLogger(__name__)

FLUSH_TIMEOUT = 5.0
"""Seconds that a slow reader of the agent's output may delay the agent's exit."""
_SCRIPT_INTERVAL = 1.0
"""Seconds between two looks for a variable that a worker's script sets."""
CLOSE_TIMEOUT = 15.0
"""Seconds for the clean-up before the exit. It kills spare processes, and workers only after an error of the agent
itself; the container's end kills what is left, and Kubernetes waits for it."""


class Agent:
    """One agent, from start to exit code: `await Agent(config, command).run()`."""

    def __init__(
        self,
        config: AgentConfig,
        command: UserCommand,
        early_signals: Sequence[str] = (),
        signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT),
    ) -> None:
        """`signals`: those on which the agent leaves. `early_signals`: names of those received before `run`."""
        self._config = config
        self._command = command
        self._signals = signals
        self._early_signals = early_signals  # the caller's handlers append to it until `_start` replaces them
        self._tasks: set[asyncio.Task[object]] = set()
        self._leave_timer: asyncio.TimerHandle | None = None
        self._leave_by = math.inf
        """When all workers must have ended, because the pod's grace period ends soon after; loop time."""
        self._deadline = math.inf
        """When the workers of this round must have ended; loop time."""
        self._machine_end = math.inf
        """When this machine ends, as it is announced; loop time."""
        self._error: BaseException | None = None
        """The error of the agent itself that ends it."""
        self._closing = False
        """Whether the outcome is known and the agent cleans up."""
        self._task: asyncio.Task[object] | None = None
        """The task of `run`."""
        self._saving = False
        """Whether copies of training state are saved while training continues, where they ask for it."""
        self._stores = RoundStores()
        self._keep_alive = KeepAlive(config.keep_alive_interval, config.keep_alive_attempts)
        self._reachability = ReachabilityMonitor(
            config.run_id,
            config.key,
            self._keep_alive,
            lambda: self._dispatch(events.CutOff()),
            lambda: self._node.greet_again(),
        )

    async def run(self) -> ExitCode:
        """Join, run workers until the job or this node's part in it is over, and return the exit code.

        The termination message is written by then. What the agent itself has failed by is raised; no process of the
        workers is left then.
        """
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        try:
            return await self._run()
        except asyncio.CancelledError:
            if self._error is None:
                raise
            raise self._error from None

    async def _run(self) -> ExitCode:
        self._finished: asyncio.Future[Exit] = self._loop.create_future()
        self._stdout, self._stderr = OutputSink(1), OutputSink(2)
        handler = _SinkHandler(self._stderr, self._config.pod)
        logging.getLogger("elasticjob").addHandler(handler)
        logging.getLogger("elasticjob").setLevel(logging.INFO)
        become_subreaper()
        self._open_files = raise_open_file_limit()
        call_on_error(self._loop, self._fail)
        with (
            call_on_thread_error(self._loop, self._fail),
            tempfile.TemporaryDirectory(prefix="elasticjob-", dir=self._config.scratch_parent) as scratch,
        ):
            await self._start(Path(scratch))
            try:
                exit_ = await self._finished
                self._report_unused_store(exit_)
                self._write_termination(exit_)
                self._write_torch_events(exit_)
                await self._save_state(exit_)
            finally:
                self._closing = True
                await self._close_in_time()
                if self._error is not None:  # whatever is left must not go on to write
                    kill(descendants(os.getpid()))
        logging.getLogger("elasticjob").removeHandler(handler)
        for number in (signal.SIGCHLD, *self._signals):
            self._loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)  # the agent exits anyway
        self._stdout.close(FLUSH_TIMEOUT)
        self._stderr.close(FLUSH_TIMEOUT)
        return exit_.code

    async def _start(self, scratch: Path) -> None:
        config = self._config
        if config.options_note and config.index == 0:  # the same on every node
            log.info("%s", config.options_note)
        log_read, self._fork_server_output = os.pipe()
        self._fork_server_log = WorkerPipe(log_read, "[fork-server]: ", self._stderr)
        env = node_env(config.env, config.local_world_size, CODE_ROOT, config.backend)
        self._launcher = Launcher(
            self._command, env, config.preload, self._fork_server_output, config.processes, scratch,
            config.torchrun_workers, child_setup(self._open_files),
        )  # fmt: skip
        self._workers = WorkerGroup(config, self._launcher, scratch, self._stdout, self._stderr)
        self._hangs = HangMonitor(self._workers.last_steps, self._progress_timed_out)
        self._step_times = StepTimeMonitor(self._workers.heartbeats, self._send_step_times, config.step_time_window)
        progress = self._workers.progress
        self._training = TrainingReports(progress.training, lambda training: self._node.send(training))
        self._workers.on_end = self._reap
        self._workers.on_call = lambda: self._dispatch(events.FunctionCalled())
        self._workers.on_guard = self._guard_reported
        self._workers.on_overdue = self._collective_overdue
        self._workers.on_results_ended = self._results_ended
        self._saver = StateSaver(progress.memory, self._is_first_node)
        progress.on_worker_connected = self._worker_connected
        progress.on_state_received = self._state_received
        self._health = NodeHealth(str(scratch), config.gpus, env, self._workers.non_workers)
        self._state = AgentState(
            announcement=await self._announcement(),
            stop_grace=config.stop_grace,
            graceful_shutdown=config.graceful_shutdown,
            processes=config.processes,
        )
        self._counts = telemetry.AgentCounts(self._loop.time(), self._loop.time())
        self._endpoint = await health_endpoint.serve_health(
            config.env,
            lambda: telemetry.health(self._counts, self._state, self._loop.time()),
            lambda: telemetry.metrics(self._counts, self._state, self._loop.time()),
        )
        self._node = CoordinatorClient(
            self._dial,
            lambda: machine.greeting(self._state),
            lambda message: self._dispatch(events.Received(message)),
            had_round=lambda: self._state.assignment is not None,
            join_timeout=config.join_timeout,
            on_link_change=self._link_changed,
            dial_standby=self._dial_standby,
        )
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)
        for number in self._signals:
            self._loop.add_signal_handler(number, self._leave, number.name)
        for name in self._early_signals:
            self._leave(name)
        self._spawn(self._connect())
        self._spawn(self._prepare())

    def _link_changed(self, link: ControlLink | None) -> None:
        self._reachability.coordinator_link_changed(link)
        ended = self._state.round if self._state.stopping and self._state.stopping.results_ended else None
        if link is not None and ended is not None and not self._node.knows(NodeResultsEnded(ended)):  # an older store
            self._dispatch(events.Received(BreakRound(ended)))

    async def _announcement(self) -> Announce:
        config = self._config
        return Announce(
            index=config.index,
            incarnation=config.incarnation,
            agent_id=config.agent_id,
            pod=config.pod,
            address=config.address,
            store_port=await self._start_store(),
            local_world_size=config.local_world_size,
            role=config.role,
        )

    async def _dial(self) -> ControlLink:
        return await self._dial_store(self._config.host, self._config.port)

    async def _dial_standby(self, store: StandbyStore) -> ControlLink:
        return await self._dial_store(store.host, store.port)

    async def _dial_store(self, host: str, port: int) -> ControlLink:
        config = self._config
        return await connect(
            host, port, role=LinkRole.NODE, key=config.key, run_id=config.run_id,
            keep_alive=self._keep_alive,
        )  # fmt: skip

    async def _start_store(self) -> int:
        """Start the process-group store of the next round and return its port."""
        clients = round_store_clients(self._config.backend)
        store = StoreServer(links=self._reachability.gate().accept, clients=clients)
        port = await store.start(self._config.address if is_loopback(self._config.address) else ALL_ADDRESSES)
        self._stores.add(store)
        return port

    def _leave(self, signal_name: str) -> None:
        self._workers.end_spares(for_good=True)
        if self._config.pod_grace is not None:
            self._leave_by = min(self._leave_by, self._loop.time() + self._config.pod_grace)
        self._set_deadline(self._config.graceful_shutdown)
        if self._workers.stopping:
            self._workers.limit_grace(self._within_pod_grace(math.inf, self._config.stop_grace))
        self._dispatch(events.SignalReceived(signal_name))

    def _set_deadline(self, seconds: float) -> None:
        """Let the workers know that they are killed after `seconds`, or earlier if an earlier end has been set."""
        self._deadline = min(self._deadline, self._leave_by, self._loop.time() + seconds)
        self._workers.progress.set_deadline(min(self._deadline, self._machine_end))

    def _set_machine_end(self, seconds: float | None) -> None:
        """Let the workers know when this machine ends. The agent does not kill them earlier for it."""
        self._machine_end = math.inf if seconds is None else self._loop.time() + max(0.0, seconds)
        self._set_deadline(math.inf)

    def _within_pod_grace(self, seconds: float, at_least: float) -> float:
        """Return `seconds`, or what the pod's grace period leaves if that is less; `at_least` if that is even less."""
        return min(seconds, max(at_least, self._leave_by - self._loop.time()))

    # ---- events and effects --------------------------------------------------------------------------------------

    def _dispatch(self, event: AgentEvent) -> None:
        if self._error is not None:  # the state is not what the agent has done, and others must not rely on it
            return
        decision = machine.decide(self._state, event)
        self._counts = telemetry.update_counts(self._counts, self._state, decision.state, self._loop.time())
        self._state = decision.state
        try:
            for effect in decision.effects:
                self._do(effect)
        except Exception as error:
            # The state says that all effects have happened, and the caller may take this for an error of its own.
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """End the agent after an error that nothing handled: what it has left undone is unknown."""
        if self._error is not None or self._closing:  # the clean-up has a time limit, and the outcome is written
            return
        self._error = error
        if not self._finished.done():
            self._finished.set_exception(error)
        elif self._task is not None:  # it saves the state, and may wait for what never comes
            self._task.cancel()

    def _do(self, effect: Effect) -> None:
        match effect:
            case Send(WorkersStopped() as message):
                self._node.send(replace(message, ended_ranks=self._workers.ended_ranks(message.round)))
            case Send(NodeResultsEnded(round_id) as message) if not self._node.knows(message):
                self._dispatch(events.Received(BreakRound(round_id)))
            case Send(message):
                self._node.send(message)
            case Log(text):
                log.info("%s", text)
            case AdmitWorkers(start):
                admit_workers(self._stores.newest, start, self._open_files[1])
            case LaunchWorkers(start):
                self._reachability.begin_round(start)
                self._deadline = math.inf
                self._set_deadline(math.inf)
                self._step_times.stop()
                self._training.stop()
                self._record_round(start.round)
                self._workers.expect_start()
                self._spawn(self._launch(start, self._stores.newest))
            case StartAhead(provisional):
                self._workers.expect_start()
                self._spawn(self._start_ahead(provisional))
            case HoldWorkers(round_id):
                self._spawn(self._hold(round_id))
            case StopWorkersAt(round_id, step):
                if isinstance(self._state.planned_end, LastStep):
                    self._set_deadline(self._state.planned_end.seconds)
                if not self._workers.progress.stop_at(step):
                    self._dispatch(events.LastStepMissed(round_id))
            case StopWorkers(grace):
                if self._state.stopping is None or not self._state.stopping.graceful:
                    self._reachability.end_round()
                grace = self._within_pod_grace(grace, self._config.stop_grace)
                self._set_deadline(grace)
                self._stop(replace(effect, grace=grace))
            case LeaveCollectives():
                self._workers.break_collectives()
            case DumpStacks(round_id):
                self._spawn(self._dump_stacks(round_id))
            case FreezeWorkers(on):
                self._workers.freeze(on)
                if not on and self._state.assignment is not None:
                    self._watch_for_hangs(self._state.assignment)  # they have made no steps
            case CheckHealth():
                self._spawn(self._check_health())
            case StartLeaveTimer(seconds):
                if self._leave_timer:
                    self._leave_timer.cancel()
                seconds = self._within_pod_grace(seconds, 1.0)
                self._leave_timer = self._loop.call_later(seconds, self._dispatch, events.LeaveTimedOut())
            case SetMachineEnd(seconds):
                self._set_machine_end(seconds)
            case Exit():
                self._workers.end_spares(for_good=True)
                self._finished.set_result(effect)
            case _ as never:
                assert_never(never)

    def _spawn(self, work: Coroutine[None, None, object]) -> None:
        task = background_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- background tasks ----------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        try:
            await self._node.run()
        except NoCoordinatorError as error:
            self._dispatch(events.StoreUnreachable(str(error)))

    async def _prepare(self) -> None:
        ready, healthy = await asyncio.gather(self._launcher.prepare(), self._check_health())
        log.info("%s", ready)
        if healthy:
            self._dispatch(events.LauncherReady(self._launcher.fork_disabled_reason))

    async def _check_health(self) -> bool:
        problem = await self._health.find_problem()
        if problem is not None:
            kind, pod, text = FailureClass.DEVICE_UNHEALTHY, self._config.pod, problem.text[:1024]
            failure = Failure(kind, pod, time.time(), message=text, suspected=problem.suspected)
            self._dispatch(events.NodeUnhealthy(failure))
        return problem is None

    async def _launch(self, start: StartRound, store: StoreServer) -> None:
        """Start the workers of a round whose store is `store`; older stores are needed until then."""
        failure = await self._workers.start(start)
        if self._launcher.fork_disabled_reason != self._state.announcement.fork_disabled_reason:
            self._dispatch(events.LauncherReady(self._launcher.fork_disabled_reason))
        if failure is not None:
            self._dispatch(events.WorkerEnded(start.round, 0, failure))
            return
        self._watch_for_hangs(start)
        self._dispatch(events.WorkersLaunched(start.round))
        self._spawn(self._watch_scripts_variables(start.round))
        self._reap()
        await self._stores.close_older(store)

    async def _watch_scripts_variables(self, round_id: RoundId) -> None:
        """Report that workers start by exec, if their script sets what the fork server has read: it does so early."""
        end = self._loop.time() + AT_ONCE
        while self._loop.time() < end and not self._launcher.fork_disabled_reason:
            await asyncio.sleep(_SCRIPT_INTERVAL)
            if self._state.assignment is None or self._state.assignment.round != round_id:
                return
            self._workers.find_early_variables()
        if self._launcher.fork_disabled_reason != self._state.announcement.fork_disabled_reason:
            self._dispatch(events.LauncherReady(self._launcher.fork_disabled_reason))

    async def _start_ahead(self, provisional: StartRound) -> None:
        if (failure := await self._workers.start_ahead(provisional)) is not None:
            self._dispatch(events.NodeUnhealthy(failure))
        self._dispatch(events.StartedAhead())

    async def _hold(self, round_id: RoundId) -> None:
        self._dispatch(events.WorkersHeld(round_id, await self._workers.progress.hold(self._config.local_world_size)))

    def _watch_for_hangs(self, start: StartRound) -> None:
        guard = self._workers.guard
        self._hangs.start(guard.step_timeout if guard else start.progress_timeout, repeat=not start.hang_ends_round)

    def _guard_reported(self) -> None:
        guard, start = self._workers.guard, self._state.assignment
        if start is None:
            return
        if guard is not None and guard.step_timeout > 0:
            self._watch_for_hangs(start)
        self._dispatch(events.HangGuarded(guard.status if guard else ""))

    def _collective_overdue(self) -> None:
        # A hangPolicy watches ranks from their first step on, and torch's watchdog is off before it too.
        if self._workers.guard is not None or not self._workers.last_steps():
            self._progress_timed_out()
        else:
            log.info("the round goes on: spec.hangPolicy decides when it has made no progress for too long")

    def _results_ended(self) -> None:
        if self._state.round is not None:
            self._dispatch(events.AllResultsEnded(self._state.round))

    def _progress_timed_out(self) -> None:
        if self._state.round is not None:
            self._dispatch(events.ProgressTimedOut(self._state.round))

    async def _dump_stacks(self, round_id: RoundId) -> None:
        if (failure := await self._workers.dump_stacks()) is not None:
            self._dispatch(events.StackReport(round_id, failure))

    def _send_step_times(self, step_seconds: float, own_seconds: tuple[float, ...]) -> None:
        if self._state.round is not None:
            self._node.send(StepTimes(self._state.round, step_seconds, own_seconds))

    def _stop(self, stop: StopWorkers) -> None:
        self._hangs.stop()
        self._step_times.stop()
        self._training.stop()
        if stop.discard_state:
            self._workers.discard_state()
        if self._workers.stopping:
            self._workers.limit_grace(stop.grace)
        else:
            self._spawn(self._stop_workers(stop))

    async def _stop_workers(self, stop: StopWorkers) -> None:
        round_id = self._state.round
        first = signal.Signals.__members__.get(self._state.leaving, signal.SIGTERM)

        def report_hang(failure: Failure) -> None:
            if round_id is not None:
                self._dispatch(events.StackReport(round_id, failure))

        report = report_hang if stop.dump_stacks else None
        unhealthy = await self._workers.stop(
            stop.grace, first, report,
            park=not stop.for_good, job_goes_on=stop.job_goes_on, at_once=stop.at_once,
            at_most=self._within_pod_grace(math.inf, self._config.stop_grace),
        )  # fmt: skip
        self._reachability.end_round()
        store_port, workers = await self._start_store(), self._workers
        parked, has_state, new = workers.has_parked, workers.has_state, workers.new_processes
        self._dispatch(events.AllWorkersStopped(store_port, unhealthy, parked, has_state, new))

    def _reap(self) -> None:
        for ended in self._workers.reap():
            self._training.send_now()  # before the message that ends the round: a later one would be dropped
            self._dispatch(events.WorkerEnded(ended.round, ended.local_rank, ended.failure, ended.as_planned))
        if not self._workers.has_state:
            self._dispatch(events.StateLost())

    def _worker_connected(self) -> None:
        self._step_times.start(self._config.processes)
        if self._state.assignment is not None and self._state.assignment.rank == 0:
            self._training.start()
        if not self._saving:  # without a connected worker there is no copy, and the agent sleeps
            self._saving = True
            self._spawn(self._saver.run())

    def _state_received(self, received: StateReceived) -> None:
        speed = describe_speed(received.size, received.seconds)
        interface = f" over {received.interface}" if received.interface else ""
        log.info("rank %d has received the training state from another rank: %s%s", received.rank, speed, interface)
        self._node.send(received)

    def _is_first_node(self) -> bool:
        return self._state.assignment is not None and self._state.assignment.group_rank == 0

    async def _save_state(self, exit_: Exit) -> None:
        """Save this node's copy of `elasticjob.State`, which ends with the agent, unless the script has succeeded.

        A script that succeeds has saved what it wants. Its last copy is of an earlier step: the next job with the same
        file would repeat the end of the training.
        """
        if exit_.code is not ExitCode.SUCCEEDED:
            await self._saver.save_last()

    # ---- the end -------------------------------------------------------------------------------------------------

    async def _close_in_time(self) -> None:
        try:
            await asyncio.wait_for(self._close(), CLOSE_TIMEOUT)
        except asyncio.TimeoutError:  # the outcome is written, and stays what it is
            log.warning("processes are left after %g s: the end of the container ends them", CLOSE_TIMEOUT)

    async def _close(self) -> None:
        self._reachability.end_round()
        if self._error is not None:
            self._workers.expect_no_start()
        await self._workers.stop(0.0, at_once=True)
        await self._workers.until_gone(CLOSE_TIMEOUT)  # only this agent reaps them
        await self._workers.finish_log_files()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._launcher.close()
        if self._endpoint is not None:
            self._endpoint.close()
        self._workers.progress.close()
        self._workers.restartable.close()
        self._fork_server_log.close()
        os.close(self._fork_server_output)
        await self._stores.close()

    def _write_torch_events(self, exit_: Exit) -> None:
        """Write torch's events to stderr, as torch's `console` handler does."""
        config = self._config
        if config.event_log_handler != "console":
            return
        entry_point = self._command.argv[0].rsplit("/", 1)[-1]
        subject = telemetry.EventSubject(config.run_id, config.role, socket.gethostname(), entry_point)
        seconds = self._loop.time() - self._counts.started
        for event in telemetry.final_events(subject, self._state, exit_.termination.outcome, seconds):
            self._stderr.put(json.dumps(event).encode() + b"\n")

    def _report_unused_store(self, exit_: Exit) -> None:
        """Log it if the workers have succeeded without any process group: nothing else shows that to the user.

        Only the store of the round is known. A script may have joined its processes in another way.
        """
        start = self._state.assignment
        if exit_.code is not ExitCode.SUCCEEDED or self._config.backend is Backend.C10D:
            return
        if start is None or start.group_rank > 0 or start.world_size == 1 or self._stores.oldest.counters.requests:
            return
        log.warning("%s", _NO_PROCESS_GROUP % start.world_size)

    def _record_round(self, round_id: RoundId) -> None:
        # An agent that cannot write says so at its end.
        with contextlib.suppress(OSError):
            write_round(self._config.termination_log, round_id)

    def _write_termination(self, exit_: Exit) -> None:
        try:
            write_termination(self._config.termination_log, exit_.termination)
        except OSError as error:
            log.warning("termination message was not written: %s", error)


_NO_PROCESS_GROUP = (
    "no worker has connected to MASTER_ADDR:MASTER_PORT: unless the script joins its processes in another way, each of "
    "the %d workers ran the whole script alone. Call torch.distributed.init_process_group to train together"
)


class _SinkHandler(logging.Handler):
    """Write the agent's log to the sink of the workers' stderr, which never blocks the event loop."""

    def __init__(self, sink: OutputSink, pod: str) -> None:
        super().__init__()
        self._sink = sink
        self._pod = pod

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info:
            text = f"{text}\n{''.join(traceback.format_exception(*record.exc_info)).rstrip()}"
        self._sink.put(f"[agent] {self._pod}: {printable(text)}\n".encode(errors="replace"))

"""The agent's I/O: pass events to `decide`, and execute the effects it decides on. One event loop, no polling.

README.md beside this file tells how a round goes through it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from elasticjob._runtime.agent.config import AgentConfig
from elasticjob._runtime.agent.execution.deadlines import WorkerDeadlines
from elasticjob._runtime.agent.execution.last_reports import (
    warn_of_unused_store,
    write_last_message,
    write_torch_events,
)
from elasticjob._runtime.agent.execution.round_monitors import RoundMonitors
from elasticjob._runtime.agent.execution.worker_executor import WorkerExecutor
from elasticjob._runtime.agent.monitoring.node.node_health import NodeHealth
from elasticjob._runtime.agent.monitoring.node.reachability import ReachabilityMonitor
from elasticjob._runtime.agent.processes import become_subreaper, child_setup, descendants, kill
from elasticjob._runtime.agent.reporting import health_endpoint, telemetry
from elasticjob._runtime.agent.reporting.agent_log import logging_to
from elasticjob._runtime.agent.reporting.state_saver import StateSaver
from elasticjob._runtime.agent.reporting.status_requests import StatusRequests
from elasticjob._runtime.agent.reporting.worker_output import OutputSink, WorkerPipe
from elasticjob._runtime.agent.round_stores import RoundStores, admit_workers
from elasticjob._runtime.agent.start_workers.command import UserCommand
from elasticjob._runtime.agent.start_workers.launcher import Launcher
from elasticjob._runtime.agent.start_workers.worker_environment import node_env
from elasticjob._runtime.agent.state_machine import decide as machine
from elasticjob._runtime.agent.state_machine import events
from elasticjob._runtime.agent.state_machine.effects import (
    AdmitWorkers,
    CheckHealth,
    Effect,
    Exit,
    Log,
    Send,
    SetNodeEnd,
    StartLeaveTimer,
)
from elasticjob._runtime.agent.state_machine.events import AgentEvent
from elasticjob._runtime.agent.state_machine.state import AgentState
from elasticjob._runtime.agent.workers.worker_group import WorkerGroup
from elasticjob._runtime.contract.messages import (
    AgentToCoordinator,
    BreakRound,
    NodeResultsEnded,
    StateReceived,
    WorkersStopped,
)
from elasticjob._runtime.contract.names import Backend, ExitCode
from elasticjob._runtime.control_link.coordinator_client import CoordinatorClient, NoCoordinatorError
from elasticjob._runtime.control_link.link import ControlLink, LinkRole, connect
from elasticjob._runtime.store.open_files import raise_open_file_limit
from elasticjob._runtime.system.code_root import CODE_ROOT
from elasticjob._runtime.system.loop_errors import background_task, call_on_error, call_on_thread_error
from elasticjob._runtime.system.sockets.keep_alive import KeepAlive

log = logging.getLogger(__name__)

FLUSH_TIMEOUT = 5.0
"""Seconds that a slow reader of the agent's output may delay the agent's exit."""
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
            lambda: self._coordinator.greet_again(),
        )

    async def run(self) -> ExitCode:
        """Join, run workers until the job or this pod's part in it is over, and return the exit code.

        The termination message is written by then. An error of the agent itself is raised; no process of the workers
        is left then.
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
        become_subreaper()
        self._open_files = raise_open_file_limit()
        call_on_error(self._loop, self._fail)
        with (
            logging_to(self._stderr, self._config.pod),
            call_on_thread_error(self._loop, self._fail),
            tempfile.TemporaryDirectory(prefix="elasticjob-", dir=self._config.scratch_parent) as scratch,
        ):
            await self._start(Path(scratch))
            try:
                exit_ = await self._finished
                await self._report_end(exit_)
            finally:
                self._closing = True
                await self._close_in_time()
                if self._error is not None:  # whatever is left must not go on to write
                    kill(descendants(os.getpid()))
        for number in (signal.SIGCHLD, *self._signals):
            self._loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)  # the agent exits anyway
        self._stdout.close(FLUSH_TIMEOUT)
        self._stderr.close(FLUSH_TIMEOUT)
        return exit_.code

    # ---- the start ---------------------------------------------------------------------------------------------------

    async def _start(self, scratch: Path) -> None:
        """Create the parts of the agent; then connect to the coordinator, and make ready what workers need."""
        if self._config.options_note and self._config.index == 0:  # the same in every pod
            log.info("%s", self._config.options_note)
        env = node_env(self._config.env, self._config.local_world_size, CODE_ROOT, self._config.backend)
        self._status_requests = StatusRequests(
            scratch, lambda: self._state.rank_0_round, lambda: self._monitors.start_training_reports()
        )
        if self._config.backend is Backend.ELASTICJOB:
            env |= await self._status_requests.start(env)
        self._create_workers(scratch, env)
        self._create_executor()
        self._state = AgentState(
            announcement=self._config.announcement(await self._start_store()),
            stop_grace=self._config.stop_grace,
            graceful_shutdown=self._config.graceful_shutdown,
            processes=self._config.processes,
        )
        self._counts = telemetry.AgentCounts(self._loop.time(), self._loop.time())
        self._endpoint = await health_endpoint.serve_health(
            self._config.env,
            lambda: telemetry.health(self._counts, self._state, self._loop.time()),
            lambda: telemetry.metrics(self._counts, self._state, self._loop.time()) + self._status_requests.metrics(),
        )
        self._coordinator = CoordinatorClient(
            lambda: self._dial(self._config.host, self._config.port),
            lambda: machine.greeting(self._state),
            lambda message: self._dispatch(events.Received(message)),
            had_round=lambda: self._state.assignment is not None,
            join_timeout=self._config.join_timeout,
            on_link_change=self._link_changed,
            dial_standby=lambda store: self._dial(store.host, store.port),
        )
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)
        for number in self._signals:
            self._loop.add_signal_handler(number, self._leave, number.name)
        for name in self._early_signals:
            self._leave(name)
        self._spawn(self._connect())
        self._spawn(self._prepare())

    def _create_workers(self, scratch: Path, env: Mapping[str, str]) -> None:
        config = self._config
        log_read, self._fork_server_output = os.pipe()
        self._fork_server_log = WorkerPipe(log_read, "[fork-server]: ", self._stderr)
        self._launcher = Launcher(
            self._command, env, config.preload, self._fork_server_output, config.processes, scratch,
            config.torchrun_workers, child_setup(self._open_files),
        )  # fmt: skip
        self._workers = WorkerGroup(config, self._launcher, scratch, self._stdout, self._stderr)
        self._saver = StateSaver(self._workers.progress.memory, lambda: self._state.is_first_member)
        self._health = NodeHealth(str(scratch), config.gpus, env, self._workers.helper_pids)

    def _create_executor(self) -> None:
        """Connect the workers with what watches them, and with the decisions."""
        config, workers = self._config, self._workers
        self._deadlines = WorkerDeadlines(self._loop.time, workers.progress.set_deadline)
        self._monitors = RoundMonitors(
            workers,
            lambda: workers.progress.training() or self._status_requests.training() or workers.log_watch.training(),
            processes=config.processes,
            step_time_window=config.step_time_window,
            state=lambda: self._state,
            dispatch=self._dispatch,
            send=lambda message: self._coordinator.send(message),
        )
        self._executor = WorkerExecutor(
            config, self._launcher, workers, self._stores, self._monitors, self._deadlines, self._reachability,
            state=lambda: self._state, dispatch=self._dispatch, spawn=self._spawn, start_store=self._start_store,
        )  # fmt: skip
        self._executor.listen()
        workers.on_end = self._reap
        workers.on_call = lambda: self._dispatch(events.FunctionCalled())
        workers.on_guard = self._monitors.guard_reported
        workers.on_overdue = self._monitors.collective_overdue
        workers.progress.on_worker_connected = self._worker_connected
        workers.progress.on_state_received = self._state_received

    async def _start_store(self) -> int:
        """Start the process-group store of the next round and return its port."""
        gate = self._reachability.gate()
        return await self._stores.start_next(self._config.address, self._config.backend, gate)

    # ---- the coordinator ---------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        try:
            await self._coordinator.run()
        except NoCoordinatorError as error:
            self._dispatch(events.StoreUnreachable(str(error)))

    async def _dial(self, host: str, port: int) -> ControlLink:
        config = self._config
        return await connect(
            host, port, role=LinkRole.AGENT, key=config.key, run_id=config.run_id,
            keep_alive=self._keep_alive,
        )  # fmt: skip

    def _link_changed(self, link: ControlLink | None) -> None:
        self._reachability.coordinator_link_changed(link)
        stopping, round_id = self._state.stopping, self._state.round
        if link is not None and round_id is not None and stopping is not None and stopping.results_ended:
            self._break_without_answer(NodeResultsEnded(round_id))

    def _break_without_answer(self, message: NodeResultsEnded) -> bool:
        """Let workers break their collectives at once if the store is older than this message: it does not answer."""
        if is_older := not self._coordinator.knows(message):
            self._dispatch(events.Received(BreakRound(message.round)))
        return is_older

    # ---- events and effects ------------------------------------------------------------------------------------------

    def _dispatch(self, event: AgentEvent) -> None:
        """Decide on one event, and execute the effects."""
        if self._error is not None:  # the state is not what the agent has done, and others must not rely on it
            return
        decision = machine.decide(self._state, event)
        self._counts = telemetry.update_counts(self._counts, self._state, decision.state, self._loop.time())
        self._state = decision.state
        try:
            for effect in decision.effects:
                self.execute(effect)
        except Exception as error:
            # The state says that all effects have happened, and the caller may take this for an error of its own.
            self._fail(error)
            raise

    def execute(self, effect: Effect) -> None:
        """Execute one effect, or begin it."""
        match effect:
            case Send(message):
                self._send(message)
            case Log(text):
                log.info("%s", text)
            case AdmitWorkers(start):
                admit_workers(self._stores.newest, start, self._open_files[1])
            case CheckHealth():
                self._spawn(self._check_health())
            case StartLeaveTimer(seconds):
                self._start_leave_timer(seconds)
            case SetNodeEnd(seconds):
                self._deadlines.node_ends_within(seconds)
            case Exit():
                self._workers.discard_spares(for_good=True)
                self._finished.set_result(effect)
            case _:
                self._executor.execute(effect)

    def _send(self, message: AgentToCoordinator) -> None:
        match message:
            case WorkersStopped():
                self._coordinator.send(replace(message, ended_ranks=self._workers.ended_ranks(message.round)))
            case NodeResultsEnded() if self._break_without_answer(message):
                pass
            case _:
                self._coordinator.send(message)

    def _start_leave_timer(self, seconds: float) -> None:
        if self._leave_timer:
            self._leave_timer.cancel()
        seconds = self._deadlines.within_pod_grace(seconds, 1.0)
        self._leave_timer = self._loop.call_later(seconds, self._dispatch, events.LeaveTimedOut())

    def _fail(self, error: BaseException) -> None:
        """End the agent after an error that nothing handled: what it has left undone is unknown."""
        if self._error is not None or self._closing:  # the clean-up has a time limit, and the outcome is written
            return
        self._error = error
        if not self._finished.done():
            self._finished.set_exception(error)
        elif self._task is not None:  # it saves the state, and may wait for what never comes
            self._task.cancel()

    def _spawn(self, work: Coroutine[None, None, object]) -> None:
        task = background_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- what happens in the pod ------------------------------------------------------------------------------------

    async def _prepare(self) -> None:
        ready, healthy = await asyncio.gather(self._launcher.prepare(), self._check_health())
        log.info("%s", ready)
        if healthy:
            self._dispatch(events.LauncherReady(self._launcher.fork_disabled_reason))

    async def _check_health(self) -> bool:
        problem = await self._health.find_problem()
        if problem is not None:
            self._dispatch(events.NodeUnhealthy(problem.failure(self._config.pod, time.time())))
        return problem is None

    def _reap(self) -> None:
        self._executor.reap()

    def _leave(self, signal_name: str) -> None:
        self._workers.discard_spares(for_good=True)
        self._deadlines.pod_ends_within(self._config.pod_grace)
        self._deadlines.end_within(self._config.graceful_shutdown)
        self._executor.limit_grace()
        self._dispatch(events.SignalReceived(signal_name))

    def _worker_connected(self) -> None:
        self._monitors.worker_connected()
        self._workers.command.rank_connected()
        if not self._saving:  # without a connected worker there is no copy, and the agent sleeps
            self._saving = True
            self._spawn(self._saver.run())

    def _state_received(self, received: StateReceived) -> None:
        log.info("%s", telemetry.describe_transfer(received))
        self._coordinator.send(received)

    # ---- the end -----------------------------------------------------------------------------------------------------

    async def _report_end(self, exit_: Exit) -> None:
        config, seconds = self._config, self._loop.time() - self._counts.started
        warn_of_unused_store(config, self._state, exit_.code, self._stores.oldest.counters.requests)
        write_last_message(config.termination_log, exit_.termination)
        write_torch_events(config, self._command.argv[0], self._state, exit_, seconds, self._stderr)
        await self._saver.save_at_exit(exit_.code)

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
        await self._workers.until_all_ended(CLOSE_TIMEOUT)  # only this agent reaps them
        await self._workers.finish_log_files()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._launcher.close()
        self._status_requests.close()
        if self._endpoint is not None:
            self._endpoint.close()
        self._workers.close()
        self._fork_server_log.close()
        os.close(self._fork_server_output)
        await self._stores.close()

"""Execute the effects that concern workers, and report as events how they end."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import TypeAlias

from elasticjob._runtime.agent.config import AgentConfig
from elasticjob._runtime.agent.execution.deadlines import WorkerDeadlines
from elasticjob._runtime.agent.execution.round_monitors import RoundMonitors
from elasticjob._runtime.agent.monitoring.node.reachability import ReachabilityMonitor
from elasticjob._runtime.agent.reporting.termination_message import write_round
from elasticjob._runtime.agent.round_stores import RoundStores
from elasticjob._runtime.agent.start_workers.fork_fallback import AT_ONCE
from elasticjob._runtime.agent.start_workers.launcher import Launcher
from elasticjob._runtime.agent.state_machine import events
from elasticjob._runtime.agent.state_machine.effects import (
    BreakCollectivesOfWorkers,
    DumpStacks,
    EndLaunchers,
    FreezeWorkers,
    HoldWorkers,
    LaunchWorkers,
    PrestartWorkers,
    StopWorkers,
    StopWorkersAt,
)
from elasticjob._runtime.agent.state_machine.endings.outcomes import assert_never
from elasticjob._runtime.agent.state_machine.events import AgentEvent
from elasticjob._runtime.agent.state_machine.state import AgentState, LastStep
from elasticjob._runtime.agent.workers.separate_worlds import FIRST_POLL, LONGEST_POLL
from elasticjob._runtime.agent.workers.worker_group import WorkerGroup
from elasticjob._runtime.contract.messages import Failure, StartRound
from elasticjob._runtime.contract.names import Backend, RoundId
from elasticjob._runtime.store.server import StoreServer

SCRIPT_POLL_INTERVAL = 1.0
"""Seconds between two checks for a variable that a worker's script sets."""

WorkerEffect: TypeAlias = (
    LaunchWorkers
    | PrestartWorkers
    | EndLaunchers
    | HoldWorkers
    | StopWorkersAt
    | StopWorkers
    | BreakCollectivesOfWorkers
    | DumpStacks
    | FreezeWorkers
)


@dataclass
class WorkerExecutor:
    """The workers' side of an agent. `execute` returns at once; what takes longer runs in a task of its own."""

    config: AgentConfig
    launcher: Launcher
    workers: WorkerGroup
    stores: RoundStores
    monitors: RoundMonitors
    deadlines: WorkerDeadlines
    reachability: ReachabilityMonitor
    state: Callable[[], AgentState]
    """Returns the agent's present state."""
    dispatch: Callable[[AgentEvent], None]
    """Lets the agent decide on an event."""
    spawn: Callable[[Coroutine[None, None, object]], None]
    """Runs a coroutine in a task of the agent's."""
    start_store: Callable[[], Awaitable[int]]
    """Starts the process-group store of the next round and returns its port."""

    def listen(self) -> None:
        """Report from now on what happens to the workers and to the command of the pod."""
        self.workers.on_results_ended = self.results_ended
        self.workers.command.on_stage_begun = lambda *stage: self.dispatch(events.StageStarted(*stage))
        self.workers.command.on_stage_over = self._stage_over

    def execute(self, effect: WorkerEffect) -> None:
        """Execute one effect, or begin it."""
        match effect:
            case LaunchWorkers(start):
                self._begin_round(start)
                self.spawn(self._launch(start, self.stores.newest))
            case PrestartWorkers(provisional):
                self.workers.expect_start()
                self.spawn(self._prestart(provisional))
            case EndLaunchers(stage):
                self.workers.command.finish_stages(stage)
            case HoldWorkers(round_id):
                self.spawn(self._hold(round_id))
            case StopWorkersAt(round_id, step):
                self._stop_at(round_id, step)
            case StopWorkers():
                self._begin_stop(effect)
            case BreakCollectivesOfWorkers():
                self.workers.break_collectives()
            case DumpStacks(round_id):
                self.spawn(self._dump_stacks(round_id))
            case FreezeWorkers(on):
                self._freeze(on)
            case _ as never:
                assert_never(never)

    def reap(self) -> None:
        """Report the workers that have ended, and that the pod's training state has ended with them."""
        for ended in self.workers.reap():
            self.monitors.send_training_now()
            self.dispatch(events.WorkerEnded(ended.round, ended.local_rank, ended.failure, ended.as_planned))
        if not self.workers.has_state:
            self.dispatch(events.StateLost())

    def results_ended(self) -> None:
        """Report that no worker of the round counts a step any more."""
        if (round_id := self.state().round) is not None:
            self.dispatch(events.AllResultsEnded(round_id))

    def _stage_over(self, round_id: RoundId, stage: int) -> None:
        self.monitors.send_training_now()  # the ranks of the next launcher report in their place
        self.dispatch(events.StageOver(round_id, stage))

    def limit_grace(self) -> None:
        """Shorten a stop in progress to what the pod's grace period leaves."""
        if self.workers.stopping:
            self.workers.limit_grace(self.deadlines.within_pod_grace(math.inf, self.config.stop_grace))

    # ---- start -------------------------------------------------------------------------------------------------------

    def _begin_round(self, start: StartRound) -> None:
        self.reachability.begin_round(start)
        self.deadlines.begin_round()
        self.monitors.stop()
        with contextlib.suppress(OSError):  # an agent that cannot write says so at its end
            write_round(self.config.termination_log, start.round)
        self.workers.expect_start()

    async def _launch(self, start: StartRound, store: StoreServer) -> None:
        """Start the workers of a round whose store is `store`; older stores are needed until then."""
        failure = await self.workers.start(start)
        self._report_exec()
        if failure is not None:
            self.dispatch(events.WorkerEnded(start.round, 0, failure))
            self.reap()  # a process that died meanwhile must not stay in the table
            return
        self.monitors.watch_for_hangs(start)
        self.dispatch(events.WorkersLaunched(start.round))
        self.spawn(self._watch_scripts_variables(start.round))
        if self.config.backend is Backend.ELASTICJOB:
            self.spawn(self._watch_worlds(start.round))
        self.reap()
        await self.stores.close_older(store)

    async def _prestart(self, provisional: StartRound) -> None:
        if (failure := await self.workers.prestart(provisional)) is not None:
            self.dispatch(events.NodeUnhealthy(failure))
        self.dispatch(events.WorkersPrestarted())

    async def _watch_scripts_variables(self, round_id: RoundId) -> None:
        """Report that workers start by exec, if their script sets what the fork server has read: it does so early."""
        loop = asyncio.get_running_loop()
        end = loop.time() + AT_ONCE
        while loop.time() < end and not self.launcher.fork_disabled_reason:
            await asyncio.sleep(SCRIPT_POLL_INTERVAL)
            if self.state().round != round_id:
                return
            self.workers.find_early_variables()
        self._report_exec()

    async def _watch_worlds(self, round_id: RoundId) -> None:
        """End workers below which processes train in another world, as long as the round runs."""
        interval = FIRST_POLL
        while True:
            await asyncio.sleep(interval)
            if self.state().round != round_id:
                return
            await self.workers.separate_worlds.end_workers()
            interval = min(2 * interval, LONGEST_POLL)

    def _report_exec(self) -> None:
        """Report why workers start by exec from now on, if the coordinator does not know that yet."""
        reason = self.launcher.fork_disabled_reason
        if reason != self.state().announcement.fork_disabled_reason:
            self.dispatch(events.LauncherReady(reason))

    # ---- while they run ----------------------------------------------------------------------------------------------

    async def _hold(self, round_id: RoundId) -> None:
        step = await self.workers.progress.hold(self.config.local_world_size)
        self.dispatch(events.WorkersHeld(round_id, step))

    def _stop_at(self, round_id: RoundId, step: int) -> None:
        planned_end = self.state().planned_end
        if isinstance(planned_end, LastStep):
            self.deadlines.end_within(planned_end.seconds)
        if not self.workers.progress.stop_at(step):
            self.dispatch(events.LastStepMissed(round_id))

    async def _dump_stacks(self, round_id: RoundId) -> None:
        if (failure := await self.workers.dump_stacks()) is not None:
            self.dispatch(events.StackReport(round_id, failure))

    def _freeze(self, on: bool) -> None:
        self.workers.freeze(on)
        start = self.state().assignment
        if not on and start is not None:
            self.monitors.watch_for_hangs(start)  # frozen workers have made no steps

    # ---- stop --------------------------------------------------------------------------------------------------------

    def _begin_stop(self, stop: StopWorkers) -> None:
        stopping = self.state().stopping
        if stopping is None or not stopping.graceful:
            self.reachability.end_round()
        grace = self.deadlines.within_pod_grace(stop.grace, self.config.stop_grace)
        self.deadlines.end_within(grace)
        self.monitors.stop()
        if stop.discard_state:
            self.workers.discard_state()
        if self.workers.stopping:
            self.workers.limit_grace(grace)
        else:
            self.spawn(self._stop(replace(stop, grace=grace)))

    async def _stop(self, stop: StopWorkers) -> None:
        round_id, workers = self.state().round, self.workers
        first = signal.Signals.__members__.get(self.state().leaving, signal.SIGTERM)

        def report_hang(failure: Failure) -> None:
            if round_id is not None:
                self.dispatch(events.StackReport(round_id, failure))

        report = report_hang if stop.dump_stacks else None
        unhealthy = await workers.stop(
            stop.grace, first, report,
            park=not stop.for_good, job_goes_on=stop.job_goes_on, at_once=stop.at_once,
            at_most=self.deadlines.within_pod_grace(math.inf, self.config.stop_grace),
        )  # fmt: skip
        self.reachability.end_round()
        store_port = await self.start_store()
        parked, has_state, new = workers.has_processes_for_next_round, workers.has_state, workers.new_processes
        self.dispatch(events.AllWorkersStopped(store_port, unhealthy, parked, has_state, new))

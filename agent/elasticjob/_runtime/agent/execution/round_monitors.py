"""Watch the workers of a round: hangs, the seconds of a step, and what the script reports of its training."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from elasticjob._runtime.agent.monitoring.progress.hang_guard import HangGuard, without_steps
from elasticjob._runtime.agent.monitoring.progress.hangs import HangMonitor
from elasticjob._runtime.agent.monitoring.progress.step_times import StepTimeMonitor
from elasticjob._runtime.agent.monitoring.progress.training_reports import TrainingReports
from elasticjob._runtime.agent.monitoring.progress.worker_progress import ProgressReport
from elasticjob._runtime.agent.reporting.log_watch import LogWatch, MetCondition
from elasticjob._runtime.agent.state_machine import events
from elasticjob._runtime.agent.state_machine.events import AgentEvent
from elasticjob._runtime.agent.state_machine.state import AgentState
from elasticjob._runtime.contract.messages import AgentToCoordinator, StartRound, StepTimes, TrainingProgress

log = logging.getLogger(__name__)


class MonitoredWorkers(Protocol):
    """What the monitors read of the workers, see `WorkerGroup`."""

    @property
    def guard(self) -> HangGuard | None: ...

    @property
    def log_watch(self) -> LogWatch: ...

    def last_steps(self) -> Sequence[float]: ...

    def heartbeats(self) -> Sequence[ProgressReport]: ...


class RoundMonitors:
    """Monitors of one agent. In a round call `watch_for_hangs`, `worker_connected` for each worker, then `stop`."""

    def __init__(
        self,
        workers: MonitoredWorkers,
        training: Callable[[], TrainingProgress | None],
        *,
        processes: int,
        step_time_window: float,
        state: Callable[[], AgentState],
        dispatch: Callable[[AgentEvent], None],
        send: Callable[[AgentToCoordinator], None],
    ) -> None:
        """`training` returns what the script reports of its training. `processes`: that this agent starts in a round.

        `step_time_window`: seconds over which the time of a step is measured.
        """
        self._workers = workers
        self._processes = processes
        self._state = state
        self._dispatch = dispatch
        self._send = send
        self._hangs = HangMonitor(workers.last_steps, self._progress_timed_out, self._steps_watched)
        self._without_steps = ""
        """`status.hangGuard` while the hangPolicy has no step to watch; empty otherwise."""
        self._step_times = StepTimeMonitor(workers.heartbeats, self._send_step_times, step_time_window)
        self._training = TrainingReports(training, send)
        workers.log_watch.on_step = self._training.start
        workers.log_watch.on_condition = self._condition_met

    def watch_for_hangs(self, start: StartRound) -> None:
        """Watch the workers of a round from now on: that they continue to make steps."""
        guard = self._workers.guard
        if self._without_steps and start.progress_timeout <= 0:  # the policy was removed from the job
            self._without_steps = ""
            asyncio.get_running_loop().call_soon(self._dispatch, events.HangGuardKnown(guard.status if guard else ""))
        self._hangs.start(guard.step_timeout if guard else start.progress_timeout, repeat=not start.hang_ends_round)

    def worker_connected(self) -> None:
        """Measure steps from now on. The pod of rank 0 also sends what the script reports of its training."""
        self._step_times.start(self._processes)
        start = self._state().assignment
        if start is not None and start.rank == 0:
            self._training.start()

    def start_training_reports(self) -> None:
        """Send what the script reports of its training, from now on until the round ends."""
        self._training.start()

    def send_training_now(self) -> None:
        """Send what the script has reported. Call it before the message that ends the round: later ones are dropped."""
        self._training.send_now()

    def stop(self) -> None:
        """Stop watching the workers, and send the last report of their training."""
        self._hangs.stop()
        self._step_times.stop()
        self._training.stop()
        self._workers.log_watch.end_round()

    # ---- what the workers report about hangs -------------------------------------------------------------------------

    def guard_reported(self) -> None:
        """Handle what guards the workers against a hang in place of torch's own time-out, or that nothing does."""
        guard, start = self._workers.guard, self._state().assignment
        if start is None:
            return
        if guard is not None and guard.step_timeout > 0:
            self.watch_for_hangs(start)
        self._dispatch(events.HangGuardKnown(guard.status if guard else self._without_steps))

    def collective_overdue(self) -> None:
        """Handle a collective that takes longer than torch's time-out."""
        # A hangPolicy watches ranks from their first step on, and torch's watchdog is off before it too.
        if self._workers.guard is not None or not self._workers.last_steps():
            self._progress_timed_out()
        else:
            log.info("the round goes on: spec.hangPolicy decides when it has made no progress for too long")

    def _steps_watched(self, seconds: float) -> None:
        """Report once that the hangPolicy watches nothing, after so many seconds without a step; with 0 that it does.

        One agent reports for the job, because all run the same script: the one that has group rank 0 then.
        """
        start = self._state().assignment
        if start is None or start.progress_timeout <= 0 or bool(seconds) is bool(self._without_steps):
            return
        if start.group_rank != 0 and not self._without_steps:
            return
        self._without_steps = without_steps(self._state().announcement.pod, seconds) if seconds else ""
        self._dispatch(events.HangGuardKnown(self._without_steps))

    def _progress_timed_out(self) -> None:
        if (round_id := self._state().round) is not None:
            self._dispatch(events.ProgressTimedOut(round_id))

    def _condition_met(self, met: MetCondition) -> None:
        # Lines are also read while the agent handles the end of a worker, which is decided first.
        event = events.LogConditionMet(met.round, met.failure, met.ends_round)
        asyncio.get_running_loop().call_soon(self._dispatch, event)

    def _send_step_times(self, step_seconds: float, own_seconds: tuple[float, ...]) -> None:
        if (round_id := self._state().round) is not None:
            self._send(StepTimes(round_id, step_seconds, own_seconds))

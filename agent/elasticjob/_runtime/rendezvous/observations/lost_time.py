"""How much time faults cost: pauses, and the steps that are done again. Pure; no rule depends on it.

Time is lost from the fault until training makes a step that it had not made before. The coordinator knows the steps of
scripts that report their training; for the others, time is lost until all workers run again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from elasticjob._runtime.contract.messages import LostTime, TrainingProgress
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.rendezvous.observations.recovery_times import Outage
from elasticjob._runtime.rendezvous.state import CoordinatorState

MAX_LOST_TIMES = 8
"""The operator gets each one at once; this many may come while it is down."""


@dataclass(frozen=True)
class LostTimeTracker:
    """What faults have cost since this coordinator started. Times are its monotonic clock."""

    fault: RoundId | None = None
    """The round that the last fault ended."""
    since: float | None = None
    """When training stopped making new steps; None while it makes them."""
    resumed: RoundId | None = None
    """The first round after the last fault whose workers all run; None before."""
    resumed_at: float = 0.0
    step: int | None = None
    """The highest step that the script of the present stage has reported; None without a report."""
    finished_stages: int = 0
    running: RoundId | None = None
    """The last round whose workers all ran."""
    running_since: float = -math.inf
    lost: tuple[LostTime, ...] = ()
    """The last ones that are over, the oldest first."""


def track_rounds(
    tracker: LostTimeTracker, outage: Outage | None, state: CoordinatorState, now: float
) -> LostTimeTracker:
    """Return the tracker after the coordinator's state has changed. `outage`: the last one, if it is the last end."""
    if outage is not None and outage.round != tracker.fault:
        # The time of a failure is by the clock of its Node, which may be wrong by hours.
        began = max(outage.end_sent_at - outage.detect, tracker.running_since)
        since = began if tracker.since is None else tracker.since
        tracker = replace(tracker, fault=outage.round, since=since, resumed=None)
    if state.finished_stages != tracker.finished_stages:  # the next script counts its own steps
        tracker = replace(tracker, step=None, finished_stages=state.finished_stages)
    round_ = state.round
    if round_ is not None and round_.formed_at and round_.id != tracker.running:
        tracker = replace(tracker, running=round_.id, running_since=now)
    if tracker.since is None or tracker.fault is None:
        return tracker
    if tracker.resumed is None and round_ is not None and round_.formed_at and round_.id > tracker.fault:
        tracker = replace(tracker, resumed=round_.id, resumed_at=now)
    if tracker.resumed is not None and (tracker.step is None or state.outcome is not None):
        return _end(tracker, tracker.resumed, tracker.resumed_at)
    return tracker


def track_step(tracker: LostTimeTracker, progress: TrainingProgress, now: float) -> LostTimeTracker:
    """Return the tracker after a report of the current round: no time is lost once the highest step is reached."""
    highest = progress.step if tracker.step is None else max(tracker.step, progress.step)
    if tracker.resumed is not None and tracker.step is not None and progress.step >= tracker.step:
        new_steps = (progress.step - tracker.step) * (progress.step_seconds or 0.0)
        tracker = _end(tracker, progress.round, max(tracker.resumed_at, now - new_steps))
    return replace(tracker, step=highest)


def _end(tracker: LostTimeTracker, round_id: RoundId, at: float) -> LostTimeTracker:
    if tracker.since is None:
        return tracker
    lost = (*tracker.lost, LostTime(round_id, round(max(0.0, at - tracker.since), 3)))
    return replace(tracker, since=None, resumed=None, lost=lost[-MAX_LOST_TIMES:])

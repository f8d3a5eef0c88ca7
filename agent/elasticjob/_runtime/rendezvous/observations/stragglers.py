"""Which rank, if any, all others wait for in every step. Pure; no rule depends on it.

Every agent reports its workers' step times about once a minute. A window is complete when all agents of the round have
reported. A rank is named once two consecutive windows have found it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from elasticjob._runtime.contract.messages import StepTimes, Straggler
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.rendezvous.persistent_map import with_item
from elasticjob._runtime.rendezvous.state import CoordinatorState, Round

MIN_LAG_SHARE = 0.1
"""The lag of a straggler is at least this share of a step. A smaller loss of speed needs no person's attention."""
MIN_LAG_SECONDS = 0.01
"""It is also at least this many seconds. Two processes that share a processor delay each other by less."""


@dataclass(frozen=True)
class StragglerTracker:
    """The step times that the agents of one round have reported, and the straggler found so far."""

    round: RoundId | None = None
    reports: Mapping[str, StepTimes] = field(default_factory=dict)
    """Reports of the window that is not complete yet, by agent id."""
    last_rank: int | None = None
    """The slow rank of the last complete window; None if no rank was slow."""
    straggler: Straggler | None = None


def track_step_times(
    tracker: StragglerTracker, state: CoordinatorState, agent_id: str, times: StepTimes, now: float
) -> StragglerTracker:
    """Return the tracker after an agent's report. Reports that do not match the running round are dropped."""
    round_ = state.round
    if round_ is None or round_.ending is not None or not _matches(round_, agent_id, times):
        return tracker
    if tracker.round != round_.id:
        tracker = StragglerTracker(round_.id)
    reports = with_item(tracker.reports, agent_id, times)
    if len(reports) < len(round_.members):
        return replace(tracker, reports=reports)
    found = find_straggler(round_, reports, state.epoch + now)
    rank = found.rank if found else None
    named_rank = tracker.straggler.rank if tracker.straggler else None
    straggler = found if rank == tracker.last_rank and rank != named_rank else tracker.straggler
    return StragglerTracker(round_.id, last_rank=rank, straggler=straggler)


def current_straggler(tracker: StragglerTracker, state: CoordinatorState) -> Straggler | None:
    """Return the straggler of the current round."""
    return tracker.straggler if state.round is not None and state.round.id == tracker.round else None


def find_straggler(round_: Round, reports: Mapping[str, StepTimes], time: float) -> Straggler | None:
    """Return the rank that spends most of a step in its own work, if it lags the median of all others enough.

    `time` is in Unix seconds.
    """
    ranks = [
        (own_seconds, member.assignment.rank + i, member.pod, reports[agent_id].step_seconds)
        for agent_id, member in round_.members.items()
        for i, own_seconds in enumerate(reports[agent_id].own_seconds)
    ]
    if len(ranks) < 2:
        return None
    *others, (own_seconds, rank, pod, step_seconds) = sorted(ranks)
    median_seconds = median(other[0] for other in others)
    if own_seconds - median_seconds < max(MIN_LAG_SECONDS, MIN_LAG_SHARE * step_seconds):
        return None
    return Straggler(rank, pod, own_seconds, median_seconds, time)


def _matches(round_: Round, agent_id: str, times: StepTimes) -> bool:
    member = round_.members.get(agent_id)
    return member is not None and times.round == round_.id and len(times.own_seconds) == member.local_world_size

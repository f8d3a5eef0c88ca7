"""Which rank, if any, the others wait for in every step. Pure; beside the rules, which do not depend on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from elasticjob.contract.messages import StepTimes, Straggler
from elasticjob.contract.names import RoundId
from elasticjob.rendezvous.persistent_map import with_item
from elasticjob.rendezvous.state import CoordinatorState, Round

LEAST_SHARE = 0.1
"""Of a step: what its lag must cost all others. Less than a tenth of a job's speed is no reason to call a person."""
LEAST_LAG = 0.01
"""Seconds a step: shorter lags are within what two processes on one processor do to each other."""


@dataclass(frozen=True)
class StragglerTracker:
    """What the nodes of one round have told. `told`, by agent id, is of the window that is not complete yet."""

    round: RoundId | None = None
    reports: Mapping[str, StepTimes] = field(default_factory=dict)
    last_rank: int | None = None
    """The slow rank of the last window; None: all kept up."""
    straggler: Straggler | None = None


def track_step_times(
    pace: StragglerTracker, state: CoordinatorState, agent_id: str, times: StepTimes, now: float
) -> StragglerTracker:
    """After a node has told its times: judged once all have, and held for true once two windows agree."""
    round_ = state.round
    if round_ is None or round_.ending is not None or not _belongs(round_, agent_id, times):
        return pace
    if pace.round != round_.id:
        pace = StragglerTracker(round_.id)
    told = with_item(pace.reports, agent_id, times)
    if len(told) < len(round_.members):
        return replace(pace, reports=told)
    found = find_straggler(round_, told, state.epoch + now)
    rank = found.rank if found else None
    known = pace.straggler.rank if pace.straggler else None
    named = found if rank == pace.last_rank and rank != known else pace.straggler
    return StragglerTracker(round_.id, last_rank=rank, straggler=named)


def current_straggler(pace: StragglerTracker, state: CoordinatorState) -> Straggler | None:
    """The straggler of the round that runs now."""
    return pace.straggler if state.round is not None and state.round.id == pace.round else None


def find_straggler(round_: Round, told: Mapping[str, StepTimes], time: float) -> Straggler | None:
    """The rank with the longest time of its own, if it is far enough from the median of all others."""
    ranks = [
        (own, member.assignment.rank + i, member.pod, told[agent_id].step_seconds)
        for agent_id, member in round_.members.items()
        for i, own in enumerate(told[agent_id].own_seconds)
    ]
    if len(ranks) < 2:
        return None
    *others, (own, rank, pod, whole) = sorted(ranks)
    usual = median(other[0] for other in others)
    if own - usual < max(LEAST_LAG, LEAST_SHARE * whole):
        return None
    return Straggler(rank, pod, own, usual, time)


def _belongs(round_: Round, agent_id: str, times: StepTimes) -> bool:
    member = round_.members.get(agent_id)
    return member is not None and times.round == round_.id and len(times.own_seconds) == member.local_world_size

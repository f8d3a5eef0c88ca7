"""Which rank, if any, the others wait for in every step. Pure; beside the rules, which do not depend on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from elasticjob.contract.messages import StepTimes, Straggler
from elasticjob.contract.names import RoundId
from elasticjob.rendezvous.persistent_map import put
from elasticjob.rendezvous.state import Round, State

LEAST_SHARE = 0.1
"""Of a step: what its lag must cost all others. Less than a tenth of a job's speed is no reason to call a person."""
LEAST_LAG = 0.01
"""Seconds a step: shorter lags are within what two processes on one processor do to each other."""


@dataclass(frozen=True)
class Pace:
    """What the nodes of one round have told. `told`, by boot id, is of the window that is not complete yet."""

    round: RoundId | None = None
    told: Mapping[str, StepTimes] = field(default_factory=dict)
    last: int | None = None
    """The slow rank of the last window; None: all kept up."""
    named: Straggler | None = None


def follow(pace: Pace, state: State, boot: str, times: StepTimes, now: float) -> Pace:
    """After a node has told its times: judged once all have, and held for true once two windows agree."""
    round_ = state.round
    if round_ is None or round_.ending is not None or not _belongs(round_, boot, times):
        return pace
    if pace.round != round_.id:
        pace = Pace(round_.id)
    told = put(pace.told, boot, times)
    if len(told) < len(round_.members):
        return replace(pace, told=told)
    found = slowest(round_, told, state.epoch + now)
    rank = found.rank if found else None
    known = pace.named.rank if pace.named else None
    named = found if rank == pace.last and rank != known else pace.named
    return Pace(round_.id, last=rank, named=named)


def named(pace: Pace, state: State) -> Straggler | None:
    """The straggler of the round that runs now."""
    return pace.named if state.round is not None and state.round.id == pace.round else None


def slowest(round_: Round, told: Mapping[str, StepTimes], time: float) -> Straggler | None:
    """The rank with the longest time of its own, if it is far enough from the median of all others."""
    ranks = [
        (own, member.assignment.rank + i, member.pod, told[boot].whole)
        for boot, member in round_.members.items()
        for i, own in enumerate(told[boot].own)
    ]
    if len(ranks) < 2:
        return None
    *others, (own, rank, pod, whole) = sorted(ranks)
    usual = median(other[0] for other in others)
    if own - usual < max(LEAST_LAG, LEAST_SHARE * whole):
        return None
    return Straggler(rank, pod, own, usual, time)


def _belongs(round_: Round, boot: str, times: StepTimes) -> bool:
    member = round_.members.get(boot)
    return member is not None and times.round == round_.id and len(times.own) == member.local_world_size

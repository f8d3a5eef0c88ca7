"""How long each phase of the recovery from a fault took. Pure; no rule depends on it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from elasticjob._runtime.contract.messages import EndReason, RecoverySeconds, RoundEnded
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.rendezvous.state import CoordinatorState

_FAULTS = (EndReason.WORKER_FAILED, EndReason.AGENT_LOST, EndReason.NODE_LEFT)


@dataclass(frozen=True)
class Outage:
    """The time from a fault to the next round whose workers run. Times are the coordinator's monotonic clock."""

    round: RoundId
    pods: tuple[str, ...]
    detect: float
    """Seconds from the failure, by the clock of its Node, until the round began to end; 0 if none was reported."""
    end_sent_at: float
    """When the round began to end."""
    stopped_at: float
    """When no worker of it ran any more."""
    next_round_at: float | None = None
    """When the next round was assigned; None before."""
    recovery: RecoverySeconds | None = None
    """The result; None until all workers of the next round have started."""


def track_outage(outage: Outage | None, before: CoordinatorState, after: CoordinatorState, now: float) -> Outage | None:
    """Return the last outage after the coordinator's state has changed from `before` to `after`; None without one."""
    for ended in _newly_ended(before.ended_rounds, after.ended_rounds):
        outage = _new_outage(before, ended, after.epoch, now) if ended.reason in _FAULTS else None
    round_ = after.round
    if outage is None or outage.recovery is not None or round_ is None or round_.id <= outage.round:
        return outage
    if outage.next_round_at is None:
        outage = replace(outage, next_round_at=now)
    if not round_.formed_at or outage.next_round_at is None:
        return outage
    return replace(
        outage,
        recovery=RecoverySeconds(
            pods=outage.pods,
            detect=outage.detect,
            stop=outage.stopped_at - outage.end_sent_at,
            rendezvous=outage.next_round_at - outage.stopped_at,
            start=max(0.0, round_.formed_at - after.epoch - outage.next_round_at),
        ),
    )


def _newly_ended(before: tuple[RoundEnded, ...], after: tuple[RoundEnded, ...]) -> list[RoundEnded]:
    """Return the rounds that ended since `before`, the oldest first. Round ids grow, so older ones are not compared."""
    if not before:
        return list(after)
    newest_first = itertools.takewhile(lambda e: e.round > before[-1].round, reversed(after))
    return list(newest_first)[::-1]


def _new_outage(before: CoordinatorState, ended: RoundEnded, epoch: float, now: float) -> Outage:
    ending = before.round.ending if before.round is not None else None
    end_sent_at = ending.since if ending is not None else now
    pods = ended.lost_pods if ended.failure is None else (ended.failure.pod, *ended.lost_pods)
    detect = max(0.0, epoch + end_sent_at - ended.failure.time) if ended.failure is not None else 0.0
    return Outage(ended.round, pods, detect, end_sent_at, now)

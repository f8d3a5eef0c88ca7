"""How long a fault kept the workers from running, phase by phase. Pure; beside the rules, which do not depend on it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from elasticjob.contract.messages import EndReason, RecoverySeconds, RoundEnded
from elasticjob.contract.names import RoundId
from elasticjob.rendezvous.state import CoordinatorState

_FAULTS = (EndReason.WORKER_FAILED, EndReason.AGENT_LOST, EndReason.NODE_LEFT)


@dataclass(frozen=True)
class Outage:
    """The last one. Times are the coordinator's monotonic clock."""

    round: RoundId
    pods: tuple[str, ...]
    detect: float
    """Seconds from the failure, by the clock of its node, to the word that ended the round."""
    end_sent_at: float
    stopped_at: float
    next_round_at: float | None = None
    """When the next round was given out."""
    recovery: RecoverySeconds | None = None


def track_outage(outage: Outage | None, before: CoordinatorState, after: CoordinatorState, now: float) -> Outage | None:
    """The outage after the coordinator's state has gone from `before` to `after`."""
    for ended in after.ended_rounds:
        if ended not in before.ended_rounds:
            outage = _begun(before, ended, after.epoch, now) if ended.reason in _FAULTS else None
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


def _begun(before: CoordinatorState, ended: RoundEnded, epoch: float, now: float) -> Outage:
    ending = before.round.ending if before.round is not None else None
    told = ending.since if ending is not None else now
    pods = ended.lost_pods if ended.failure is None else (ended.failure.pod, *ended.lost_pods)
    detect = max(0.0, epoch + told - ended.failure.time) if ended.failure is not None else 0.0
    return Outage(ended.round, pods, detect, told, now)

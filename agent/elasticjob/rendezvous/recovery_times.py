"""How long a fault kept the workers from running, phase by phase. Pure; beside the rules, which do not depend on it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from elasticjob.contract.messages import EndReason, Recovery, RoundEnded
from elasticjob.contract.names import RoundId
from elasticjob.rendezvous.state import State

_FAULTS = (EndReason.WORKER_FAILED, EndReason.AGENT_LOST, EndReason.NODE_LEFT)


@dataclass(frozen=True)
class Outage:
    """The last one. Times are the coordinator's monotonic clock."""

    round: RoundId
    pods: tuple[str, ...]
    detect: float
    """Seconds from the failure, by the clock of its node, to the word that ended the round."""
    told: float
    stopped: float
    given: float | None = None
    """When the next round was given out."""
    recovery: Recovery | None = None


def follow(outage: Outage | None, before: State, after: State, now: float) -> Outage | None:
    """The outage after the coordinator's state has gone from `before` to `after`."""
    for ended in after.ended:
        if ended not in before.ended:
            outage = _begun(before, ended, after.epoch, now) if ended.reason in _FAULTS else None
    round_ = after.round
    if outage is None or outage.recovery is not None or round_ is None or round_.id <= outage.round:
        return outage
    if outage.given is None:
        outage = replace(outage, given=now)
    if not round_.formed_at or outage.given is None:
        return outage
    return replace(
        outage,
        recovery=Recovery(
            pods=outage.pods,
            detect=outage.detect,
            stop=outage.stopped - outage.told,
            rendezvous=outage.given - outage.stopped,
            start=max(0.0, round_.formed_at - after.epoch - outage.given),
        ),
    )


def _begun(before: State, ended: RoundEnded, epoch: float, now: float) -> Outage:
    ending = before.round.ending if before.round is not None else None
    told = ending.since if ending is not None else now
    pods = ended.lost if ended.failure is None else (ended.failure.pod, *ended.lost)
    detect = max(0.0, epoch + told - ended.failure.time) if ended.failure is not None else 0.0
    return Outage(ended.round, pods, detect, told, now)

"""A job's status as the operator reads it back: counters it must not lose, and what it last said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from elasticjob.contract.messages import FailureClass
from elasticjob.contract.names import RoundId
from elasticjob_operator.model.raw import Raw, at, integer, mapping, moment, objects, text

LOST_NODE_SECONDS = 86400.0
"""A lost node is avoided this long at most: its kubelet is heard of again, or Kubernetes knows by then."""
DEVICE_UNHEALTHY = FailureClass.DEVICE_UNHEALTHY.value
NODE_LOST = FailureClass.NODE_LOST.value


class ConditionType(str, Enum):
    """Types of `status.conditions`, in the order in which they are listed."""

    RENDEZVOUS_READY = "RendezvousReady"
    RUNNING = "Running"
    FULLY_SCALED = "FullyScaled"
    RESTARTING = "Restarting"
    SUCCESS_CRITERIA_MET = "SuccessCriteriaMet"
    FAILURE_TARGET = "FailureTarget"
    COMPLETE = "Complete"
    FAILED = "Failed"


@dataclass(frozen=True)
class Condition:
    """metav1.Condition; `status` is True, False or Unknown as Kubernetes writes them."""

    status: str
    reason: str
    message: str
    since: float = 0.0
    """lastTransitionTime, Unix seconds."""

    @property
    def true(self) -> bool:
        return self.status == "True"


@dataclass(frozen=True)
class AvoidedNode:
    """A node that new pods must not be placed on: it was lost and its kubelet has not been heard of since, or it is
    not fit to train."""

    name: str
    since: float
    message: str
    reason: str = NODE_LOST
    """`LOST` or `UNFIT`."""
    seconds: float = LOST_NODE_SECONDS
    """How long it is avoided at most."""

    @property
    def until(self) -> float:
        return self.since + self.seconds


@dataclass(frozen=True)
class Status:
    """The part of `status` that decisions depend on. `raw` is the whole, as read."""

    raw: Raw = field(default_factory=dict)
    incarnations: tuple[int, ...] = ()
    """For each index ever used, the incarnation of its newest pod."""
    store_incarnation: int | None = None
    charged_round: RoundId | None = None
    restarts: int = 0
    restarts_counted: int = 0
    execution_attempts: int = 0
    rounds: int = 0
    last_rendezvous: float = 0.0
    target: int | None = None
    runtime_image: str = ""
    avoided: tuple[AvoidedNode, ...] = ()
    conditions: Mapping[ConditionType, Condition] = field(default_factory=dict)

    def is_true(self, kind: ConditionType) -> bool:
        """Whether the condition is there and True."""
        condition = self.conditions.get(kind)
        return condition is not None and condition.true

    @property
    def terminal(self) -> bool:
        """Complete or Failed: nothing is created again."""
        return self.is_true(ConditionType.COMPLETE) or self.is_true(ConditionType.FAILED)


def parse_status(raw: Raw) -> Status:
    """Whatever of `raw` makes sense; the rest reads as never written."""
    return Status(
        raw=raw,
        incarnations=_incarnations(text(raw, "incarnations")),
        store_incarnation=_optional(raw, "rendezvous", "incarnation"),
        charged_round=_round(text(raw, "chargedRound")),
        restarts=integer(raw, "restarts"),
        restarts_counted=integer(raw, "restartsCountTowardsMax"),
        execution_attempts=integer(raw, "executionAttempts"),
        rounds=integer(raw, "rendezvousRound"),
        last_rendezvous=moment(raw, "lastRendezvousTime") or 0.0,
        target=_optional(raw, "targetReplicas"),
        runtime_image=text(raw, "runtimeImage"),
        avoided=tuple(_avoided(item) for item in objects(raw, "avoidedNodes")),
        conditions=_conditions(raw),
    )


def _optional(raw: Raw, *path: str) -> int | None:
    return integer(raw, *path) if at(raw, *path) is not None else None


def _incarnations(listed: str) -> tuple[int, ...]:
    parts = listed.split(",") if listed else []
    return tuple(int(part) if part.isascii() and part.isdigit() else 0 for part in parts)


def _round(written: str) -> RoundId | None:
    try:
        return RoundId.parse(written)
    except ValueError:
        return None


def _avoided(raw: Raw) -> AvoidedNode:
    until = moment(raw, "until") or 0.0
    since = moment(raw, "since") or until - LOST_NODE_SECONDS
    reason = DEVICE_UNHEALTHY if text(raw, "reason") == DEVICE_UNHEALTHY else NODE_LOST
    return AvoidedNode(text(raw, "name"), since, text(raw, "why"), reason, until - since)


def _conditions(raw: Raw) -> dict[ConditionType, Condition]:
    known = {kind.value: kind for kind in ConditionType}
    return {
        known[text(item, "type")]: Condition(
            text(item, "status"), text(item, "reason"), text(item, "message"), moment(item, "lastTransitionTime") or 0.0
        )
        for item in objects(mapping(raw), "conditions")
        if text(item, "type") in known
    }

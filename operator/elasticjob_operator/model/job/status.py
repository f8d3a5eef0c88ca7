"""A job's status as the operator reads it back: counters that it must not lose, and the conditions it last wrote."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from elasticjob._runtime.contract.messages import FailureClass
from elasticjob._runtime.contract.names import Label, RoundId
from elasticjob_operator.model.cluster.raw import Raw, at, integer, mapping, moment, objects, text
from elasticjob_operator.model.job.guarded import GuardedFields, parse_guarded
from elasticjob_operator.model.job.status_lists import (
    read_incarnations,
    read_indices,
    read_outages,
    read_vacant,
    recorded_round,
)

LOST_NODE_SECONDS = 86400.0
"""Seconds for which a lost node is avoided at most: by then its kubelet renews its lease again, or Kubernetes has
marked the node NotReady."""
DEVICE_UNHEALTHY = FailureClass.DEVICE_UNHEALTHY.value
NODE_LOST = FailureClass.NODE_LOST.value
_SPARES = re.compile(rf"{re.escape(Label.INDEX)} notin \(([^)]*)\)")
_KEY_ID = re.compile(r"([0-9]+)-[0-9a-f]{16}")
RULE_MATCHED = "FailurePolicyMatched"
"""Why a node is avoided for which a rule has the action ReplacePodAndAvoidNode; the reason of the rule's Event too."""


class ConditionType(str, Enum):
    """Types of `status.conditions`, in the order in which status lists them."""

    SUSPENDED = "Suspended"
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
    """A metav1.Condition; `status` is "True", "False" or "Unknown"."""

    status: str
    reason: str
    message: str
    since: float = 0.0
    """lastTransitionTime, in Unix seconds."""

    @property
    def true(self) -> bool:
        return self.status == "True"


@dataclass(frozen=True)
class AvoidedNode:
    """A node on which new pods must not be placed: it was lost, it is unhealthy, or a failure rule wants that."""

    name: str
    since: float
    """Unix seconds."""
    message: str
    reason: str = NODE_LOST
    """`NODE_LOST`, `DEVICE_UNHEALTHY` or `RULE_MATCHED`."""
    seconds: float = LOST_NODE_SECONDS
    """How long the node is avoided at most. A lost node is avoided only until its kubelet renews its lease."""

    @property
    def until(self) -> float:
        return self.since + self.seconds

    @property
    def lost(self) -> bool:
        """Whether it was lost: it is then avoided until its kubelet renews its lease, any other one until `until`."""
        return self.reason == NODE_LOST


@dataclass(frozen=True)
class ScaledDown:
    """The pods that the cluster has no room for. The job trains without them."""

    target: int
    """The spec's target at that time: another one resets this."""
    indices: frozenset[int]
    """Not empty."""

    @property
    def withdrawn(self) -> frozenset[int]:
        """The indices that have no pod. The lowest one keeps its pending pod: it is placed once there is room."""
        return self.indices - {min(self.indices)}


@dataclass(frozen=True)
class BackOff:
    """A job that has given its pods back, because the cluster had no room for its minimum."""

    attempts: int
    """How often, since the last round formed."""
    since: float | None = None
    """Since when, Unix seconds; None once the job has asked for its pods again."""


@dataclass(frozen=True)
class Status:
    """The fields of `status` that decisions depend on. `raw` is the whole status as read."""

    raw: Raw = field(default_factory=dict)
    incarnations: tuple[int, ...] = ()
    """For each index ever used, the incarnation of its newest pod."""
    guarded: GuardedFields | None = None
    """From what the pods of the last execution are made; None if an older operator wrote the status."""
    vacant: frozenset[int] = frozenset()
    """Indices without a pod, below those that the job kept when it shrank."""
    store_incarnation: int | None = None
    """None until the job has a store."""
    standby_store: int | None = None
    """Incarnation of the standby store; None if there is none, or if it was retired."""
    newest_store: int = 0
    """The highest incarnation that a store pod of the job may have had."""
    charged_round: RoundId | None = None
    """The last ended round that the counters include; None before the first."""
    charged_outages: tuple[str, ...] = ()
    """The last outages that the counters include, oldest first (`budget.outage_of`)."""
    uncounted_outages: tuple[str, ...] = ()
    """The last outages that only `restarts` includes, because a rule keeps them from counting."""
    restarts: int = 0
    restarts_counted: int = 0
    """Restarts that count towards maxRestarts."""
    restart_window_start: float = 0.0
    """When the restart window began to which `restarts_counted` belongs, Unix seconds; 0 without one."""
    failed_starts: int = 0
    """Attempts to start pods that failed in the job's life."""
    start_failures: int = 0
    """Attempts that failed in a row, since the last round started."""
    last_start_failure: float = 0.0
    """When the last attempt failed, Unix seconds; 0 if none did."""
    execution_attempts: int = 0
    rounds: int = 0
    """Rounds formed so far."""
    last_round: RoundId | None = None
    """The newest round that has formed; None before the first."""
    last_rendezvous: float = 0.0
    """When the newest round formed, Unix seconds of its store; 0 before the first."""
    target: int | None = None
    """The spec's target at the last status write; None before the first."""
    scaled_down: ScaledDown | None = None
    back_off: BackOff | None = None
    cordon_spares: int = 0
    """Pods beyond those of the spec, for pods on cordoned nodes."""
    runtime_image: str = ""
    """The operator's image that the job is pinned to; empty before the first status write."""
    key_id: str = ""
    """Stands for the keys of this execution (`JobKeys.key_id`). Empty before the first one, and where an operator of
    0.1.0 has begun it: it leaves the id of an earlier execution, which does not count."""
    avoided: tuple[AvoidedNode, ...] = ()
    suspects: tuple[AvoidedNode, ...] = ()
    """Nodes with a suspicion of late: the next one before `until` avoids them, for `failurePolicy.avoidNodeSeconds`."""
    conditions: Mapping[ConditionType, Condition] = field(default_factory=dict)

    def is_true(self, kind: ConditionType) -> bool:
        """Return whether the condition exists and is True."""
        condition = self.conditions.get(kind)
        return condition is not None and condition.true

    @property
    def spares(self) -> frozenset[int]:
        """The indices of the spares, those for cordoned nodes included: `selector` leaves them out."""
        found = _SPARES.search(text(self.raw, "selector"))
        return frozenset(map(int, re.findall(r"\b\d{1,5}\b", found[1]))) if found else frozenset()

    @property
    def withdrawn(self) -> frozenset[int]:
        """The indices whose pods are withdrawn."""
        if self.back_off is not None and self.back_off.since is not None:
            return frozenset(range(len(self.incarnations)))
        return self.scaled_down.withdrawn if self.scaled_down else frozenset()

    @property
    def outcome_declared(self) -> bool:
        """Whether the job's end has begun: its outcome is final."""
        declaring = (ConditionType.SUCCESS_CRITERIA_MET, ConditionType.FAILURE_TARGET)
        return self.terminal or any(map(self.is_true, declaring))

    @property
    def terminal(self) -> bool:
        """Whether the job is Complete or Failed: the operator creates nothing for it again."""
        return self.is_true(ConditionType.COMPLETE) or self.is_true(ConditionType.FAILED)


def parse_status(raw: Raw) -> Status:
    """Return the status in `raw`; fields that cannot be parsed read as never written."""
    scaled_down = _scaled_down(raw)
    return Status(
        raw=raw,
        incarnations=read_incarnations(raw),
        guarded=parse_guarded(raw),
        vacant=read_vacant(raw),
        store_incarnation=_optional(raw, "rendezvous", "incarnation"),
        standby_store=_optional(raw, "rendezvous", "standby"),
        newest_store=max(integer(raw, "rendezvous", name) for name in ("incarnation", "standby", "newest")),
        charged_round=recorded_round(raw, "chargedRound", "lastChargedRound"),
        charged_outages=read_outages(raw, "chargedOutages", "chargedFailures"),
        uncounted_outages=read_outages(raw, "uncountedOutages", "uncountedFailures"),
        restarts=integer(raw, "restarts"),
        restarts_counted=integer(raw, "restartsCountTowardsMax"),
        restart_window_start=moment(raw, "restartWindow", "start") or 0.0,
        failed_starts=integer(raw, "failedStarts"),
        start_failures=integer(raw, "startFailures"),
        last_start_failure=moment(raw, "lastStartFailureTime") or 0.0,
        execution_attempts=integer(raw, "executionAttempts"),
        rounds=integer(raw, "rendezvousRound"),
        last_round=recorded_round(mapping(raw, "rendezvous"), "round", "lastRound"),
        last_rendezvous=moment(raw, "lastRendezvousTime") or 0.0,
        target=scaled_down.target if scaled_down else _optional(raw, "targetReplicas"),
        scaled_down=scaled_down,
        back_off=_back_off(raw),
        cordon_spares=max(0, integer(raw, "cordonSpares")),
        runtime_image=text(raw, "runtimeImage"),
        key_id=_key_id(raw),
        avoided=tuple(_avoided(item) for item in objects(raw, "avoidedNodes")),
        suspects=tuple(_avoided(item) for item in objects(raw, "suspectNodes")),
        conditions=_conditions(raw),
    )


def _optional(raw: Raw, *path: str) -> int | None:
    return integer(raw, *path) if at(raw, *path) is not None else None


def _key_id(raw: Raw) -> str:
    written = text(raw, "keyId")
    match = _KEY_ID.fullmatch(written)
    return written if match and match[1] == str(integer(raw, "executionAttempts")) else ""


def _scaled_down(raw: Raw) -> ScaledDown | None:
    indices = read_indices(mapping(raw, "scaledDown"))
    return ScaledDown(integer(raw, "scaledDown", "replicas"), indices) if indices else None


def _back_off(raw: Raw) -> BackOff | None:
    attempts = integer(raw, "backOff", "attempts")
    return BackOff(attempts, moment(raw, "backOff", "since")) if attempts else None


def _avoided(raw: Raw) -> AvoidedNode:
    until = moment(raw, "until") or 0.0
    since = moment(raw, "since") or until - LOST_NODE_SECONDS
    reason = text(raw, "reason")
    known = reason if reason in (DEVICE_UNHEALTHY, RULE_MATCHED) else NODE_LOST
    return AvoidedNode(text(raw, "name"), since, text(raw, "why"), known, until - since)


def _conditions(raw: Raw) -> dict[ConditionType, Condition]:
    known = {kind.value: kind for kind in ConditionType}
    return {
        known[text(item, "type")]: Condition(
            text(item, "status"), text(item, "reason"), text(item, "message"), moment(item, "lastTransitionTime") or 0.0
        )
        for item in objects(mapping(raw), "conditions")
        if text(item, "type") in known
    }

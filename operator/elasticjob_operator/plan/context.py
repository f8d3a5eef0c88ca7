"""What every part of a plan is made from, and the little that they share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from elasticjob.contract.messages import Report
from elasticjob_operator.actions import Action, EventRecord
from elasticjob_operator.model.observed import Job, Observed
from elasticjob_operator.model.spec import JobSpec
from elasticjob_operator.model.status import Status

LOST_GRACE_SECONDS = 3.0
"""Seconds that a pod whose agent is lost has before it counts as lost with its node: the kubelet may know more."""
LEASE_LATE_SECONDS = 15.0
"""Seconds without a renewal of its lease (it does so every 10) that make a kubelet suspect, with a second sign."""
LEASE_STALE_SECONDS = 40.0
"""Seconds after which Kubernetes itself calls the node gone."""
STORE_UNRESPONSIVE_SECONDS = 2.0
"""Seconds of silence after which a store has a successor, with one more sign at most. A container that is started
again in place is back by then, or its kubelet has said that it is not ready."""
NODES_SWITCH_SECONDS = 4.0
"""Seconds after the end of a store in which its nodes find the next one: what they try first may be the old one."""


@dataclass(frozen=True)
class ReconcileContext:
    """One reconcile: what is there, the spec that holds, and the time in Unix seconds."""

    observed: Observed
    spec: JobSpec
    now: float

    @property
    def job(self) -> Job:
        return self.observed.job

    @property
    def status(self) -> Status:
        return self.observed.job.status

    @cached_property
    def report(self) -> Report | None:
        """The last report of the present store; None when it has not spoken to this operator."""
        report = self.observed.link.report
        if report is None or report.incarnation != self.status.store_incarnation:
            return None
        return report

    def lease_age(self, node: str) -> float | None:
        """Seconds since the node's kubelet renewed its lease; None when nobody looked."""
        renewed = self.observed.leases.get(node)
        return None if renewed is None else self.now - renewed

    def node_of(self, pod: str) -> str:
        """Where a worker pod of this name is; empty where there is none, or no place for it yet."""
        return next((p.node for p in self.observed.workers if p.name == pod), "")

    def kubelet_gone(self, node: str) -> bool:
        """Whether Kubernetes itself would call the node gone: nobody there ends a pod, or counts its grace."""
        age = self.lease_age(node)
        return age is not None and age >= LEASE_STALE_SECONDS


@dataclass(frozen=True)
class Actions:
    """What a part of the plan wants done; parts add up."""

    actions: tuple[Action, ...] = ()
    event_records: tuple[EventRecord, ...] = ()
    requeue_at: tuple[float, ...] = field(default=())
    """Times at which to look again, Unix seconds."""

    def __add__(self, other: Actions) -> Actions:
        return Actions(
            self.actions + other.actions, self.event_records + other.event_records, self.requeue_at + other.requeue_at
        )


NO_ACTIONS = Actions()

"""The Workload by which Kueue queues and admits a job, as the operator reads it back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from elasticjob_operator.model.cluster.raw import Raw, at, integer, mapping, moment, objects, text, whole_number
from elasticjob_operator.model.job.status import Condition

WORKER_PODS = "worker"
"""Name of the pod set in the Workload."""
REPLACES = "elasticjob.dev/replaces"
"""Annotation of a Workload: the UID of the one that it replaces."""
POD_SETS = "elasticjob.dev/pod-template"
"""Annotation of a Workload: the digest of the template for which it asks. Kueue changes the template itself, so that
cannot be compared: it adds requests for limits, what a LimitRange says and the overhead of a RuntimeClass."""
STEP = "elasticjob.dev/queue-step"
"""Annotation of a Workload: it is a step of the job above its minimum, with this index from 0."""
_REPLACED = "WorkloadSliceReplaced"
"""Reason of the condition Finished of a Workload that Kueue has replaced."""


class WorkloadCondition(str, Enum):
    """Types of conditions of a Workload. Kueue writes Admitted, Evicted, QuotaReserved and Requeued; the last two are
    also the operator's when it gives the quota back. Finished and PodsReady are the operator's."""

    ADMITTED = "Admitted"
    EVICTED = "Evicted"
    FINISHED = "Finished"
    PODS_READY = "PodsReady"
    QUOTA_RESERVED = "QuotaReserved"
    REQUEUED = "Requeued"


@dataclass(frozen=True)
class Workload:
    """The Workload of a job."""

    name: str
    uid: str
    queue: str
    count: int
    """How many worker pods it asks for."""
    min_count: int | None = None
    """The fewest with which the job starts; None: all of them, or Kueue does not admit a part."""
    active: bool = True
    admitted_count: int | None = None
    """For how many worker pods quota was reserved; None without a reservation. Quota that is given back stays in it."""
    template: str = ""
    """The digest of the pod template that it asks for; empty if an older operator made it."""
    reclaimed: int = 0
    """Without how many of the pods that it asks for the job does: Kueue takes them off `count`, so a Workload that was
    admitted in part has given quota back only if `count - reclaimed` is less than `admitted_count`."""
    priority_class: str = ""
    """The name of the priority class; empty without one."""
    has_topology: bool = False
    """Whether the admission says on which Nodes each pod must be."""
    flavors: tuple[str, ...] = ()
    """The ResourceFlavors that the admission assigns to the worker pods, sorted."""
    step: int | None = None
    """The index of the step; None for the Workload of the job itself."""
    replaces: str = ""
    """UID of the Workload that this one replaces, so that the job can grow; empty if it replaces none."""
    conditions: Mapping[WorkloadCondition, Condition] = field(default_factory=dict)

    @property
    def pods_with_quota(self) -> int | None:
        """For how many worker pods quota is reserved now; None without a reservation."""
        return None if self.admitted_count is None else max(0, min(self.admitted_count, self.count - self.reclaimed))

    def is_true(self, kind: WorkloadCondition) -> bool:
        """Return whether the condition exists and is True."""
        condition = self.conditions.get(kind)
        return condition is not None and condition.true

    @property
    def admitted(self) -> bool:
        """Whether the job may have pods. Kueue leaves Admitted as it is when it evicts a job."""
        over = self.is_true(WorkloadCondition.EVICTED) or self.is_true(WorkloadCondition.FINISHED)
        return self.replaced or (self.is_true(WorkloadCondition.ADMITTED) and not over)

    @property
    def replaced(self) -> bool:
        """Whether its quota has passed, or passes just now, to the Workload that replaces it."""
        finished = self.conditions.get(WorkloadCondition.FINISHED)
        return finished is not None and finished.true and finished.reason == _REPLACED

    @property
    def reserved(self) -> bool:
        """Whether quota is reserved for the job. Its Workload may not change as long as it is."""
        return self.is_true(WorkloadCondition.QUOTA_RESERVED)


@dataclass(frozen=True)
class QueueView:
    """What the operator knows of the job's place in its queue."""

    workload: Workload | None = None
    """The one that counts; None if there is none, or if it is unreadable."""
    replacement: Workload | None = None
    """The one that asks for more pods than `workload` has; Kueue has not admitted it yet."""
    replaced: Workload | None = None
    """One that `workload` has replaced, and that is of no use any more."""
    steps: Mapping[int, Workload] = field(default_factory=dict)
    """The Workloads of the steps above the job's minimum, by their index."""
    unreadable: bool = False
    """Whether the API server does not permit the operator to read Workloads."""
    malformed: bool = False
    """Whether a Workload of the job cannot be read, because of what is in it. `workload` is None then."""

    @property
    def unknown(self) -> bool:
        """Whether it is unknown what the queue has decided."""
        return self.unreadable or self.malformed


@dataclass(frozen=True)
class PodChanges:
    """What an admission adds to worker pods: those of the flavors, then those of the admission checks."""

    node_selector: Raw = field(default_factory=dict)
    tolerations: tuple[Raw, ...] = ()
    labels: Raw = field(default_factory=dict)
    annotations: Raw = field(default_factory=dict)


def queue_view(found: Iterable[Workload | None]) -> QueueView:
    """Return which of a job's Workloads counts; there are two only while one replaces the other. None stands for one
    that cannot be read: then nothing is known."""
    workloads = tuple(found)
    if None in workloads:
        return QueueView(malformed=True)
    steps = {w.step: w for w in workloads if w is not None and w.step is not None}
    by_uid = {w.uid: w for w in workloads if w is not None and w.step is None}
    return replace(_view_without_steps(by_uid), steps=steps)


def _view_without_steps(by_uid: Mapping[str, Workload]) -> QueueView:
    replacement = next((w for w in by_uid.values() if w.replaces in by_uid), None)
    if replacement is None:
        only = next(iter(by_uid.values()), None)
        return QueueView(replaced=only) if only is not None and only.replaced else QueueView(only)
    before = by_uid[replacement.replaces]
    if before.replaced and replacement.is_true(WorkloadCondition.ADMITTED):
        return QueueView(replacement, replaced=before)
    return QueueView(before, replacement)


def parse_workload(raw: Raw) -> Workload:
    """Return the Workload that the API server returned as `raw`."""
    asked = _of_workers(objects(raw, "spec", "podSets"))
    assigned = _of_workers(objects(raw, "status", "admission", "podSetAssignments"))
    count = integer(asked, "count", default=1)
    known = {kind.value: kind for kind in WorkloadCondition}
    return Workload(
        name=text(raw, "metadata", "name"),
        uid=text(raw, "metadata", "uid"),
        queue=text(raw, "spec", "queueName"),
        count=count,
        min_count=integer(asked, "minCount") if at(asked, "minCount") is not None else None,
        active=at(raw, "spec", "active") is not False,
        admitted_count=integer(assigned, "count", default=count) if assigned else None,
        template=text(raw, "metadata", "annotations", POD_SETS),
        reclaimed=integer(_of_workers(objects(raw, "status", "reclaimablePods")), "count"),
        priority_class=text(raw, "spec", "priorityClassRef", "name"),
        has_topology=bool(mapping(assigned, "topologyAssignment")),
        flavors=assigned_flavors(raw),
        step=whole_number(step) if (step := text(raw, "metadata", "annotations", STEP)) else None,
        replaces=text(raw, "metadata", "annotations", REPLACES),
        conditions={
            known[text(item, "type")]: Condition(
                text(item, "status"),
                text(item, "reason"),
                text(item, "message"),
                moment(item, "lastTransitionTime") or 0.0,
            )
            for item in objects(raw, "status", "conditions")
            if text(item, "type") in known
        },
    )


def assigned_flavors(raw: Raw) -> tuple[str, ...]:
    """Return the names of the ResourceFlavors that a Workload's admission assigns to the worker pods."""
    assigned = _of_workers(objects(raw, "status", "admission", "podSetAssignments"))
    return tuple(sorted({str(name) for name in mapping(assigned, "flavors").values()}))


def pod_changes(raw: Raw, flavors: Iterable[Raw]) -> PodChanges:
    """Return what a Workload's admission adds to worker pods; `flavors` are the ResourceFlavors that it assigns."""
    specs = [mapping(flavor, "spec") for flavor in flavors]
    checks = [_of_workers(objects(check, "podSetUpdates")) for check in objects(raw, "status", "admissionChecks")]
    return PodChanges(
        node_selector=_first_of(
            *(mapping(s, "nodeLabels") for s in specs), *(mapping(c, "nodeSelector") for c in checks)
        ),
        tolerations=tuple(item for part in (*specs, *checks) for item in objects(part, "tolerations")),
        labels=_first_of(*(mapping(c, "labels") for c in checks)),
        annotations=_first_of(*(mapping(c, "annotations") for c in checks)),
    )


def _of_workers(pod_sets: Iterable[Raw]) -> Raw:
    return next((item for item in pod_sets if text(item, "name") == WORKER_PODS), {})


def _first_of(*parts: Raw) -> dict[str, str]:
    """Return all keys of all parts; a key that several have, with the value of the first."""
    merged: dict[str, str] = {}
    for part in reversed(parts):
        merged |= part
    return merged

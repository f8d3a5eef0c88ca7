"""A simulated Kueue with one queue, for model tests of the operator: it admits, evicts and resizes the job `bert`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elasticjob_operator.kube.api import KUEUE_WORKLOADS
from elasticjob_operator.manifests.workload import REPLACEMENT_FOR
from elasticjob_operator.model.cluster.raw import timestamp
from elasticjob_operator.model.cluster.workload import WorkloadCondition, parse_workload
from support.operator.world import Api

Raw = dict[str, Any]


@dataclass
class Queue:
    """A queue with quota for this number of worker pods."""

    api: Api
    quota: int

    def workloads(self) -> list[Raw]:
        return [raw for (kind, _), raw in self.api.objects.items() if kind is KUEUE_WORKLOADS]

    def reserved(self) -> int:
        """Return for how many worker pods the job has quota."""
        return max((_holds(raw) for raw in self.workloads()), default=0)

    def admit(self) -> None:
        """Admit a Workload that waits and for which there is quota. One that is evicted waits until it is requeued."""
        for raw in self.workloads():
            workload = parse_workload(raw)
            waits = not (workload.reserved or workload.is_true(WorkloadCondition.FINISHED))
            evicted = workload.is_true(WorkloadCondition.EVICTED)
            if not waits or (evicted and not workload.is_true(WorkloadCondition.REQUEUED)):
                continue
            least = workload.count if workload.min_count is None else workload.min_count
            if self.quota >= least:
                self._admit(raw, min(self.quota, workload.count), evicted=evicted)

    def evict(self) -> None:
        """Evict the job in favour of another one."""
        for raw in self.workloads():
            if _holds(raw):
                self._write(raw, raw["status"], {WorkloadCondition.EVICTED: (True, "Preempted")})

    def _admit(self, raw: Raw, count: int, *, evicted: bool) -> None:
        replaced = raw["metadata"].get("annotations", {}).get(REPLACEMENT_FOR, "").rpartition("/")[2]
        if before := self.api.objects.get((KUEUE_WORKLOADS, replaced)):
            self._write(before, before["status"], {WorkloadCondition.FINISHED: (True, "WorkloadSliceReplaced")})
        conditions = dict.fromkeys((WorkloadCondition.QUOTA_RESERVED, WorkloadCondition.ADMITTED), (True, "Test"))
        if evicted:
            conditions[WorkloadCondition.EVICTED] = (False, "QuotaReserved")
        admission = {"podSetAssignments": [{"name": "worker", "count": count}]}
        self._write(raw, {**raw.get("status", {}), "admission": admission}, conditions)

    def _write(self, raw: Raw, status: Raw, changes: dict[WorkloadCondition, tuple[bool, str]]) -> None:
        conditions = {condition["type"]: condition for condition in status.get("conditions", [])}
        for kind, (true, reason) in changes.items():
            written = {"type": kind.value, "status": str(true), "reason": reason, "message": "by Kueue"}
            conditions[kind.value] = written | {"lastTransitionTime": timestamp(self.api.now)}
        self.api.put(KUEUE_WORKLOADS, {**raw, "status": {**status, "conditions": [*conditions.values()]}})


def _holds(raw: Raw) -> int:
    """Return for how many pods a Workload holds quota."""
    workload = parse_workload(raw)
    if not workload.reserved or workload.is_true(WorkloadCondition.FINISHED) or workload.admitted_count is None:
        return 0
    return min(workload.count, workload.admitted_count)

"""Requests about the Workloads of one job in a queue of Kueue: its own, and those of its steps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from elasticjob_operator import manifests
from elasticjob_operator.actions import (
    FinishWorkload,
    MarkPodsReady,
    ReclaimPods,
    ReleaseQuota,
)
from elasticjob_operator.kube import KubeError, NotFound, Refused
from elasticjob_operator.kube.api import KUEUE_WORKLOADS
from elasticjob_operator.kube.kueue import (
    explain_priority_refusal,
    explain_workload_refusal,
    read_priority,
    read_step_priority,
)
from elasticjob_operator.model.cluster.raw import Raw, integer
from elasticjob_operator.model.observed import STEP_PRIORITY_ANNOTATION, RefusalReason
from elasticjob_operator.reconcile.child_requests import ChildRequests, Result

_NewStatus: TypeAlias = Callable[[Raw, float], Raw]
"""Returns the new status of a Workload, from the Workload and the time in Unix seconds."""


@dataclass
class WorkloadRequests:
    """Creates, updates and writes the Workloads that were observed."""

    requests: ChildRequests

    async def create(self, name: str, replaces: tuple[str, str]) -> Result:
        """Create the Workload of the job."""
        job, spec = self.requests.job, self.requests.spec
        priority = await self._read(name, read_priority(self.requests.api, job, spec))
        if isinstance(priority, Result):
            return priority
        return await self._create(manifests.workload_manifest(job, spec, name, priority, replaces))

    async def create_step(self, index: int, count: int) -> Result:
        """Create the Workload of a step. One whose priority is not below that of the job's Workload is refused here:
        Kueue would preempt the whole job first."""
        job, base = self.requests.job, self.requests.memory.workload
        name = manifests.step_name(job, index)
        if base is None:
            return Result(name)  # the next plan decides
        priority = await self._read(name, read_step_priority(self.requests.api, job))
        if isinstance(priority, Result):
            return priority
        value, of_base = integer(priority, "priority"), integer(base, "spec", "priority")
        if value >= of_base:
            why = (
                f"WorkloadPriorityClass {job.step_priority} has the value {value}, which is not below the job's own "
                f"priority {of_base}: name another class in the job's annotation {STEP_PRIORITY_ANNOTATION}, or give "
                "the job a higher priority by its label kueue.x-k8s.io/priority-class and suspend and resume it"
            )
            return self._refuse(name, why)
        return await self._create(manifests.step_manifest(job, self.requests.spec, index, count, priority))

    async def update(self, name: str, uid: str) -> Result:
        """Make the Workload of the job ask for what its spec says now."""
        job, spec = self.requests.job, self.requests.spec
        priority = await self._read(name, read_priority(self.requests.api, job, spec))
        if isinstance(priority, Result):
            return priority
        request = manifests.workload_request(job, spec)
        no_priority = {"priority": None, "priorityClassRef": None}  # a patch removes what is null
        changed = {**request, "spec": {**request["spec"], **(priority or no_priority)}}
        return await self.requests.patch(KUEUE_WORKLOADS, name, uid, changed)

    async def write_status(self, action: MarkPodsReady | ReclaimPods | ReleaseQuota | FinishWorkload) -> Result:
        """Change the status of the Workload of the job, or of a step."""
        step = ""
        match action:
            case MarkPodsReady(ready, step):
                new: _NewStatus = partial(manifests.ready_status, ready=ready)
            case ReclaimPods(count, step):
                new = partial(manifests.reclaimed_status, count=count)
            case ReleaseQuota(step):
                new = manifests.released_status
            case FinishWorkload(succeeded, message):
                new = partial(manifests.finished_status, succeeded=succeeded, message=message)
        memory = self.requests.memory
        return await self._write(memory.steps.get(step) if step else memory.workload, new)

    async def _create(self, body: dict[str, Any]) -> Result:
        return await self.requests.create(KUEUE_WORKLOADS, "Workload/", body, explain=explain_workload_refusal)

    async def _read(self, workload: str, priority: Awaitable[Raw]) -> Raw | Result:
        """Return the fields of a Workload for its priority, or why they are unknown."""
        try:
            return await priority
        except (Refused, NotFound) as error:
            child = manifests.workload_child(workload)
            return self.requests.refused(child, workload, error, explain_priority_refusal(error))
        except KubeError as error:
            return Result(workload, problem=str(error))

    def _refuse(self, name: str, why: str) -> Result:
        memory, child = self.requests.memory, manifests.workload_child(name)
        refusal = memory.record_refusal(child, RefusalReason.POD_CREATION_FAILED, why, self.requests.clock())
        return Result(name, problem=why, refusal=refusal)

    async def _write(self, raw: Raw | None, new_status: _NewStatus) -> Result:
        """Change the status of a Workload that was observed; the API server refuses it if that has changed since."""
        if raw is None:
            return Result("")
        name: str = raw["metadata"]["name"]
        body = {**raw, "status": new_status(raw, self.requests.clock())}
        try:
            await self.requests.api.update(KUEUE_WORKLOADS, self.requests.job.namespace, body, "status")
        except KubeError as error:
            return Result(name, problem=str(error))
        return Result(name)

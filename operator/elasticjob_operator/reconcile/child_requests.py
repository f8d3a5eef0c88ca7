"""Requests that create, change and delete a job's children. What the API server answers is kept in the job's memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elasticjob_operator import manifests
from elasticjob_operator.actions import CreateStep, CreateWorker, CreateWorkload, UpdateWorkload
from elasticjob_operator.kube import (
    PODS,
    SECRETS,
    SERVICES,
    AlreadyExists,
    Conflict,
    KubeApi,
    KubeError,
    NotFound,
    Refused,
    Resource,
    Throttled,
)
from elasticjob_operator.kube.gangs import GANG_RESOURCES
from elasticjob_operator.model.cluster.raw import text
from elasticjob_operator.model.job.spec import JobSpec
from elasticjob_operator.model.observed import Job, Refusal, RefusalReason, Remedy, is_owned
from elasticjob_operator.observation.children import is_terminating, with_child
from elasticjob_operator.observation.job_memory import LONGEST_RETRY, JobMemory
from elasticjob_operator.observation.policies import POLICIES, with_policy
from elasticjob_operator.watch.watch_cache import WatchCache

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """What became of one action."""

    name: str
    created: bool = False
    problem: str = ""
    refusal: Refusal | None = None
    """Why the API server certainly did not create the object; None where it did, or may have."""


@dataclass
class ChildRequests:
    """Sends requests about the children of one job, and records what their answers tell about them."""

    api: KubeApi
    job: Job
    spec: JobSpec
    memory: JobMemory
    watched: WatchCache
    """Takes over the pods that are created and deleted: the watch delivers them later."""
    clock: Callable[[], float]
    """Unix seconds."""

    async def create(
        self,
        resource: Resource,
        kind: str,
        body: dict[str, Any],
        longest_retry: float = LONGEST_RETRY,
        explain: Callable[[KubeError], str] = str,
    ) -> Result:
        """Create a child. Record a refusal, so that the next plan does not take the missing child for a lost one."""
        name = body["metadata"]["name"]
        child = kind + name
        try:
            created = await self.api.create(resource, self.job.namespace, body)
        except AlreadyExists as error:
            return await self._existing(resource, child, name, str(error), longest_retry)
        except (Refused, Throttled, Conflict, NotFound) as error:
            # NotFound on create means that the namespace does not exist, or the API of an optional kind. Conflict: many
            # creations at a time changed the usage of one ResourceQuota, and this one was not admitted.
            return self.refused(child, name, error, explain(error), longest_retry)
        except KubeError as error:
            self.memory.record_created(child)
            self._forget_objects(resource)
            return Result(name, problem=str(error))
        self._record_created(resource, child, created)
        return Result(name, created=True)

    def refused(
        self, child: str, name: str, error: KubeError, problem: str, longest_retry: float = LONGEST_RETRY
    ) -> Result:
        """Record that the API server refuses to create a child. `problem`: why, for people."""
        quota = isinstance(error, Refused) and error.quota
        reason = RefusalReason.QUOTA_EXCEEDED if quota else RefusalReason.POD_CREATION_FAILED
        remedy = _remedy(child, error)
        refusal = self.memory.record_refusal(child, reason, problem, self.clock(), longest_retry, remedy)
        return Result(name, problem=problem, refusal=refusal)

    def refuse_invalid(self, action: CreateWorker | CreateWorkload | UpdateWorkload | CreateStep) -> Result:
        """Refuse, as the API server would, to make an object from a template that has a mistake."""
        name = manifests.step_name(self.job, action.index) if isinstance(action, CreateStep) else action.name
        child = name if isinstance(action, CreateWorker) else manifests.workload_child(name)
        refusal = self.memory.record_refusal(
            child, RefusalReason.INVALID_SPEC, self.job.spec_error, self.clock(), remedy=Remedy.CORRECT_SPEC
        )
        return Result(name, problem=self.job.spec_error, refusal=refusal)

    def _record_created(self, resource: Resource, child: str, created: dict[str, Any]) -> None:
        self.memory.record_created(child)
        self.record_object(resource, created["metadata"]["name"], created)

    def record_object(self, resource: Resource, name: str, raw: dict[str, Any] | None) -> None:
        """Record an object as the API server has just returned it; None: it has been deleted."""
        if resource is PODS:
            if raw is not None:
                self.watched.record_pod(raw)
        elif resource in POLICIES:
            if self.memory.policies is not None:
                self.memory.policies = with_policy(self.memory.policies, resource, raw)
        elif self._is_child(resource) and self.memory.children is not None:
            self.memory.children = with_child(self.memory.children, self.job, resource, name, raw)

    def _is_child(self, resource: Resource) -> bool:
        return resource in (SECRETS, SERVICES, GANG_RESOURCES.get(self.spec.gang))

    def _forget_objects(self, resource: Resource) -> None:
        """Forget what is known of objects of this type: whether a write took effect is unknown."""
        self.memory.read_at = None
        if resource in POLICIES:
            self.memory.policies = None
        elif self._is_child(resource):
            self.memory.children = None

    async def _existing(self, resource: Resource, child: str, name: str, message: str, longest_retry: float) -> Result:
        """Accept an object that this job owns (the response to an earlier create was lost); else record NameTaken.

        Only an operator knows the name of a Secret before it exists: it need not be read (`keys`).
        """
        if resource is SECRETS:
            self._record_created(resource, child, {"metadata": {"name": name}})
            return Result(name, created=True)
        try:
            found = await self.api.get(resource, self.job.namespace, name)
        except KubeError as error:
            self.memory.record_created(child)
            self._forget_objects(resource)
            return Result(name, problem=str(error))
        if is_owned(found, self.job.uid):
            self._record_created(resource, child, found)
            return Result(name, created=True)
        self._forget_objects(resource)
        if is_terminating(found, self.job):
            why = "Kubernetes is still deleting it"
        else:
            why = "another owner holds it: delete or rename that object"
        refusal = self.memory.record_refusal(
            child, RefusalReason.NAME_TAKEN, f"{message}, and {why}", self.clock(), longest_retry
        )
        return Result(name, problem=message, refusal=refusal)

    async def patch(self, resource: Resource, name: str, uid: str, change: dict[str, Any]) -> Result:
        """Change a child other than a pod, if it still has this UID."""
        try:
            metadata = {**change.get("metadata", {}), "uid": uid}
            changed = await self.api.patch(resource, self.job.namespace, name, {**change, "metadata": metadata})
        except KubeError as error:
            self._forget_objects(resource)
            return Result(name, problem=str(error))
        self.record_object(resource, name, changed)
        return Result(name)

    async def delete_child(self, resource: Resource, name: str, uid: str) -> Result:
        """Delete a child other than a pod."""
        result = await self.delete(resource, name, uid)
        if result.problem:
            self._forget_objects(resource)
        else:
            self.record_object(resource, name, None)
        return result

    async def delete(self, resource: Resource, name: str, uid: str, grace: int | None = None) -> Result:
        """Delete an object, if it still has this UID. `grace`: seconds; None: the object's own."""
        try:
            deleted = await self.api.delete(resource, self.job.namespace, name, uid=uid, grace=grace)
        except (NotFound, Conflict):
            return Result(name)
        except KubeError as error:
            log.warning("%s/%s: %s", self.job.namespace, self.job.name, error)
            return Result(name, problem=str(error))
        if resource is PODS and text(deleted, "metadata", "deletionTimestamp"):
            self.watched.record_pod(deleted)  # else the next plan, by an older view, would delete it again
        return Result(name)


def _remedy(child: str, error: KubeError) -> Remedy:
    """Return what helps against a refusal. Only pods are made from parts of the spec that a user may have got wrong."""
    if "/" in child or not isinstance(error, Refused):
        return Remedy.WAIT
    return Remedy.CORRECT_SPEC if error.invalid else Remedy.EITHER

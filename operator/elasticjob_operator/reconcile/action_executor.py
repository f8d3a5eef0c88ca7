"""Execute planned actions, and record refusals of the API server for the next reconcile. It decides nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, assert_never

from elasticjob._runtime.contract.messages import RoundSettings
from elasticjob_operator import manifests
from elasticjob_operator.actions import (
    Action,
    AnswerEviction,
    CreateGang,
    CreateNodesService,
    CreateSecret,
    CreateStandbyStore,
    CreateStep,
    CreateStore,
    CreateStoreService,
    CreateWorker,
    CreateWorkload,
    DeactivateStep,
    DeleteGang,
    DeleteJob,
    DeletePod,
    DeletePolicy,
    DeleteService,
    DeleteWorkload,
    FinishWorkload,
    MarkPodsReady,
    ReclaimPods,
    ReleaseQuota,
    ResizeGang,
    UpdateStoreService,
    UpdateWorkload,
    WritePolicy,
)
from elasticjob_operator.kube import (
    JOBS,
    PODS,
    SECRETS,
    SERVICES,
    KubeApi,
    KubeError,
)
from elasticjob_operator.kube.api import KUEUE_WORKLOADS
from elasticjob_operator.kube.gangs import GANG_RESOURCES, explain_gang_refusal
from elasticjob_operator.kube.kueue import read_pod_changes
from elasticjob_operator.manifests.names import attempt
from elasticjob_operator.manifests.placement import HOSTNAME
from elasticjob_operator.manifests.services import store_selector
from elasticjob_operator.model.cluster.limit_ranges import breaks_limit_range
from elasticjob_operator.model.cluster.workload import PodChanges
from elasticjob_operator.model.job.spec import JobSpec
from elasticjob_operator.model.observed import Children, Job, Policy
from elasticjob_operator.observation.job_memory import LONGEST_OPTIONAL_RETRY, LONGEST_RETRY, JobMemory
from elasticjob_operator.observation.limit_ranges import fitted_to_limit_ranges
from elasticjob_operator.observation.policies import policy_resource
from elasticjob_operator.reconcile.child_requests import ChildRequests, Result
from elasticjob_operator.reconcile.eviction_reports import answer_eviction
from elasticjob_operator.reconcile.keys import JobKeys
from elasticjob_operator.reconcile.workload_requests import WorkloadRequests
from elasticjob_operator.watch.watch_cache import WatchCache

log = logging.getLogger(__name__)

AT_ONCE = 16
"""Requests of one job at a time: requests take turns, and those of a large job must not all come before another's. An
API server that responds in 0.1 s takes 160 a second, more than the rate limit."""


@dataclass
class ActionExecutor:
    """Executes one plan's actions for one job."""

    api: KubeApi
    keys: JobKeys
    job: Job
    spec: JobSpec
    image: str
    memory: JobMemory
    watched: WatchCache
    clock: Callable[[], float]
    """Unix seconds."""
    failed_starts: int = 0
    """`Plan.failed_starts`"""
    placement_label: str = HOSTNAME
    """`Controller.placement_label`"""
    settings: RoundSettings | None = None
    """Those of `Plan.operator_view`, which new stores begin with, as indices may have gaps. None: the spec's."""
    _pod_changes: PodChanges = field(default_factory=PodChanges)
    """What the queue's admission adds to worker pods."""
    _requests: ChildRequests = field(init=False)
    _workloads: WorkloadRequests = field(init=False)

    def __post_init__(self) -> None:
        self._requests = ChildRequests(self.api, self.job, self.spec, self.memory, self.watched, self.clock)
        self._workloads = WorkloadRequests(self._requests)

    async def execute(self, actions: Iterable[Action]) -> list[str]:
        """Execute actions in groups, one group after the other; return the names of the objects that were created.

        1. Policies, and the change of the store Service: if they fail, the others are executed nevertheless.
        2. The Secret and missing Services, then the store, the gang, the workers, and the standby store. Each group
           needs the ones before it: after a failure all later ones of this step are skipped. They are also skipped if
           the Secret or a Service is missing and the plan does not create it now. Workers and the standby store are
           skipped if the gang is missing or what the queue adds to pods is unknown.
        3. Deletions and other changes, in any case.

        The job's memory records failures, why pods were skipped, and when to try again.
        """
        ordered = list(actions)
        first = [a for a in ordered if isinstance(a, (WritePolicy, UpdateStoreService))]
        needed = (CreateSecret, CreateNodesService, CreateStoreService)
        prerequisites = [a for a in ordered if isinstance(a, needed)]
        gangs = [a for a in ordered if isinstance(a, CreateGang)]
        stores = [a for a in ordered if isinstance(a, CreateStore)]
        workers = [a for a in ordered if isinstance(a, CreateWorker)]
        standbys = [a for a in ordered if isinstance(a, CreateStandbyStore)]
        queueing = (
            CreateWorkload, UpdateWorkload, DeleteWorkload, MarkPodsReady, ReclaimPods, ReleaseQuota, FinishWorkload,
            CreateStep, DeactivateStep,
        )  # fmt: skip
        deletions = (DeletePod, DeleteService, DeleteGang, DeletePolicy, DeleteJob)
        changes = (*deletions, ResizeGang, *queueing, AnswerEviction)
        others = [a for a in ordered if isinstance(a, changes)]
        # A pod may start as soon as it exists, so its NetworkPolicy must be there. An additional pod lets an eviction
        # through once it is Ready, so the PodDisruptionBudget must be up to date. New agents find a promoted standby
        # store by the Service, whatever the API server refuses to create.
        done = await self._execute_all(first)
        failed, missing_child = Result(""), self._missing_children(prerequisites)
        missing_for_workers = self._missing_gang(gangs)
        if workers and not missing_for_workers.problem:
            missing_for_workers = await self._read_pod_changes()
        none = Result("")
        # Each group, and what the later ones lack even if it succeeds.
        groups = (prerequisites, missing_child), (stores, none), (gangs, missing_for_workers), (workers, none)
        for group, missing in groups:
            if failed.problem:
                self._skip(group, failed)
                continue
            results = await self._execute_all(group)
            done += results
            failed = next((r for r in results if r.problem), missing)
        if failed.problem:
            self._skip(standbys, failed)
        else:
            done += await self._execute_all(standbys)
        done += await self._execute_all(others)
        self.memory.record_execution(failed=any(r.problem and not r.refusal for r in done), now=self.clock())
        return [r.name for r in done if r.created]

    async def _execute_all(self, actions: Iterable[Action]) -> list[Result]:
        turns = asyncio.Semaphore(AT_ONCE)

        async def execute(action: Action) -> Result:
            async with turns:
                return await self._execute(action)

        return await asyncio.gather(*map(execute, actions))

    def _missing_children(self, creations: Iterable[Action]) -> Result:
        """Return why no pod can be created yet, although all of these creations succeed; no problem if one can."""
        children, name = self.memory.children or Children(), self.job.name
        created = {type(action) for action in creations}
        secret = manifests.key_secret(self.job)
        wanted = (
            (children.secret == secret, CreateSecret, f"Secret/{secret}"),
            (children.nodes, CreateNodesService, f"Service/{manifests.nodes_service(name)}"),
            (children.rendezvous, CreateStoreService, f"Service/{manifests.store_service(name)}"),
        )
        return self._why(next((key for exists, creation, key in wanted if not exists and creation not in created), ""))

    def _missing_gang(self, creations: Collection[Action]) -> Result:
        """Return why no worker can be created yet, although these creations succeed; no problem if one can."""
        gang, children = manifests.gang_child(self.job, self.spec), self.memory.children or Children()
        return self._why(gang) if gang and children.gang is None and not creations else Result("")

    async def _read_pod_changes(self) -> Result:
        """Read what the queue's admission adds to worker pods; return why it is unknown."""
        if self.memory.workload is None:
            unknown = "what the queue adds to pods is unknown: the job's Workload cannot be read"
            return Result("", problem=unknown if self.job.queue else "")
        try:
            self._pod_changes = await read_pod_changes(self.api, self.memory.workload)
        except KubeError as error:
            return Result("", problem=str(error))
        return Result("")

    def _why(self, missing: str) -> Result:
        """Return why this child does not exist; no problem without a child.

        The refusals of the API server are in memory: the plan does not try a refused creation before its time.
        """
        refusal = self.memory.refusals.get(missing)
        problem = refusal.message if refusal else missing and f"{missing} does not exist yet"
        return Result(missing, problem=problem, refusal=refusal)

    def _skip(self, actions: Iterable[Action], failed: Result) -> None:
        for action in actions:
            if isinstance(action, (CreateStore, CreateWorker, CreateStandbyStore)):
                self.memory.record_skipped(action.name, failed.problem, self.clock(), failed.refusal)

    async def _execute(self, action: Action) -> Result:
        if self.job.spec_error and isinstance(action, (CreateWorker, CreateWorkload, UpdateWorkload, CreateStep)):
            return self._requests.refuse_invalid(action)
        match action:
            case CreateSecret():
                return await self._create_secret()
            case CreateNodesService():
                return await self._requests.create(SERVICES, "Service/", manifests.nodes_service_manifest(self.job))
            case CreateStoreService(incarnation):
                body = manifests.store_service_manifest(self.job, self.spec.port, incarnation)
                return await self._requests.create(SERVICES, "Service/", body)
            case CreateGang():
                return await self._create_gang()
            case CreateStore(_, incarnation, avoid):
                pod = self._store_pod(incarnation, avoid)
                return await self._create_store(pod, LONGEST_RETRY)
            case CreateStandbyStore(_, incarnation, avoid):
                pod = self._store_pod(incarnation, avoid, standby=True)
                return await self._create_store(pod, LONGEST_OPTIONAL_RETRY)
            case CreateWorker(_, index, incarnation, avoid, outside_gang):
                more = (self.failed_starts, self.placement_label)
                pod = manifests.worker_pod_manifest(
                    self.job, self.spec, index, incarnation, self.image, avoid, *more, outside_gang=outside_gang
                )
                manifests.apply_admission(pod, self._pod_changes)
                if self.watched.eviction_requests:
                    manifests.add_responder(pod)
                return await self._requests.create(PODS, "", pod)
            case UpdateStoreService(uid, incarnation):
                selector = {"spec": {"selector": store_selector(self.job, incarnation)}}
                return await self._requests.patch(SERVICES, manifests.store_service(self.job.name), uid, selector)
            case ResizeGang(uid, size):
                resource, change = GANG_RESOURCES[self.spec.gang], manifests.gang_resize(self.spec.gang, size)
                return await self._requests.patch(resource, manifests.gang_name(self.job), uid, change)
            case DeleteGang(uid):
                resource = GANG_RESOURCES[self.spec.gang]
                return await self._requests.delete_child(resource, manifests.gang_name(self.job), uid)
            case DeletePod(name, uid, why, force, grace):
                log.info("%s/%s: deleting pod %s: %s", self.job.namespace, self.job.name, name, why)
                return await self._requests.delete(PODS, name, uid, grace=0 if force else grace)
            case DeleteService(name, uid):
                return await self._requests.delete_child(SERVICES, name, uid)
            case CreateWorkload(name, replaces):
                return await self._workloads.create(name, replaces)
            case UpdateWorkload(name, uid):
                return await self._workloads.update(name, uid)
            case DeleteWorkload(name, uid):
                return await self._requests.delete(KUEUE_WORKLOADS, name, uid)
            case CreateStep(index, count):
                return await self._workloads.create_step(index, count)
            case DeactivateStep(name, uid):
                return await self._requests.patch(KUEUE_WORKLOADS, name, uid, {"spec": {"active": False}})
            case MarkPodsReady() | ReclaimPods() | ReleaseQuota() | FinishWorkload():
                return await self._workloads.write_status(action)
            case AnswerEviction():
                return await answer_eviction(self._requests, action)
            case WritePolicy(policy):
                return await self._write_policy(policy)
            case DeletePolicy(policy):
                name = manifests.policy_name(self.job.name)
                return await self._requests.delete_child(policy_resource(policy), name, policy.uid)
            case DeleteJob(uid, why):
                log.info("%s/%s: deleting the job: %s", self.job.namespace, self.job.name, why)
                return await self._requests.delete(JOBS, self.job.name, uid)
            case _:
                assert_never(action)

    async def _create_secret(self) -> Result:
        """Create the Secret of the execution; one whose keys this operator cannot derive can only exist already."""
        job, number = self.job, attempt(self.job)
        keys = self.keys.of_key_id(job.uid, number, job.status.key_id)
        if keys is None:
            name = manifests.key_secret(job)
            self._requests.record_object(SECRETS, name, {})
            return Result(name)
        return await self._requests.create(
            SECRETS, "Secret/", manifests.secret_manifest(job, keys.of_job(job.uid, number))
        )

    def _store_pod(self, incarnation: int, avoid: tuple[str, ...], *, standby: bool = False) -> dict[str, Any]:
        return manifests.store_pod_manifest(
            self.job, self.spec, incarnation, self.image, avoid, self.settings, standby=standby
        )

    async def _create_store(self, pod: dict[str, Any], longest_retry: float) -> Result:
        """Create a store pod. If its resources break a LimitRange, create it with resources that the range admits."""
        result = await self._requests.create(PODS, "", pod, longest_retry)
        if result.refusal is None or not breaks_limit_range(result.problem):
            return result
        fitted = await fitted_to_limit_ranges(self.api, pod, self.spec.store.resources)
        return result if fitted == pod else await self._requests.create(PODS, "", fitted, longest_retry)

    async def _write_policy(self, policy: Policy) -> Result:
        """Write a policy; log why if the API server refuses to create it, because no condition of the job says so."""
        resource, body = policy_resource(policy), manifests.policy_manifest(self.job, policy)
        if policy.uid:
            return await self._requests.patch(resource, body["metadata"]["name"], policy.uid, {"spec": body["spec"]})
        result = await self._requests.create(resource, f"{policy.kind}/", body, LONGEST_OPTIONAL_RETRY)
        if result.refusal:
            log.warning("%s/%s: no %s: %s", self.job.namespace, self.job.name, policy.kind, result.refusal.message)
        return result

    async def _create_gang(self) -> Result:
        kind = manifests.gang_child(self.job, self.spec).removesuffix(self.job.name)
        body = manifests.gang_manifest(self.job, self.spec)
        return await self._requests.create(GANG_RESOURCES[self.spec.gang], kind, body, explain=self._explain_gang)

    def _explain_gang(self, error: KubeError) -> str:
        return explain_gang_refusal(self.spec.gang, error)

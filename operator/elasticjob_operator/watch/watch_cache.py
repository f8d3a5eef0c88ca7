"""What the watches delivered, so that a reconcile without work costs no request.

The cache may lag behind the API server, but never behind what this operator has written or read itself. A late view of
what others do costs time and not more: a status write by it fails if the job has changed, and a second creation of a
pod because of its name. Where a late view would charge, replace or delete something (`plan.staleness`), the job and
its pods are read from the API server, and planned for again.

A watch can lose events (a deletion while it connects again), so everything is listed again from time to time.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from elasticjob._runtime.contract.names import Label
from elasticjob_operator.kube import JOBS, PODS, KubeError, Page, Resource
from elasticjob_operator.kube.api import EVICTIONS, KUEUE_WORKLOADS
from elasticjob_operator.manifests.names import job_of_worker_pod
from elasticjob_operator.model.cluster.evictions import Eviction, parse_eviction
from elasticjob_operator.model.cluster.nodes import NodeWarning
from elasticjob_operator.model.cluster.pods import Pod, minimal_pod, parse_pod
from elasticjob_operator.model.cluster.raw import Raw, mapping, text, whole_number
from elasticjob_operator.model.cluster.unreadable import ObjectGuard, parse_or_skip
from elasticjob_operator.model.cluster.workload import Workload, parse_workload
from elasticjob_operator.model.observed import JobKey, is_owned

T = TypeVar("T")

log = logging.getLogger(__name__)


class Lister(Protocol):
    """The call of the API server that lists need."""

    def pages(
        self, resource: Resource, namespace: str | None, selector: str = "", fields: str = ""
    ) -> AsyncIterator[Page]: ...


@dataclass
class _Entry(Generic[T]):
    key: JobKey
    """The job that the object belongs to, or is."""
    version: int
    """The resourceVersion; 0 if it is not a number: then the object is always replaced."""
    content: T
    announced: bool = False
    """Whether the job has been enqueued for this version. If not, only an own read or write has brought it here, and
    the event or list that delivers it must enqueue the job. A new version begins as not announced."""


@dataclass(frozen=True)
class _LabelledPod:
    job_uid: str
    """The job that the labels name; other pods may bear copied labels."""
    owned: bool
    role: str
    pod: Pod | None
    """Reduced to a part (`minimal_pod`) if it cannot be read; None if not even that can be."""
    problem: str = ""
    """Why it cannot be read, for the job's condition."""


@dataclass(frozen=True)
class _OwnedWorkload:
    job_uid: str
    """The job that controls it; empty without one."""
    workload: Workload | None
    """None if it cannot be read."""
    problem: str = ""
    """Why it cannot be read, for the job's condition."""


@dataclass
class WatchCache:
    """`on_event` is called with the key of each job that an event or a list concerns, once for each version of an
    object."""

    on_event: Callable[[JobKey], None] = lambda key: None
    kueue: bool = False
    """Whether Workloads of Kueue are watched, and listed again."""
    eviction_requests: bool = False
    """Whether Evictions are watched, and worker pods name the operator as their responder."""
    nodes_watched: bool | None = False
    """Whether the operator watches the warnings of Nodes; None: it does not know yet whether it may."""
    _jobs: dict[str, _Entry[dict[str, Any]]] = field(default_factory=dict)
    """By UID. Without managedFields, which are most of a job's bytes."""
    _uids: dict[JobKey, str] = field(default_factory=dict)
    _pods: dict[str, _Entry[_LabelledPod]] = field(default_factory=dict)
    """By UID."""
    _pods_of: dict[str, set[str]] = field(default_factory=dict)
    """UIDs of pods by the UID of the job that their labels name."""
    _workloads: dict[str, _Entry[_OwnedWorkload]] = field(default_factory=dict)
    """By UID."""
    _workloads_of: dict[str, set[str]] = field(default_factory=dict)
    """UIDs of Workloads by the UID of the job that controls them."""
    _evictions: dict[str, _Entry[Eviction]] = field(default_factory=dict)
    """By UID; only those that have the operator as a responder."""
    _evictions_of: dict[JobKey, set[str]] = field(default_factory=dict)
    """UIDs of Evictions by the job of their pod, which may be gone."""
    _warnings: dict[str, NodeWarning] = field(default_factory=dict)
    """By name of the node; only nodes that have one."""
    _topologies: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By name of the node, where it is; only nodes that have one of the labels."""
    _places: dict[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)
    """The values of `_topologies`: all nodes of one place have the same object."""

    _listed: set[tuple[Resource, str | None]] = field(default_factory=set)
    """What has been listed, by namespace; None: all."""
    _guards: dict[Resource, ObjectGuard] = field(default_factory=dict)
    _gone: set[str] = field(default_factory=set)
    """UIDs of objects whose end a watch has delivered or a list has found since `forget_ends` was last called."""
    _gone_before: set[str] = field(default_factory=set)
    """The same between the last two calls: the response to a read may be that late."""

    def job(self, key: JobKey) -> dict[str, Any] | None:
        """Return the job as raw JSON; None where the watch has not delivered it."""
        uid = self._uids.get(key)
        return None if uid is None else self._jobs[uid].content

    def pods(self, job_uid: str) -> list[tuple[str, Pod]]:
        """Return the pods that the job of this UID controls, each with its role, as far as they can be read."""
        found = (self._pods[uid].content for uid in self._pods_of.get(job_uid, ()))
        return [(labelled.role, labelled.pod) for labelled in found if labelled.owned and labelled.pod is not None]

    def workloads(self, job_uid: str) -> list[Workload | None]:
        """Return the Workloads that the job of this UID controls; None for each that cannot be read."""
        return [self._workloads[uid].content.workload for uid in self._workloads_of.get(job_uid, ())]

    def evictions(self, key: JobKey) -> tuple[Eviction, ...]:
        """Return the Evictions of this job's pods for which it is the operator's turn."""
        found = (self._evictions[uid].content for uid in self._evictions_of.get(key, ()))
        return tuple(sorted((e for e in found if e.active), key=lambda eviction: eviction.name))

    def unreadable(self, job_uid: str) -> tuple[str, ...]:
        """Return why objects that the job of this UID controls cannot be read, one sentence for each of them."""
        pods = (self._pods[uid].content for uid in self._pods_of.get(job_uid, ()))
        workloads = (self._workloads[uid].content for uid in self._workloads_of.get(job_uid, ()))
        problems = [*(p.problem for p in pods if p.owned), *(w.problem for w in workloads)]
        return tuple(sorted(filter(None, problems)))

    def warnings(self, nodes: Iterable[str]) -> dict[str, NodeWarning]:
        """Return the warnings of those of these nodes that have one."""
        return {name: self._warnings[name] for name in nodes if name in self._warnings}

    def topologies(self, nodes: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Return where these nodes are, as far as it is known."""
        return {name: self._topologies[name] for name in nodes if name in self._topologies}

    def set_nodes_watched(self, watched: bool) -> None:
        """Record that all Nodes have been delivered, or that their warnings stay unknown: each job needs it."""
        if not watched:
            self._warnings.clear()
        if self.nodes_watched is not watched:
            self.nodes_watched = watched
            for entry in self._jobs.values():
                self.on_event(entry.key)

    def see_node(self, name: str, warning: NodeWarning | None, topology: tuple[str, ...] = ()) -> None:
        """Record the warnings of a node, None if it has none, and where it is.

        Only jobs that a change concerns are reconciled; all are once the first list of Nodes is complete.
        """
        before = self._warnings.pop(name, None)
        if warning is not None:
            self._warnings[name] = warning
        moved = self._set_topology(name, topology) and self.nodes_watched is not None
        if warning != before or moved:
            for entry in self._pods.values():
                pod = entry.content.pod
                if pod is not None and (pod.node == name or name in pod.avoided_nodes):
                    self.on_event(entry.key)

    def forget_nodes_except(self, names: Collection[str]) -> None:
        """Forget all other nodes."""
        for name in (self._warnings.keys() | self._topologies.keys()).difference(names):
            self.see_node(name, None)

    def _set_topology(self, name: str, topology: tuple[str, ...]) -> bool:
        """Record where a node is; return whether that is new."""
        before = self._topologies.pop(name, ())
        if topology:
            self._topologies[name] = self._places.setdefault(topology, topology)
        return topology != before

    def record_job(self, raw: Raw) -> None:
        """Record a job as the API server has just returned it to this operator. The watch delivers it later."""
        uid = text(raw, "metadata", "uid")
        if uid in self._jobs:  # else it has been deleted
            self._put_job(uid, raw)

    def know_job(self, key: JobKey) -> None:
        """Record that the reconcile that has just failed has read or written the job as it is here.

        Its events enqueue it no more. Otherwise the failure's own status write would cut the delay before the retry
        short, each time that it writes another status. A later change, of the spec for example, enqueues it at once.
        """
        entry = self._jobs.get(self._uids.get(key, ""))
        if entry is not None:
            entry.announced = True

    def record_pod(self, raw: Raw) -> None:
        """Record a pod as the API server has just returned it to this operator."""
        uid = text(raw, "metadata", "uid")
        if uid not in self._gone and uid not in self._gone_before:
            self._put_pod(uid, raw)

    def see_job(self, raw: Raw, deleted: bool = False) -> None:
        """Record an event of the watch on jobs."""
        uid = text(raw, "metadata", "uid")
        if deleted:
            self._gone.add(uid)
            self._drop_job(uid)
        else:
            self._put_job(uid, raw)
        self._announce(_key(raw), self._jobs.get(uid))

    def see_pod(self, raw: Raw, deleted: bool = False) -> None:
        """Record an event of the watch on pods."""
        key = (text(raw, "metadata", "namespace"), text(raw, "metadata", "labels", Label.JOB_NAME))
        uid = text(raw, "metadata", "uid")
        if deleted:
            self._gone.add(uid)
            self._drop_pod(uid)
        else:
            self._put_pod(uid, raw)
        self._announce(key, self._pods.get(uid))

    def see_workload(self, raw: Raw, deleted: bool = False) -> None:
        """Record an event of the watch on Workloads."""
        key = (text(raw, "metadata", "namespace"), text(raw, "metadata", "labels", Label.JOB_NAME))
        uid, job_uid = text(raw, "metadata", "uid"), text(raw, "metadata", "labels", Label.JOB_UID)
        if deleted:
            self._gone.add(uid)
            self._drop_workload(uid)
        elif _is_newer(self._workloads.get(uid), raw):
            owner = job_uid if is_owned(raw, job_uid) else ""
            before = self._workloads.get(uid)
            workload, problem = parse_or_skip(parse_workload, "Workload", raw, before.content.problem if before else "")
            self._drop_workload(uid)
            self._workloads[uid] = _Entry(key, _version(raw), _OwnedWorkload(owner, workload, problem))
            self._workloads_of.setdefault(owner, set()).add(uid)
        self._announce(key, self._workloads.get(uid))

    def see_eviction(self, raw: Raw, deleted: bool = False) -> None:
        """Record an event of the watch on Evictions. Those of other pods are not kept."""
        uid = text(raw, "metadata", "uid")
        before = self._evictions.get(uid)
        if deleted:
            self._gone.add(uid)
            self._drop_eviction(uid)
        else:
            self._put_eviction(uid, raw)
        after = self._evictions.get(uid)
        if (known := after or before) is not None:
            self._announce(known.key, after)

    def record_eviction(self, raw: Raw) -> None:
        """Record an Eviction as the API server has just returned it to this operator."""
        uid = text(raw, "metadata", "uid")
        if uid in self._evictions:  # else it has been deleted
            self._put_eviction(uid, raw)

    def _announce(self, key: JobKey, entry: _Entry[T] | None) -> None:
        """Call `on_event` after an event or a list; `entry` is what it left in the cache, None if nothing."""
        if entry is None or not entry.announced or entry.version == 0:
            self.on_event(key)
        if entry is not None:
            entry.announced = True

    async def list_again(self, api: Lister, namespaces: tuple[str, ...]) -> None:
        """Compare with the API server, and record what the watches did not deliver. Empty `namespaces`: all.

        A list that fails is logged, and does not stop the others.
        """
        self.forget_ends()
        for namespace in namespaces or (None,):
            for resource in (PODS, JOBS, KUEUE_WORKLOADS) if self.kueue else (PODS, JOBS):
                try:
                    await self.list_resource(resource, api, namespace)
                except KubeError as error:
                    log.warning("the list in %s failed: %s", namespace or "all namespaces", error)

    def forget_ends(self) -> None:
        """Forget which objects were deleted before the call before this one."""
        self._gone_before, self._gone = self._gone, set()

    async def list_resource(self, resource: Resource, api: Lister, namespace: str | None) -> str:
        """Compare all pods, jobs, Workloads or Evictions of a namespace (None: of all) with the API server, record
        what the watches did not deliver, and return the list's resourceVersion. KubeError: they cannot be listed."""
        if resource == PODS:
            version = await self._list(api, PODS, namespace, Label.JOB_NAME, self._pods, self.see_pod, self._drop_pod)
        elif resource == JOBS:
            version = await self._list(api, JOBS, namespace, "", self._jobs, self.see_job, self._drop_job)
        elif resource == EVICTIONS:
            evictions = self._evictions, self.see_eviction, self._drop_eviction
            version = await self._list(api, resource, namespace, "", *evictions)
        else:
            seen = self._workloads, self.see_workload, self._drop_workload
            version = await self._list(api, resource, namespace, Label.JOB_NAME, *seen)
        self._listed.add((resource, namespace))
        return version

    def is_listed(self, namespace: str) -> bool:
        """Return whether all jobs and pods of a namespace that existed when this operator began to lead have been taken
        over."""
        return all(self._listed & {(resource, None), (resource, namespace)} for resource in (PODS, JOBS))

    async def _list(
        self,
        api: Lister,
        resource: Resource,
        namespace: str | None,
        selector: str,
        entries: dict[str, _Entry[T]],
        see: Callable[[Raw], None],
        drop: Callable[[str], None],
    ) -> str:
        guard = self._guards.setdefault(resource, ObjectGuard(resource.plural))
        before = {uid: entry for uid, entry in entries.items() if namespace in (None, entry.key[0])}
        listed = set[str]()
        version = ""
        async for page in api.pages(resource, namespace, selector):
            for raw in page.items:
                uid = text(raw, "metadata", "uid")
                listed.add(uid)
                known = entries.get(uid)
                if known is not None and known is before.get(uid) and known.version > _version(raw):
                    # The list is from after the entry, whose version is higher nevertheless: etcd has been restored
                    # from a backup, and counts from there.
                    known.version = 0
                if uid not in self._gone and (known is None or known.version == 0 or _version(raw) > known.version):
                    guard.call(see, raw)
            version = page.version
        for uid, entry in before.items():
            if uid not in listed and entries.get(uid) is entry:  # no event since the list began: it is gone
                self._gone.add(uid)  # for an older list that still runs
                drop(uid)
                self.on_event(entry.key)
        return version

    def _put_job(self, uid: str, raw: Raw) -> None:
        if _is_newer(self._jobs.get(uid), raw):
            metadata = {name: value for name, value in mapping(raw, "metadata").items() if name != "managedFields"}
            self._jobs[uid] = _Entry(_key(raw), _version(raw), {**raw, "metadata": metadata})
            self._uids[_key(raw)] = uid

    def _put_pod(self, uid: str, raw: Raw) -> None:
        if _is_newer(self._pods.get(uid), raw):
            key = (text(raw, "metadata", "namespace"), text(raw, "metadata", "labels", Label.JOB_NAME))
            job_uid = text(raw, "metadata", "labels", Label.JOB_UID)
            before = self._pods.get(uid)
            pod, problem = parse_or_skip(parse_pod, "pod", raw, before.content.problem if before else "", minimal_pod)
            role = text(raw, "metadata", "labels", Label.ROLE)
            self._drop_pod(uid)
            self._pods[uid] = _Entry(
                key, _version(raw), _LabelledPod(job_uid, is_owned(raw, job_uid), role, pod, problem)
            )
            self._pods_of.setdefault(job_uid, set()).add(uid)

    def _drop_job(self, uid: str) -> None:
        entry = self._jobs.pop(uid, None)
        if entry is not None and self._uids.get(entry.key) == uid:
            del self._uids[entry.key]

    def _drop_pod(self, uid: str) -> None:
        entry = self._pods.pop(uid, None)
        if entry is not None:
            pods = self._pods_of[entry.content.job_uid]
            pods.discard(uid)
            if not pods:
                del self._pods_of[entry.content.job_uid]

    def _put_eviction(self, uid: str, raw: Raw) -> None:
        if not _is_newer(self._evictions.get(uid), raw):
            return
        metadata = {name: value for name, value in mapping(raw, "metadata").items() if name != "managedFields"}
        eviction = parse_eviction({**raw, "metadata": metadata})
        self._drop_eviction(uid)
        if eviction is not None:
            key = (text(raw, "metadata", "namespace"), job_of_worker_pod(eviction.pod))
            self._evictions[uid] = _Entry(key, _version(raw), eviction)
            self._evictions_of.setdefault(key, set()).add(uid)

    def _drop_eviction(self, uid: str) -> None:
        entry = self._evictions.pop(uid, None)
        if entry is not None:
            of_job = self._evictions_of[entry.key]
            of_job.discard(uid)
            if not of_job:
                del self._evictions_of[entry.key]

    def _drop_workload(self, uid: str) -> None:
        entry = self._workloads.pop(uid, None)
        if entry is not None:
            workloads = self._workloads_of[entry.content.job_uid]
            workloads.discard(uid)
            if not workloads:
                del self._workloads_of[entry.content.job_uid]


def _is_newer(entry: _Entry[Any] | None, raw: Raw) -> bool:
    return entry is None or entry.version == 0 or _version(raw) > entry.version


def _key(raw: Raw) -> JobKey:
    return text(raw, "metadata", "namespace"), text(raw, "metadata", "name")


def _version(raw: Raw) -> int:
    return whole_number(text(raw, "metadata", "resourceVersion"))

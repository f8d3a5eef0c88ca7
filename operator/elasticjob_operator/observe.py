"""Read one job and the objects around it from the API server."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from elasticjob.contract.names import GROUP, KIND, Label, Role
from elasticjob_operator.job_memory import JobMemory
from elasticjob_operator.kube import JOBS, LEASES, PODS, SECRETS, SERVICES, KubeApi, NotFound, Refused, Resource
from elasticjob_operator.manifests import key_secret, nodes_service, store_service
from elasticjob_operator.model.observed import Child, Children, Job, LinkView, Observed, has_retired, parse_job
from elasticjob_operator.model.pods import Pod, parse_pod
from elasticjob_operator.model.raw import mapping, moment, objects, text
from elasticjob_operator.model.status import NODE_LOST

log = logging.getLogger(__name__)

CHILDREN_SECONDS = 60.0
"""Services and the Secret change only when another client changes them: they are read this often, in seconds, and after
each change by this operator."""
NODE_LEASES = "kube-node-lease"
"""Namespace of the kubelets' Leases."""
SUSPECT_SECONDS = 2.0
"""Silence of a store after which the operator reads the Lease of the store's node."""


async def fetch_job(api: KubeApi, namespace: str, name: str) -> dict[str, Any] | None:
    """Return the job as raw JSON; None where it does not exist."""
    try:
        return await api.get(JOBS, namespace, name)
    except NotFound:
        return None


async def observe(
    api: KubeApi, raw: dict[str, Any], memory: JobMemory, link: LinkView, standby_link: LinkView, now: float
) -> Observed:
    """Return everything that `plan` needs about this job; `now` is Unix seconds."""
    job = parse_job(raw)
    pods, children = await asyncio.gather(_pods(api, job), _children(api, job, memory, now))
    workers = tuple(pod for role, pod in pods if role == Role.WORKER.value)
    stores = tuple(pod for role, pod in pods if role == Role.STORE.value)
    if memory.older_store_at is None or any(_has_successor(job, pod) for pod in stores):
        memory.older_store_at = now
    newer = [pod for pod in stores if _is_newer(job, pod)]
    if newer:
        memory.standby_store_at = 0.0 if all(has_retired(pod, standby_link) for pod in newer) else now
    elif memory.standby_store_at is None:
        memory.standby_store_at = now
    return Observed(
        job=job,
        workers=workers,
        stores=stores,
        children=children,
        refusals=dict(memory.refusals),
        terminating_since=memory.terminating_since,
        link=link,
        standby_link=standby_link,
        standby_store_at=memory.standby_store_at or 0.0,
        older_store_at=memory.older_store_at,
        leases=await _leases(api, _suspected_nodes(job, workers, stores, link, now)),
    )


async def _pods(api: KubeApi, job: Job) -> list[tuple[str, Pod]]:
    """Return the pods that the job owns, each with its role. Other pods may bear copied labels: check the owner."""
    listed = await api.list(PODS, job.namespace, f"{Label.JOB_UID}={job.uid}")
    owned = [(text(raw, "metadata", "labels", Label.ROLE), parse_pod(raw)) for raw in listed if is_owned(raw, job.uid)]
    return sorted(owned, key=lambda found: (found[1].index, found[1].incarnation))


def _has_successor(job: Job, store: Pod) -> bool:
    """Return whether a store pod is live although a later incarnation of the store exists."""
    return store.end is None and store.incarnation < (job.status.store_incarnation or 0)


def _is_newer(job: Job, store: Pod) -> bool:
    """Return whether a store pod is live that is newer than the store in status: a standby store, retired or not."""
    current = job.status.store_incarnation
    return store.end is None and current is not None and store.incarnation > current


def is_owned(raw: dict[str, Any], uid: str) -> bool:
    """Return whether the job of this UID is the object's controller."""
    owners = objects(raw, "metadata", "ownerReferences")
    return any(text(owner, "uid") == uid and owner.get("controller") is True for owner in owners)


def is_terminating(raw: dict[str, Any], job: Job) -> bool:
    """Return whether Kubernetes deletes the object soon, and frees its name.

    The garbage collector deletes the children of a deleted job. One that had this job's name no longer exists.
    """
    return bool(text(raw, "metadata", "deletionTimestamp")) or any(
        owner.get("controller") is True
        and text(owner, "kind") == KIND
        and text(owner, "apiVersion").startswith(f"{GROUP}/")
        and text(owner, "name") == job.name
        and text(owner, "uid") != job.uid
        for owner in objects(raw, "metadata", "ownerReferences")
    )


async def _children(api: KubeApi, job: Job, memory: JobMemory, now: float) -> Children:
    if memory.children is None or now >= memory.children_at + CHILDREN_SECONDS:
        secret, nodes, rendezvous = await asyncio.gather(
            _child(api, SECRETS, job, key_secret(job.name)),
            _child(api, SERVICES, job, nodes_service(job.name)),
            _child(api, SERVICES, job, store_service(job.name)),
        )
        children = Children(secret, nodes, rendezvous)
        terminating = any(child.terminating for child in children.not_ours)
        memory.terminating_since = (memory.terminating_since or now) if terminating else None
        if children.not_ours:
            # The job waits for their deletion: read them again at the next reconcile.
            return children
        memory.children, memory.children_at = children, now
    return memory.children


async def _child(api: KubeApi, resource: Resource, job: Job, name: str) -> Child | None:
    try:
        raw = await api.get(resource, job.namespace, name)
    except NotFound:
        return None
    uid = text(raw, "metadata", "uid")
    if is_terminating(raw, job):
        return Child(uid, ours=False, terminating=True)
    selected = text(raw, "spec", "selector", Label.INCARNATION)
    incarnation = int(selected) if selected.isascii() and selected.isdigit() else None
    return Child(uid, is_owned(raw, job.uid), incarnation)


def _suspected_nodes(
    job: Job, workers: tuple[Pod, ...], stores: tuple[Pod, ...], link: LinkView, now: float
) -> frozenset[str]:
    """Return nodes that may be lost: avoided as lost, overdue with a deletion, or with a silent agent or store."""
    suspected = {node.name for node in job.status.avoided if node.reason == NODE_LOST}
    suspected |= {p.node for p in (*workers, *stores) if p.deleting is not None and p.deleting < now}
    if link.connected and link.report is not None:
        connected = {node.pod for node in link.report.nodes}
        suspected |= {p.node for p in workers if p.running and p.name not in connected}
    elif now - link.since >= SUSPECT_SECONDS:
        suspected |= {p.node for p in stores}
    return frozenset(suspected - {""})


async def _leases(api: KubeApi, nodes: frozenset[str]) -> dict[str, float]:
    names = sorted(nodes)
    times = await asyncio.gather(*(_renew_time(api, name) for name in names))
    return {name: at for name, at in zip(names, times, strict=True) if at is not None}


async def _renew_time(api: KubeApi, node: str) -> float | None:
    """Return when the kubelet last renewed its Lease, in Unix seconds; 0: no Lease, None: no permission to read it."""
    try:
        lease = await api.get(LEASES, NODE_LEASES, node)
    except NotFound:
        return 0.0
    except Refused as error:
        log.warning("the operator cannot read the Lease of node %s: %s", node, error)
        return None
    return moment(mapping(lease, "spec"), "renewTime") or 0.0

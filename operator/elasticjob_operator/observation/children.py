"""Read the job's Services and gang object, and keep them in memory: the operator does not watch them.

Its own creates, patches and deletes tell what has become of an object, so nothing is read after them. The job's Secret
is never read: to create it tells whether it exists, and so does a pod that runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from elasticjob._runtime.contract.names import GROUP, KIND, Label
from elasticjob_operator.kube import SECRETS, SERVICES, KubeApi, NotFound, Resource
from elasticjob_operator.kube.gangs import find_gang
from elasticjob_operator.manifests import gang_name, key_secret, nodes_service, store_service
from elasticjob_operator.manifests.gang import read_gang_size
from elasticjob_operator.manifests.names import attempt
from elasticjob_operator.model.cluster.pods import Pod
from elasticjob_operator.model.cluster.raw import Raw, is_number, objects, text
from elasticjob_operator.model.job.spec import GangProvider
from elasticjob_operator.model.observed import Child, Children, Job, is_owned
from elasticjob_operator.observation.job_memory import JobMemory

CHILDREN_SECONDS = 60.0
"""Services change only when another client changes them: where a reconcile reads the job, it reads them again if they
were last read so many seconds ago."""


def is_terminating(raw: Raw, job: Job) -> bool:
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


def children_of(job: Job) -> tuple[int, GangProvider]:
    """Return what decides which objects are the job's children."""
    return attempt(job), job.spec.gang if job.spec else GangProvider.NONE


async def read_children(api: KubeApi, job: Job, memory: JobMemory, now: float) -> Children:
    """Return the children: from memory, unless it has none, or those of another execution, or they are old."""
    stale = now >= memory.children_at + CHILDREN_SECONDS or memory.children_of != children_of(job)
    if memory.children is None or stale:
        secret = memory.children.secret if memory.children else ""
        nodes, rendezvous, gang = await asyncio.gather(
            _find(api, SERVICES, job, nodes_service(job.name)),
            _find(api, SERVICES, job, store_service(job.name)),
            _find_gang(api, job),
        )
        children = Children(secret, _child(job, nodes), _child(job, rendezvous), _child(job, gang))
        terminating = any(child.terminating for child in children.not_ours)
        memory.terminating_since = (memory.terminating_since or now) if terminating else None
        if children.not_ours:
            # The job waits for their deletion: read them again at the next reconcile.
            return children
        memory.children, memory.children_at, memory.children_of = children, now, children_of(job)
    return memory.children


def with_child(children: Children, job: Job, resource: Resource, name: str, raw: Raw | None) -> Children:
    """Return the children with this object instead of the one of its name; `raw` None: with none of its name."""
    if resource is SECRETS:
        return replace(children, secret="" if raw is None else name)
    child = _child(job, raw)
    if resource is SERVICES:
        is_nodes = name == nodes_service(job.name)
        return replace(children, nodes=child) if is_nodes else replace(children, rendezvous=child)
    return replace(children, gang=child)


def with_secret(children: Children, job: Job, pods: Iterable[Pod]) -> Children:
    """Return the children with what these pods of the execution say of its Secret: it exists if one of them runs, and
    is missing if the kubelet does not find it for another one."""
    name, seen = key_secret(job), list(pods)
    if any(f'secret "{name}" not found' in pod.stuck for pod in seen):
        return replace(children, secret="")
    return replace(children, secret=name) if any(pod.running for pod in seen) else children


async def _find(api: KubeApi, resource: Resource, job: Job, name: str) -> dict[str, Any] | None:
    try:
        return await api.get(resource, job.namespace, name)
    except NotFound:
        return None


async def _find_gang(api: KubeApi, job: Job) -> Raw | None:
    if job.spec is None or job.spec.gang is GangProvider.NONE:
        return None
    return await find_gang(api, job.spec.gang, job.namespace, gang_name(job))


def _child(job: Job, raw: Raw | None) -> Child | None:
    if raw is None:
        return None
    uid = text(raw, "metadata", "uid")
    if is_terminating(raw, job):
        return Child(uid, ours=False, terminating=True)
    selected = text(raw, "spec", "selector", Label.INCARNATION)
    incarnation = int(selected) if is_number(selected) else None
    return Child(uid, is_owned(raw, job.uid), incarnation, gang_size=read_gang_size(raw) or None)

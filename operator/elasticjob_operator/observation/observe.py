"""Read one job and the objects around it from the API server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from elasticjob._runtime.contract.names import Label, Role
from elasticjob_operator.kube import EVENTS, JOBS, PODS, KubeApi, KubeError, NotFound, Refused
from elasticjob_operator.kube.kueue import find_workload, list_workloads
from elasticjob_operator.manifests import workload_names
from elasticjob_operator.model.cluster.pods import Pod, minimal_pod, parse_pod
from elasticjob_operator.model.cluster.raw import Raw, text
from elasticjob_operator.model.cluster.unreadable import parse_or_skip
from elasticjob_operator.model.cluster.workload import QueueView, parse_workload, queue_view
from elasticjob_operator.model.job.job_defaults import NO_DEFAULTS, JobDefaults
from elasticjob_operator.model.observed import (
    Children,
    Job,
    LinkView,
    Observed,
    Policies,
    has_retired,
    is_owned,
    parse_job,
)
from elasticjob_operator.observation.children import children_of, read_children, with_secret
from elasticjob_operator.observation.job_memory import JobMemory
from elasticjob_operator.observation.policies import read_policies
from elasticjob_operator.observation.start_warnings import FIELDS, MAX_EVENT_PAGES, StartWarnings
from elasticjob_operator.observation.stop_causes import StopCauses, fields_of
from elasticjob_operator.watch.node_leases import NodeLeases

LEASE_MAX_AGE = 1.0
"""Seconds after which the operator reads the Lease of a suspected node again."""
SUSPECT_SECONDS = 2.0
"""Silence of a store after which the operator reads the Lease of the store's node. A new operator has contact with a
store within that time: a Lease for each of a thousand stores would take it longer than all else."""

STOP_CAUSE_SECONDS = 3.0
"""Seconds that all Events about pods that ended may take to read. Failed pods are replaced only after that, and Events
may be slow alone, because large clusters keep them in an etcd of their own."""
START_WARNING_SECONDS = 10.0
"""The same for the Events about pods that do not start: those of a whole namespace may be many pages."""

STARTING_SECONDS = 10.0
"""Seconds for which a new pod may be silent, in a job without a round, before the operator reads the Lease of its node:
nothing trains yet that waits for the pod, and images and imports take as long."""


async def fetch_job(api: KubeApi, namespace: str, name: str) -> dict[str, Any] | None:
    """Return the job as raw JSON; None where it does not exist."""
    try:
        return await api.get(JOBS, namespace, name)
    except NotFound:
        return None


async def observe(
    api: KubeApi,
    raw: dict[str, Any],
    memory: JobMemory,
    node_leases: NodeLeases,
    link: LinkView,
    standby_link: LinkView,
    now: float,
    *,
    queued: bool = False,
    stepped: bool = False,
    current_defaults: JobDefaults = NO_DEFAULTS,
    see_pod: Callable[[Raw], None] = lambda raw: None,
) -> Observed:
    """Return everything that `plan` needs about this job; `now` is Unix seconds.

    `queued`: the watch has delivered a Workload of the job, whether or not the job has a queue now; `stepped`: one of a
    step. `current_defaults`: those of a job that starts now. `see_pod` is called with each pod that was read.
    """
    job = parse_job(raw, current_defaults)
    listed, children, _, queue = await asyncio.gather(
        _pods(api, job, see_pod),
        read_children(api, job, memory, now),
        read_policies(api, job, memory, now),
        _queue_view(api, job, memory, queued=queued, stepped=stepped),
    )
    observed = await _observed(api, job, listed, children, memory, node_leases, link, standby_link, now)
    return replace(observed, queue=queue)


async def observe_watched(
    api: KubeApi,
    job: Job,
    pods: list[tuple[str, Pod]],
    memory: JobMemory,
    node_leases: NodeLeases,
    link: LinkView,
    standby_link: LinkView,
    now: float,
) -> Observed | None:
    """Return the same by what the watches delivered, without the queue; None if the job's other children are not those
    in memory.

    Only Leases of suspected nodes are read.
    """
    children = memory.children or Children(known=False)
    if children.known and memory.children_of != children_of(job):
        return None
    return await _observed(api, job, _sorted(pods), children, memory, node_leases, link, standby_link, now)


async def _observed(
    api: KubeApi,
    job: Job,
    listed: list[tuple[str, Pod]],
    children: Children,
    memory: JobMemory,
    node_leases: NodeLeases,
    link: LinkView,
    standby_link: LinkView,
    now: float,
) -> Observed:
    """Update the job's memory by these pods, and return all that a plan needs. Its times are those of `JobMemory`."""
    seen = memory.pods.update((pod for _, pod in listed), now)
    warned = await _with_start_warnings(api, job.namespace, seen, memory.start_warnings, now)
    pods = await _with_stop_causes(api, job.namespace, warned, memory.stop_causes)
    workers = tuple(pod for (role, _), pod in zip(listed, pods, strict=True) if role == Role.WORKER.value)
    stores = tuple(pod for (role, _), pod in zip(listed, pods, strict=True) if role == Role.STORE.value)
    children = with_secret(children, job, pods)
    if memory.children is not None:
        memory.children = children
    newer = [pod for pod in stores if _is_newer(job, pod)]
    _note_times(memory, job, workers, stores, newer, standby_link, now)
    suspects = _suspected_nodes(job, workers, stores, link, now) | _suspected_standby_nodes(newer, standby_link, now)
    suspected = dict.fromkeys(suspects, LEASE_MAX_AGE)
    leases = await node_leases.read(api, memory.lost_nodes.max_ages(job.status.avoided, now) | suspected)
    memory.lost_nodes.record(leases, now)
    return Observed(
        job=job,
        workers=workers,
        stores=stores,
        children=children,
        policies=memory.policies or Policies(known=False),
        refusals=dict(memory.refusals),
        withheld=memory.withheld,
        terminating_since=memory.terminating_since,
        link=link,
        standby_link=standby_link,
        standby_store_at=memory.standby_store_at or 0.0,
        store_named_at=memory.serving_store[1],
        older_store_at=memory.older_store_at or 0.0,
        # A Lease may have been renewed since the last read: its age counts until then.
        leases={node: now - (lease.read_at - lease.since) for node, lease in leases.items()},
        returned_nodes=memory.lost_nodes.returned(),
        lease_reads=memory.lost_nodes.next_reads(),
        start_warning_reads=memory.start_warnings.next_reads(),
        end_seen=memory.end_seen,
        outcome_seen=memory.outcome_seen,
        start_failure_seen=memory.failed_starts[1],
        back_off_seen=memory.back_off[1],
    )


def _note_times(
    memory: JobMemory,
    job: Job,
    workers: Sequence[Pod],
    stores: Sequence[Pod],
    newer: Sequence[Pod],
    standby_link: LinkView,
    now: float,
) -> None:
    """Note since when the job is as it is now. `newer`: those of the stores that are to succeed the one that serves."""
    memory.end_seen = (memory.end_seen or now) if any(pod.declares_outcome for pod in workers) else None
    memory.outcome_seen = (memory.outcome_seen or now) if job.status.outcome_declared else None
    if memory.older_store_at is None or any(_has_successor(job, pod) for pod in stores):
        memory.older_store_at = now
    if newer:
        memory.standby_store_at = 0.0 if all(has_retired(pod, standby_link) for pod in newer) else now
    elif memory.standby_store_at is None:
        memory.standby_store_at = now
    if job.status.store_incarnation != memory.serving_store[0]:
        memory.serving_store = (job.status.store_incarnation, now)
    if job.status.failed_starts != memory.failed_starts[0]:
        memory.failed_starts = (job.status.failed_starts, now)
    if job.status.back_off != memory.back_off[0]:
        memory.back_off = (job.status.back_off, now)


async def _with_start_warnings(
    api: KubeApi, namespace: str, pods: tuple[Pod, ...], warnings: StartWarnings, now: float
) -> tuple[Pod, ...]:
    warnings.take(pods, now)
    if any(now >= at for at in warnings.next_reads()):
        events, pages = list[Raw](), 0
        with suppress(KubeError, TimeoutError):  # only a message depends on it
            async with asyncio.timeout(START_WARNING_SECONDS):
                async for page in api.pages(EVENTS, namespace, fields=FIELDS):
                    events += warnings.relevant(page.items)
                    pages += 1
                    if pages == MAX_EVENT_PAGES:
                        break
        warnings.record(events, now)
    return warnings.applied(pods)


async def _with_stop_causes(api: KubeApi, namespace: str, pods: tuple[Pod, ...], causes: StopCauses) -> tuple[Pod, ...]:
    found: dict[str, list[dict[str, Any]]] = {}

    async def read(pod: Pod) -> None:
        with suppress(KubeError):  # the failure is charged in any case: only its reason depends on it
            found[pod.uid] = await api.list(EVENTS, namespace, fields=fields_of(pod))

    if ended := causes.to_read(pods):
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_CAUSE_SECONDS):
                await asyncio.gather(*map(read, ended))
        for pod in ended:
            causes.record(pod, found.get(pod.uid, ()))
    return causes.applied(pods)


async def _queue_view(api: KubeApi, job: Job, memory: JobMemory, *, queued: bool, stepped: bool) -> QueueView:
    """Read the Workloads of a job that has a queue, or had one. Its memory keeps what the operator may not read."""
    if not (job.queue or queued):
        memory.workload, memory.steps = None, {}
        return QueueView()
    try:
        if job.step_priority or stepped or memory.steps:
            found = await list_workloads(api, job.namespace, job.uid)
        else:
            named = [find_workload(api, job.namespace, name) for name in workload_names(job)]
            found = [raw for raw in await asyncio.gather(*named) if raw is not None]
    except Refused:
        return QueueView(unreadable=True)
    own = {text(raw, "metadata", "name"): raw for raw in found if is_owned(raw, job.uid)}
    view = queue_view(parse_or_skip(parse_workload, "Workload", raw, None)[0] for raw in own.values())
    if view.malformed:
        return view  # its memory keeps what was read last
    memory.workload = own[view.workload.name] if view.workload is not None else None
    memory.steps = {step.name: own[step.name] for step in view.steps.values()}
    return view


async def _pods(api: KubeApi, job: Job, see_pod: Callable[[Raw], None]) -> list[tuple[str, Pod]]:
    """Return the pods that the job owns, each with its role. Other pods may bear copied labels: check the owner."""
    listed = await api.list(PODS, job.namespace, f"{Label.JOB_UID}={job.uid}")
    found = []
    for raw in listed:
        see_pod(raw)
        if is_owned(raw, job.uid):
            pod, _ = parse_or_skip(parse_pod, "pod", raw, None, minimal_pod)
            found += [(text(raw, "metadata", "labels", Label.ROLE), pod)] if pod is not None else []
    return _sorted(found)


def _sorted(pods: Iterable[tuple[str, Pod]]) -> list[tuple[str, Pod]]:
    return sorted(pods, key=lambda found: (found[1].index, found[1].incarnation))


def _has_successor(job: Job, store: Pod) -> bool:
    """Return whether a store pod is live although a later incarnation of the store exists."""
    return store.end is None and store.incarnation < (job.status.store_incarnation or 0)


def _is_newer(job: Job, store: Pod) -> bool:
    """Return whether a store pod is live that is newer than the store in status: a standby store, retired or not."""
    current = job.status.store_incarnation
    return store.end is None and current is not None and store.incarnation > current


def _suspected_nodes(
    job: Job, workers: tuple[Pod, ...], stores: tuple[Pod, ...], link: LinkView, now: float
) -> frozenset[str]:
    """Return nodes that may be lost: overdue with a deletion, or with a silent agent or store."""
    suspected = {p.node for p in (*workers, *stores) if p.deleting is not None and p.deleting < now}
    # A new operator does not know how old a Lease is: it begins to count at once.
    silent = {p.node for p in workers + stores if job.status.rounds or now >= p.seen + STARTING_SECONDS}
    if link.connected and link.report is not None:
        connected = {agent.pod for agent in link.report.nodes}
        suspected |= silent & {p.node for p in workers if p.running and p.name not in connected}
    elif now - link.since >= SUSPECT_SECONDS:
        suspected |= silent & {p.node for p in stores}
    return frozenset(suspected - {""})


def _suspected_standby_nodes(newer: list[Pod], standby_link: LinkView, now: float) -> frozenset[str]:
    """Return the nodes of newer stores that do not respond. The operator counts from its first read of a Lease."""
    if standby_link.connected or now - standby_link.since < SUSPECT_SECONDS:
        return frozenset()
    return frozenset(p.node for p in newer if p.node)

"""What the page shows, as JSON. It is what `status`, `why`, `top` and `stacks` show, with a time line."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from elasticjob._runtime.contract.names import KIND
from elasticjob.cli.cluster.connection import Cluster
from elasticjob.cli.cluster.errors import ClusterError, RefusedError
from elasticjob.cli.cluster.resources import (
    ELASTICJOBS,
    EVENT_LIST,
    NODE_LIST,
    POD_LIST,
    POD_METRICS,
    QUEUED_WORKLOADS,
    QUOTA_LIST,
    ApiResource,
    KubeObject,
    KubeObjects,
)
from elasticjob.cli.objects.jobs import has_finished, is_true, job_status
from elasticjob.cli.objects.pods import in_order, is_active, pod_name, pods_selector
from elasticjob.cli.ui.progress_samples import ProgressSamples
from elasticjob.cli.ui.recent import BusyError, RecentValues
from elasticjob.cli.ui.timeline import Rounds, formed_rounds, job_timeline
from elasticjob.cli.verbs.events import event_views
from elasticjob.cli.verbs.stacks.stacks import ask_workers, stack_groups
from elasticjob.cli.verbs.status import Ranks, job_overview, job_summary, ranks_by_pod
from elasticjob.cli.verbs.top import usage_view
from elasticjob.cli.verbs.why.causes import likely_causes
from elasticjob.cli.verbs.why.circumstances import Circumstances
from elasticjob.cli.views.output import without_empty

__all__ = ["BusyError", "JobFeed"]

SOON = 1.0
"""Seconds that a job and its pods are kept; a page asks every 2 s."""
LATER = 15.0
"""Seconds that what changes rarely is kept: Nodes, quotas, usage, Events of pods."""
RANKS_SECONDS = 60.0
"""Seconds that the ranks of a round are kept; a log may not have told them yet."""
SHOWN_EVENTS = 100
EVENTS_OF_JOB = f"involvedObject.kind={KIND},involvedObject.name={{name}}"


class JobFeed:
    """Reads one namespace, or all. `clock`: Unix time.

    Methods may be called in several threads. They raise ClusterErrors.
    """

    def __init__(
        self, cluster: Cluster, *, all_namespaces: bool, clock: Callable[[], float] = time.time,
        recent: RecentValues | None = None,
    ) -> None:  # fmt: skip
        self._cluster = cluster
        self._all_namespaces = all_namespaces
        self._clock = clock
        self._recent = recent or RecentValues()
        self._lock = threading.Lock()
        self._samples: dict[str, ProgressSamples] = {}
        """What jobs have reported, by the uid of a job."""
        self._rounds: dict[str, Rounds] = {}

    def jobs(self) -> dict[str, Any]:
        """Return all jobs as rows of a table."""
        jobs = self._recent.get("jobs", SOON, self._list_jobs)
        return {
            "now": self._clock(),
            "server": self._cluster.server,
            "namespace": None if self._all_namespaces else self._cluster.namespace,
            "jobs": [job_summary(job) for job in jobs],
        }

    def job(self, namespace: str, name: str) -> dict[str, Any]:
        """Return one job. What may not be read is left out; `notRead` has why, by resource."""
        return self._recent.get(("view", namespace, name), SOON, lambda: self._job(self._of(namespace), name))

    def stacks(self, namespace: str, name: str) -> dict[str, Any]:
        """Return where the workers of a job are now: those at the same place once. It interrupts them for a moment."""
        cluster = self._of(namespace)

        def read() -> dict[str, Any]:
            views, problems = ask_workers(cluster, name, ())
            groups = [{"workers": workers, "stack": text} for workers, text in stack_groups(views, all_threads=False)]
            return {"now": self._clock(), "groups": groups, "problems": [str(problem) for problem in problems]}

        return self._recent.get(("stacks", namespace, name), SOON, read)

    def _of(self, namespace: str) -> Cluster:
        if not self._all_namespaces and namespace != self._cluster.namespace:
            raise RefusedError(404, f"this page shows namespace {self._cluster.namespace}")
        return self._cluster.in_namespace(namespace)

    def _list_jobs(self) -> KubeObjects:
        jobs = self._cluster.list(ELASTICJOBS, all_namespaces=self._all_namespaces)
        present = {job["metadata"]["uid"] for job in jobs}
        with self._lock:
            for kept in (self._samples, self._rounds):
                for uid in kept.keys() - present:
                    del kept[uid]
        for job in jobs:
            self._remember(job, [])
        return jobs

    def _remember(self, job: KubeObject, events: list[dict[str, Any]]) -> tuple[list[Any], Rounds]:
        """Note what the status will forget, and return what is known: (samples, rounds)."""
        uid = job["metadata"]["uid"]
        with self._lock:
            samples = self._samples.setdefault(uid, ProgressSamples())
            samples.add(job_status(job).get("trainerStatus") or {}, self._clock())
            self._rounds[uid] = formed_rounds(job, events, self._rounds.get(uid, {}))
            return list(samples.samples), self._rounds[uid]

    def _job(self, cluster: Cluster, name: str) -> dict[str, Any]:
        job, now = cluster.get(ELASTICJOBS, name), self._clock()
        not_read: dict[str, str] = {}

        def read(resource: ApiResource, selector: str = "", fields: str = "", seconds: float = SOON) -> KubeObjects:
            key = (resource, cluster.namespace if resource.namespaced else "", selector, fields)
            try:
                return self._recent.get(key, seconds, lambda: _list(cluster, resource, selector, fields))
            except ClusterError as error:
                not_read[f"{resource.plural}.{resource.group}".rstrip(".")] = str(error)
                return []

        pods = read(POD_LIST, pods_selector(name))
        # A namespace may have many Events: those of the job are read often, those of its pods rarely.
        own = [e for e in read(EVENT_LIST, fields=EVENTS_OF_JOB.format(name=name)) if _is_of_job(e)]
        events = [*own, *(e for e in read(EVENT_LIST, seconds=LATER) if not _is_of_job(e))]
        rounds_told = event_views(own, name)
        samples, rounds = self._remember(job, rounds_told)
        ranks = self._ranks(cluster, job, pods)
        overview = job_overview(job, pods, events, ranks)
        active = [pod for pod in in_order(pods) if is_active(pod)]
        metrics = read(POD_METRICS, pods_selector(name), seconds=LATER) if active else []
        usage = usage_view(job, active, metrics, ranks)
        # Only what keeps pods away is explained by Nodes and quotas, of which a cluster may have many.
        whole = has_finished(job) or (is_true(job, "Running") and is_true(job, "FullyScaled"))
        queued = bool(job["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name"))
        seen = Circumstances(
            job, now, pods, events, [] if whole else read(NODE_LIST, seconds=LATER),
            [] if whole else read(QUOTA_LIST, seconds=LATER), read(QUEUED_WORKLOADS) if queued else [],
        )  # fmt: skip
        return {
            "now": now,
            "job": overview,
            "causes": likely_causes(seen),
            "timeline": job_timeline(job, overview.get("pods", ()), rounds_told, rounds, now),
            "samples": samples,
            "usage": {pod["name"]: pod for pod in usage["pods"]},
            "events": event_views(events, name)[-SHOWN_EVENTS:],
            **without_empty({"notRead": not_read, "finished": has_finished(job)}),
        }

    def _ranks(self, cluster: Cluster, job: KubeObject, pods: KubeObjects) -> Ranks:
        """Return the ranks of pods. Logs are read again only once a round or a pod is another one."""
        if has_finished(job):
            return {}
        round_ = job_status(job).get("rendezvousRound")
        key = ("ranks", job["metadata"]["uid"], round_, tuple(sorted(map(pod_name, pods))))
        return self._recent.get(key, RANKS_SECONDS, lambda: ranks_by_pod(cluster, pods))


def _list(cluster: Cluster, resource: ApiResource, selector: str, fields: str) -> KubeObjects:
    """Return the objects; none of an addition to Kubernetes that the cluster does not have."""
    try:
        return cluster.list(resource, selector, fields)
    except RefusedError as error:
        if resource in (POD_METRICS, QUEUED_WORKLOADS) and error.status in (404, 503):
            return []
        raise


def _is_of_job(event: KubeObject) -> bool:
    return bool((event.get("involvedObject") or {}).get("kind") == KIND)

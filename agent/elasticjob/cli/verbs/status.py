"""`elasticjob status`: one job on one screen, or all jobs as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from elasticjob._runtime.contract.names import KIND, Label
from elasticjob._runtime.contract.shipped_code import CODE_SHA256
from elasticjob.cli.cluster.connection import Cluster
from elasticjob.cli.cluster.errors import ClusterError
from elasticjob.cli.cluster.resources import ELASTICJOBS, EVENT_LIST, POD_LIST, KubeObject
from elasticjob.cli.objects.jobs import has_finished, job_status, size_bounds, wanted_replicas
from elasticjob.cli.objects.pods import (
    has_log,
    in_order,
    is_active,
    is_store,
    main_container,
    main_status,
    pod_name,
    pod_number,
    pod_state,
    pods_selector,
    ranks_in_log,
)
from elasticjob.cli.verbs.events import event_views
from elasticjob.cli.views.job_table import job_table
from elasticjob.cli.views.job_text import job_lines
from elasticjob.cli.views.output import VerbOutput, without_empty

Ranks = Mapping[str, tuple[int, int]]
"""First and last rank of a pod, by its name."""
ROUND_EVENTS = frozenset(
    {
        "WorldFormed", "RestartedInPlace", "WorkerFailed", "HangDetected", "PodReplaced", "StoreLost", "NodeLost",
        "DeviceUnhealthy", "ScalingUp", "ScalingDown", "Scaled", "Suspended", "Resumed", "Completed",
    }
)  # fmt: skip
"""Reasons of the Events that tell a job's rounds."""
LINES = 40
"""Last lines of a pod's log in which its ranks are looked for."""
MOST_LOGS = 64
"""Pods whose ranks are looked for: more would take longer than a person waits."""
SHOWN_ROUNDS = 10


def show_jobs(cluster: Cluster, output: VerbOutput, now: float, *, all_namespaces: bool) -> int:
    """Show a table of jobs; return the exit code."""
    jobs = cluster.list(ELASTICJOBS, all_namespaces=all_namespaces)
    view = [job_summary(job) for job in jobs]
    where = "in any namespace" if all_namespaces else f"in namespace {cluster.namespace}"
    nothing = [f"no ElasticJobs {where}"]
    output.show(view, lambda painter: job_table(view, painter, now, all_namespaces=all_namespaces) if view else nothing)
    return 0


def show_status(cluster: Cluster, output: VerbOutput, name: str, now: float) -> int:
    """Show one job; return the exit code. Only the job itself must be readable."""
    job = cluster.get(ELASTICJOBS, name)
    notes: list[str] = []
    pods = _readable(notes, lambda: cluster.list(POD_LIST, pods_selector(name)))
    events = _readable(notes, lambda: cluster.list(EVENT_LIST))
    ranks = {} if has_finished(job) else ranks_by_pod(cluster, pods)
    view = job_overview(job, pods, events, ranks)
    output.show(view, lambda painter: job_lines(view, painter, now))
    for note in notes:
        output.note(note)
    return 0


def _readable(notes: list[str], read: Any) -> list[KubeObject]:
    """Return the objects, or none and a note if they may not be read."""
    try:
        found: list[KubeObject] = read()
    except ClusterError as error:
        notes.append(f"not shown: {error}")
        return []
    return found


def ranks_by_pod(cluster: Cluster, pods: Sequence[KubeObject]) -> Ranks:
    """Return the ranks that the newest log lines of running worker pods name; a log that cannot be read has none."""
    running = [pod for pod in pods if is_active(pod) and not is_store(pod) and has_log(pod)][:MOST_LOGS]

    def read(pod: KubeObject) -> tuple[int, int] | None:
        try:
            lines = cluster.log_lines(pod_name(pod), main_container(pod), tail=LINES)
            return ranks_in_log([line for _, line in lines], pod)
        except ClusterError:
            return None

    with ThreadPoolExecutor(8) as pool:
        found = zip(running, pool.map(read, running), strict=True)
        return {pod_name(pod): ranks for pod, ranks in found if ranks is not None}


def job_summary(job: KubeObject) -> dict[str, Any]:
    """Return a job as a row of the table. Pure."""
    status, meta = job_status(job), job["metadata"]
    return without_empty(
        {
            "name": meta["name"],
            "namespace": meta.get("namespace", ""),
            "phase": "Deleting" if meta.get("deletionTimestamp") else status.get("phase", ""),
            "training": status.get("active", 0),
            "wanted": wanted_replicas(job),
            "worldSize": status.get("worldSize", 0),
            "restarts": status.get("restarts", 0),
            "progressPercentage": (status.get("trainerStatus") or {}).get("progressPercentage"),
            "goodputPercent": (status.get("goodput") or {}).get("percent"),
            "created": meta.get("creationTimestamp"),
        }
    )


def job_overview(
    job: KubeObject, pods: Sequence[KubeObject], events: Sequence[KubeObject], ranks: Ranks
) -> dict[str, Any]:
    """Return one job as `status` shows it. Pure."""
    status, meta = job_status(job), job["metadata"]
    low, high = size_bounds(job)
    policy = job.get("spec", {}).get("failurePolicy") or {}
    own = [e for e in events if (e.get("involvedObject") or {}).get("kind") == KIND]
    rounds = [e for e in event_views(own, meta["name"]) if e.get("reason") in ROUND_EVENTS]
    return {
        **job_summary(job),
        **without_empty(
            {
                "target": status.get("targetReplicas"),
                "minReplicas": low,
                "maxReplicas": high,
                "ready": status.get("ready", 0),
                "standby": status.get("standby", 0),
                "rounds": status.get("rendezvousRound", 0),
                "execution": status.get("executionAttempts"),
                "lastRound": status.get("lastRendezvousTime"),
                "restartsCounted": status.get("restartsCountTowardsMax", 0),
                "maxRestarts": policy.get("maxRestarts", 3),
                "startTime": status.get("startTime"),
                "completionTime": status.get("completionTime"),
                "codeSha256": (meta.get("annotations") or {}).get(CODE_SHA256),
                "progress": status.get("trainerStatus"),
                "stage": status.get("stage"),
                "goodput": status.get("goodput"),
                "straggler": status.get("straggler"),
                "stateTransfer": status.get("stateTransfer"),
                "warmFork": status.get("warmFork"),
                "avoidedNodes": status.get("avoidedNodes"),
                "conditions": status.get("conditions"),
                "pods": [pod_view(pod, ranks) for pod in in_order(pods)],
                "history": rounds[-SHOWN_ROUNDS:],
                "failures": status.get("recentFailures"),
            }
        ),
    }


def pod_view(pod: KubeObject, ranks: Ranks) -> dict[str, Any]:
    """Return a pod as a row of the table. Pure."""
    state, message = pod_state(pod)
    found = ranks.get(pod_name(pod))
    return without_empty(
        {
            "name": pod_name(pod),
            "role": pod["metadata"].get("labels", {}).get(Label.ROLE, ""),
            "index": None if is_store(pod) else pod_number(pod, Label.INDEX),
            "ranks": None if found is None else list(range(found[0], found[1] + 1)),
            "node": pod.get("spec", {}).get("nodeName"),
            "state": state,
            "message": message,
            "restarts": main_status(pod).get("restartCount") or None,
            "created": pod["metadata"].get("creationTimestamp"),
        }
    )

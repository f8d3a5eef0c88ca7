"""Prometheus metrics of the operator. Job names are not labels, because their number is unbounded."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from elasticjob._runtime.contract.messages import FailureClass
from elasticjob_operator.version import VERSION

NAMESPACE = "namespace"
"""Label of all metrics about jobs. It is empty unless the operator's `label_namespaces` is set, and for Prometheus an
empty label is none: the number of series is then independent of the number of namespaces."""
MINUTES = (60, 180, 600, 1200, 1800, 3600)
"""Buckets of what can wait for nodes or images, in seconds."""

build_info = Gauge("elasticjob_build_info", "Always 1; the label has the version.", ["version"])
build_info.labels(VERSION).set(1)
leader = Gauge("elasticjob_leader", "1 while this operator holds the Lease, else 0.")
jobs = Gauge("elasticjob_jobs", "Jobs by phase.", ["phase", NAMESPACE])
restarts = Counter("elasticjob_restarts", "Restarts of a job's workers.", ["reason", "strategy", NAMESPACE])
pod_failures = Counter("elasticjob_pod_failures", "Failures recorded in status, charged or not.", ["class", NAMESPACE])
training_seconds = Counter(
    "elasticjob_training_seconds",
    "Sum over jobs of the seconds since their first round, without suspensions.",
    [NAMESPACE],
)
lost_seconds = Counter("elasticjob_lost_seconds", "Those of them that faults have cost.", [NAMESPACE])
rendezvous_seconds = Histogram(
    "elasticjob_rendezvous_seconds",
    "Seconds from a job's start to its first round.",
    [NAMESPACE],
    buckets=(1, 3, 10, 30, *MINUTES),
)
recovery_seconds = Histogram(
    "elasticjob_recovery_seconds",
    "Seconds from a failure to the next round.",
    ["phase", NAMESPACE],
    buckets=(0.1, 0.3, 1, 3, 10, 30, *MINUTES),
)
scale_seconds = Histogram(
    "elasticjob_scale_seconds",
    "Seconds from a change of size until all pods train.",
    ["direction", NAMESPACE],
    buckets=(0.3, 1, 3, 10, 30, *MINUTES),
)
reconcile_seconds = Histogram(
    "elasticjob_reconcile_seconds",
    "Seconds of one reconcile of one job.",
    buckets=(0.005, 0.01, 0.03, 0.1, 0.3, 1, 3, 10),
)
reconcile_errors = Counter("elasticjob_reconcile_errors", "Reconciles that raised an error.")
api_requests = Counter("elasticjob_api_requests", "Requests to the API server.", ["verb", "resource", "code"])
job_defaults_refused = Gauge(
    "elasticjob_job_defaults_refused", "Sections of the platform's defaults for jobs that have a mistake."
)
queue_depth = Gauge("elasticjob_queue_depth", "Jobs whose next reconcile is due, and that wait for it.")
queue_wait = Gauge(
    "elasticjob_queue_wait_seconds",
    "Seconds by which the most overdue reconcile is late; the operator's own queue, not Kueue's.",
)
api_silence = Gauge("elasticjob_api_silence_seconds", "Seconds since the last successful response of the API server.")
watch_age = Gauge(
    "elasticjob_watch_age_seconds",
    "Seconds since the API server last answered the watch on a resource; of several namespaces, the longest.",
    ["resource"],
)
failing_watches = Gauge(
    "elasticjob_failing_watches", "Watches on a resource, one a namespace, that fail and are retried.", ["resource"]
)


def _create_series() -> None:
    """Create the series of faults with the value 0.

    Prometheus sees no increase where a series begins, so the first fault since an operator's start would be in no rate.
    With namespaces as labels a namespace's first fault still is in none: they are not known before.
    """
    for failure in FailureClass:
        pod_failures.labels(failure.value, "")
        restarts.labels(failure.value, "InPlace", "")
    for phase in ("detect", "stop", "rendezvous", "start", "total"):
        recovery_seconds.labels(phase, "")
    for direction in ("up", "down"):
        scale_seconds.labels(direction, "")
    for metric in (training_seconds, lost_seconds, rendezvous_seconds):
        metric.labels("")


_create_series()

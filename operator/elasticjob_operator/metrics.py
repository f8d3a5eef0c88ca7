"""Prometheus metrics of the operator. Job names are no labels: their number is unbounded."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from http.server import ThreadingHTTPServer
from typing import Any

from prometheus_client import Counter, Gauge, Histogram, MetricsHandler

from elasticjob.listening_socket import listen_on_all_addresses
from elasticjob_operator.model.raw import integer, mapping, moment, objects, text

jobs = Gauge("elasticjob_jobs", "Jobs by phase.", ["phase"])
restarts = Counter("elasticjob_restarts", "Restarts of a job's workers.", ["reason", "strategy"])
pod_failures = Counter("elasticjob_pod_failures", "Failures recorded in status, charged or not.", ["class"])
rendezvous_seconds = Histogram("elasticjob_rendezvous_seconds", "Seconds from a job's start to its first round.")
recovery_seconds = Histogram(
    "elasticjob_recovery_seconds",
    "Seconds from a failure to the next round.",
    ["phase"],
    buckets=(0.1, 0.3, 1, 3, 10, 30, 100),
)
scale_seconds = Histogram(
    "elasticjob_scale_seconds", "Seconds from a change of size until all nodes train.", ["direction"]
)
reconcile_seconds = Histogram(
    "elasticjob_reconcile_seconds",
    "Seconds of one reconcile of one job.",
    buckets=(0.005, 0.01, 0.03, 0.1, 0.3, 1, 3, 10),
)
reconcile_errors = Counter("elasticjob_reconcile_errors", "Reconciles that raised an error.")
api_requests = Counter("elasticjob_api_requests", "Requests to the API server.", ["verb", "resource", "code"])
queue_depth = Gauge("elasticjob_queue_depth", "Jobs that wait to be reconciled.")
queue_wait = Gauge("elasticjob_queue_wait_seconds", "Seconds by which the longest waiting job is overdue.")
api_silence = Gauge("elasticjob_api_silence_seconds", "Seconds since the last successful response of the API server.")

Status = Mapping[str, Any]


def count_change(before: Status, after: Status, strategy: str) -> None:
    """Update the metrics by the difference between a job's status before and after a write. `strategy`: its
    `spec.restartStrategy`."""
    restarted = integer(after, "restarts") - integer(before, "restarts")
    last = mapping(after, "lastFailure")
    if restarted > 0:
        restarts.labels(text(last, "class") or "Unknown", strategy).inc(restarted)
    if last and last != mapping(before, "lastFailure"):
        pod_failures.labels(text(last, "class") or "Unknown").inc()
    _observe_first_round(before, after)
    for record in objects(after, "recentFailures"):
        if record not in objects(before, "recentFailures"):
            phases = mapping(record, "recoverySeconds")
            for phase, seconds in phases.items():
                recovery_seconds.labels(phase).observe(seconds)
            if phases:
                recovery_seconds.labels("total").observe(sum(phases.values()))
    _observe_scaling(before, after)


def _observe_first_round(before: Status, after: Status) -> None:
    # Both times are the operator's; lastRendezvousTime is the store's.
    started, running = moment(before, "startTime"), _true_since(after, "Running")
    if "lastRendezvousTime" not in before and started is not None and running is not None:
        rendezvous_seconds.observe(max(0.0, running - started))


def _observe_scaling(before: Status, after: Status) -> None:
    requested, done = moment(before, "lastScaleTime"), _true_since(after, "FullyScaled")
    if requested is None or done is None or _true_since(before, "FullyScaled") is not None or done < requested:
        return
    direction = "up" if integer(after, "active") > integer(before, "active") else "down"
    scale_seconds.labels(direction).observe(done - requested)


def _true_since(status: Status, kind: str) -> float | None:
    """Return since when a condition is True, in Unix seconds; None where it is not True."""
    found = (c for c in objects(status, "conditions") if text(c, "type") == kind and text(c, "status") == "True")
    return moment(next(found, {}), "lastTransitionTime")


_BACKLOG = 128
"""Connections that wait until the server accepts them."""


def serve_metrics(port: int) -> ThreadingHTTPServer:
    """Serve all metrics on `port` from threads, whatever the event loop does; `shutdown()` of the server ends that.

    prometheus_client's own server has one family of addresses, and looks up the name of this machine before it serves.
    OSError: the port is in use.
    """
    server = ThreadingHTTPServer(("", port), MetricsHandler, bind_and_activate=False)
    server.socket.close()
    server.socket = listen_on_all_addresses(port, backlog=_BACKLOG)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server

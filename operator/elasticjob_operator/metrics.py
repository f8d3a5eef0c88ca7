"""Prometheus metrics of the operator. Job names are no labels: their number is unbounded."""

from __future__ import annotations

import threading
from http.server import ThreadingHTTPServer

from prometheus_client import Counter, Gauge, Histogram, MetricsHandler

from elasticjob.listening_socket import listen_on_all_addresses

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

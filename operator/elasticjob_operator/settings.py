"""Settings of the operator: flags, each with an environment variable that the chart sets."""

from __future__ import annotations

import argparse
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elasticjob_operator.model.cluster.notices import (
    BUILT_IN_DRAINS,
    BUILT_IN_SECONDS,
    NoticeKeys,
    NoticeSource,
    built_in,
)
from elasticjob_operator.version import VERSION

DEFAULT_IMAGE = f"elasticjob:{VERSION}"
MAX_NOTICE_SECONDS = 86400


@dataclass(frozen=True)
class OperatorSettings:
    """The settings of one operator process."""

    image: str
    """Image of agents and stores of new jobs; a job keeps the image it started with."""
    namespace: str
    """Namespace of the operator, its Lease and its master key."""
    identity: str
    """Name of this process in the Lease."""
    pod_namespace: str = ""
    """Namespace of this operator's pod, which the NetworkPolicies of jobs admit; empty if it runs in no pod."""
    watch_namespaces: tuple[str, ...] = ()
    """Namespaces of the jobs; empty: all."""
    master_secret: str = "elasticjob-master-key"  # noqa: S105  # a name
    lease_name: str = "elasticjob-operator"
    leader_election: bool = True
    kueue: bool = False
    """Whether Workloads of Kueue are watched."""
    eviction_requests: bool = False
    """Whether the operator is the responder to Evictions of worker pods (Kubernetes 1.37, alpha)."""
    job_defaults: str = ""
    """Path of a YAML file with defaults for jobs; empty: there are none."""
    log_level: str = "INFO"
    log_format: str = "json"
    metrics_port: int = 8080
    """0: no metrics."""
    metrics_authentication: bool = False
    """Whether only users who may `get` the URL /metrics by the cluster's RBAC can read the metrics."""
    metrics_tls: str = ""
    """Folder with `tls.crt` and `tls.key`, by which the metrics are served; empty: without TLS."""
    label_namespaces: bool = False
    """Whether metrics about jobs have the label `namespace`."""
    health_port: int = 8081
    """0: no probes."""
    workers: int = 16
    """Jobs reconciled at the same time."""
    qps: float = 100.0
    """Requests to the API server per second."""
    burst: int = 200
    """Requests to the API server at once."""
    resync_seconds: float = 300.0
    """Longest time between two reconciles of a job."""
    notice_keys: NoticeKeys | None = None
    """By what a Node announces its end, or a drain; None: no warnings are read."""
    topology_labels: tuple[str, ...] = ()
    """Labels of Nodes that say where a Node is, from the widest place to the narrowest."""

    @property
    def watches_nodes(self) -> bool:
        return self.notice_keys is not None or bool(self.topology_labels)


def parse_settings(argv: Sequence[str] | None, environ: Mapping[str, str] = os.environ) -> OperatorSettings:
    """Read flags and environment variables; exit with a message that names an invalid flag."""
    parser = _parser(environ)
    options = parser.parse_args(argv)
    for name in ("qps", "burst", "workers", "resync_seconds"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be more than 0")
    return OperatorSettings(
        image=options.image,
        namespace=options.namespace,
        identity=f"{environ.get('POD_NAME') or 'local'}_{uuid.uuid4().hex[:8]}",
        # The chart sets the name of the pod, and a process outside the cluster has none.
        pod_namespace=options.namespace if environ.get("POD_NAME") else "",
        watch_namespaces=_parts(options.watch_namespaces),
        master_secret=options.master_secret,
        lease_name=options.lease_name,
        leader_election=not options.no_leader_election,
        kueue=options.kueue,
        eviction_requests=options.eviction_requests,
        job_defaults=options.job_defaults,
        log_level=options.log_level.upper(),
        log_format=options.log_format,
        metrics_port=options.metrics_port,
        metrics_authentication=options.metrics_authentication,
        metrics_tls=options.metrics_tls,
        label_namespaces=options.metrics_namespace_label,
        health_port=options.health_port,
        workers=options.workers,
        qps=options.qps,
        burst=options.burst,
        resync_seconds=options.resync_seconds,
        notice_keys=_notice_keys(options),
        topology_labels=_parts(options.topology_labels),
    )


def _notice_keys(options: argparse.Namespace) -> NoticeKeys | None:
    if options.node_warnings == "off":
        return None
    taints, annotations = frozenset(_parts(options.notice_taints)), frozenset(_parts(options.notice_annotations))
    conditions, labels = frozenset(_parts(options.notice_conditions)), frozenset(_parts(options.notice_labels))
    drains = frozenset(_parts(options.notice_drains))
    return NoticeKeys(taints, annotations, options.notice_seconds, conditions, labels, drains)


def _parts(listed: str) -> tuple[str, ...]:
    return tuple(filter(None, listed.replace(" ", "").split(",")))


def _seconds_by_key(listed: str) -> dict[str, float]:
    """Return `KEY=SECONDS,...` as a mapping. ArgumentTypeError: a part is something else."""
    found = {}
    for part in _parts(listed):
        key, _, seconds = part.partition("=")
        if not (key and seconds.isascii() and seconds.isdigit() and 0 < int(seconds) <= MAX_NOTICE_SECONDS):
            raise argparse.ArgumentTypeError(f"{part!r} is not KEY=SECONDS, with 1 to {MAX_NOTICE_SECONDS} seconds")
        found[key] = float(seconds)
    return found


def _parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="elasticjob-operator",
        description="Reconciles ElasticJobs. Each flag can also be set by the variable named next to it.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {VERSION}")

    def add(flag: str, variable: str, default: object, text: str, **more: object) -> None:
        value = environ.get(variable) or default
        parser.add_argument(flag, default=value, help=f"{text} [${variable}]", **more)  # type: ignore[arg-type]

    add("--image", "ELASTICJOB_OPERATOR_IMAGE", DEFAULT_IMAGE, "image of agents and stores")
    add("--namespace", "POD_NAMESPACE", "elasticjob-system", "the operator's own namespace")
    add("--watch-namespaces", "WATCH_NAMESPACES", "", "namespaces of the jobs, comma-separated; empty: all")
    add(
        "--master-secret",
        "ELASTICJOB_MASTER_SECRET",
        OperatorSettings.master_secret,
        "Secret that holds the master key; created if missing",
    )
    add("--lease-name", "ELASTICJOB_LEASE_NAME", OperatorSettings.lease_name, "Lease for leader election")
    parser.add_argument(
        "--no-leader-election", action="store_true", help="run without a Lease; only for a single operator"
    )
    parser.add_argument(
        "--kueue",
        action="store_true",
        default=environ.get("ELASTICJOB_KUEUE") == "true",
        help="watch Workloads of Kueue, for jobs with a queue [$ELASTICJOB_KUEUE=true]",
    )
    parser.add_argument(
        "--eviction-requests",
        action="store_true",
        default=environ.get("EVICTION_REQUESTS") == "true",
        help="answer Evictions of lifecycle.k8s.io, an alpha API of Kubernetes 1.37 [$EVICTION_REQUESTS=true]",
    )
    add(
        "--job-defaults", "ELASTICJOB_JOB_DEFAULTS", "", "YAML file with defaults for what jobs leave open; empty: none"
    )
    levels = ["DEBUG", "INFO", "WARNING", "ERROR"]
    add("--log-level", "LOG_LEVEL", "INFO", "lowest level that is logged", type=str.upper, choices=levels)
    add("--log-format", "LOG_FORMAT", "json", "format of log lines", choices=["json", "text"])
    add("--metrics-port", "METRICS_PORT", 8080, "port of Prometheus metrics; 0: off", type=int)
    parser.add_argument(
        "--metrics-authentication",
        action="store_true",
        default=environ.get("METRICS_AUTHENTICATION") == "true",
        help="only for bearer tokens of users who may get the URL /metrics [$METRICS_AUTHENTICATION=true]",
    )
    add("--metrics-tls", "METRICS_TLS", "", "folder with tls.crt and tls.key for the metrics; empty: without TLS")
    parser.add_argument(
        "--metrics-namespace-label",
        action="store_true",
        default=environ.get("METRICS_NAMESPACE_LABEL") == "true",
        help="label metrics about jobs with their namespace [$METRICS_NAMESPACE_LABEL=true]",
    )
    add("--health-port", "HEALTH_PORT", 8081, "port of /healthz and /readyz; 0: off", type=int)
    add("--workers", "ELASTICJOB_WORKERS", 16, "jobs reconciled at the same time", type=int)
    add("--qps", "ELASTICJOB_QPS", 100.0, "requests to the API server per second", type=float)
    add("--burst", "ELASTICJOB_BURST", 200, "requests to the API server at once", type=int)
    add(
        "--resync-seconds",
        "ELASTICJOB_RESYNC_SECONDS",
        300.0,
        "all jobs and pods are listed again, and each job is reconciled, at least this often",
        type=float,
    )
    add("--topology-labels", "TOPOLOGY_LABELS", "", "labels of Nodes, from the widest place to the narrowest")
    add("--node-warnings", "NODE_WARNINGS", "on", "watch Nodes for cordons and notices", choices=["on", "off"])
    rows = {source: ",".join(built_in(source)) for source in NoticeSource}
    about = "of Nodes that end or are to be drained, comma-separated"
    add("--notice-taints", "NOTICE_TAINTS", rows[NoticeSource.TAINT], f"keys of taints {about}")
    seconds = "KEY=SECONDS of taints, comma-separated: how long a Node with the taint still runs"
    promised = ",".join(f"{key}={value}" for key, value in BUILT_IN_SECONDS.items())
    add("--notice-seconds", "NOTICE_SECONDS", promised, seconds, type=_seconds_by_key)
    add("--notice-annotations", "NOTICE_ANNOTATIONS", rows[NoticeSource.ANNOTATION], f"keys of annotations {about}")
    add("--notice-conditions", "NOTICE_CONDITIONS", rows[NoticeSource.CONDITION], f"TYPE=STATUS of conditions {about}")
    add("--notice-labels", "NOTICE_LABELS", rows[NoticeSource.LABEL], f"KEY or KEY=VALUE of labels {about}")
    drains = "the keys among these that announce no certain end: pods leave as far as minReplicas allows"
    add("--notice-drains", "NOTICE_DRAINS", ",".join(BUILT_IN_DRAINS), drains)
    return parser

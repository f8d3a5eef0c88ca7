"""`elasticjob top`: what the pods of a job use, and how fast it trains."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from elasticjob.cli.cluster.connection import Cluster
from elasticjob.cli.cluster.errors import ClusterError, RefusedError
from elasticjob.cli.cluster.resources import ELASTICJOBS, POD_LIST, POD_METRICS, KubeObject
from elasticjob.cli.objects.jobs import job_status
from elasticjob.cli.objects.pods import in_order, is_active, is_store, main_container, pod_name, pods_selector
from elasticjob.cli.verbs.status import Ranks, ranks_by_pod
from elasticjob.cli.views.output import VerbOutput, without_empty
from elasticjob.cli.views.style import Painter
from elasticjob.cli.views.table import text_table

_QUANTITY = re.compile(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)([a-zA-Z]*)")
_UNITS = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
          "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}  # fmt: skip
_NEAR_LIMIT = 0.9
"""Share of the memory limit above which the kernel may soon kill a worker."""


def show_usage(cluster: Cluster, output: VerbOutput, name: str) -> int:
    """Show a row for each pod; return the exit code. Without metrics-server there are requests and limits only."""
    job = cluster.get(ELASTICJOBS, name)
    pods = [pod for pod in in_order(cluster.list(POD_LIST, pods_selector(name))) if is_active(pod)]
    try:
        metrics = cluster.list(POD_METRICS, pods_selector(name))
    except ClusterError as error:
        metrics = []
        missing = isinstance(error, RefusedError) and error.status in (404, 503)
        why = "the cluster has no metrics-server" if missing else str(error)
        output.note(f"no usage of CPU and memory: {why}")
    view = usage_view(job, pods, metrics, ranks_by_pod(cluster, pods))
    output.show(view, lambda painter: _lines(view, painter))
    return 0


def usage_view(
    job: KubeObject, pods: Sequence[KubeObject], metrics: Sequence[KubeObject], ranks: Ranks
) -> dict[str, Any]:
    """Return the usage of each pod, and what the status has about speed. Pure."""
    used = {pod_name(item): item for item in metrics}
    status = job_status(job)
    return {
        "pods": [_pod_usage(pod, used.get(pod_name(pod)), ranks) for pod in pods],
        **without_empty(
            {
                "progress": status.get("trainerStatus"),
                "goodputPercent": (status.get("goodput") or {}).get("percent"),
                "straggler": status.get("straggler"),
            }
        ),
    }


def _pod_usage(pod: KubeObject, metrics: KubeObject | None, ranks: Ranks) -> dict[str, Any]:
    container: dict[str, Any] = next((c for c in pod["spec"]["containers"] if c["name"] == main_container(pod)), {})
    resources = container.get("resources") or {}
    limits = resources.get("limits") or {}
    devices = {k: v for k, v in limits.items() if "/" in k}
    usage = [c.get("usage") or {} for c in (metrics or {}).get("containers") or []]
    found = ranks.get(pod_name(pod))
    return without_empty(
        {
            "name": pod_name(pod),
            "ranks": None if found is None else list(range(found[0], found[1] + 1)),
            "role": "store" if is_store(pod) else "worker",
            "node": pod["spec"].get("nodeName"),
            "cpuCores": sum(quantity_value(u.get("cpu", "0")) for u in usage) if usage else None,
            "memoryBytes": int(sum(quantity_value(u.get("memory", "0")) for u in usage)) if usage else None,
            "memoryLimitBytes": int(quantity_value(limits["memory"])) if "memory" in limits else None,
            "devices": devices,
        }
    )


def quantity_value(text: str) -> float:
    """Return the number of a Kubernetes quantity such as `250m` or `2Gi`; ValueError: it is none."""
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"not a quantity: {text!r}")
    return float(match[1]) * _UNITS[match[2]]


def _lines(view: Mapping[str, Any], painter: Painter) -> Iterator[str]:
    rows = []
    for pod in view["pods"]:
        used, limit = pod.get("memoryBytes"), pod.get("memoryLimitBytes")
        tight = used is not None and limit and used > _NEAR_LIMIT * limit
        ranks = pod.get("ranks") or []
        rows.append(
            (
                pod["name"],
                f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0]) if ranks else "-",
                pod.get("node", "-"),
                f"{pod['cpuCores']:.2f}" if "cpuCores" in pod else "-",
                painter.paint(_size(used), *(("red",) if tight else ())),
                _size(limit),
                ", ".join(f"{name.rpartition('/')[2]}: {count}" for name, count in pod.get("devices", {}).items())
                or "-",
            )
        )
    yield from text_table(("POD", "RANKS", "NODE", "CPU", "MEMORY", "LIMIT", "DEVICES"), rows)
    if progress := view.get("progress"):
        metrics = ", ".join(f"{m.get('name')} {m.get('value')}" for m in progress.get("metrics") or ())
        yield f"step {progress.get('step', '-')}{', ' if metrics else ''}{metrics}"
    if slow := view.get("straggler"):
        own, others = slow.get("stepSeconds"), slow.get("medianSeconds")
        yield f"rank {slow.get('rank')} is slow: {own} s a step, {others} s on others"


def _size(count: int | None) -> str:
    if count is None:
        return "-"
    return f"{count / 2**30:.2f}Gi" if count >= 2**30 else f"{count / 2**20:.0f}Mi"

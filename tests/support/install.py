"""Install the operator from the chart, as a user does."""

from __future__ import annotations

from pathlib import Path

from support.kube import Json, Kube
from support.kubectl import REPOSITORY, Tools

CHART = REPOSITORY / "charts/elasticjob"
SYSTEM = "elasticjob-system"
RELEASE = "elasticjob"


def install(kube: Kube, cluster_dir: Path, *values: str) -> None:
    """Install or upgrade the chart with these values alone, such as `kueue.enabled=true`, and wait until the operator
    is available.

    Its pods are replaced each time: during development the image changes while its name stays the same.
    """
    tools = Tools(cluster_dir / "bin", cluster_dir / "kubeconfig")
    options = ["--namespace", SYSTEM, "--create-namespace", "--reset-values"]
    options += [part for value in values for part in ("--set", value)]
    tools.helm("upgrade", "--install", RELEASE, str(CHART), *options)
    for pod in kube.list("pods", SYSTEM):
        kube.delete("pods", pod["metadata"]["name"], SYSTEM)
    kube.wait("deployments", RELEASE, SYSTEM, _ready, timeout=120, what="the operator's Deployment is available")


def _ready(deployment: Json) -> bool:
    status = deployment.get("status", {})
    wanted = deployment["spec"]["replicas"]
    current = status.get("observedGeneration") == deployment["metadata"]["generation"]
    return bool(current and status.get("availableReplicas", 0) >= wanted and not status.get("unavailableReplicas"))

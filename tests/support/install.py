"""Install the operator from the chart, as a user does."""

from __future__ import annotations

from pathlib import Path

from support.kube import Json, Kube, is_true
from support.kubectl import REPOSITORY, Tools

CHART = REPOSITORY / "charts/elasticjob"
SYSTEM = "elasticjob-system"
RELEASE = "elasticjob"


def install(kube: Kube, cluster_dir: Path, *values: str) -> None:
    """Install or upgrade the chart with these values alone, such as `kueue.enabled=true`, and wait until only new
    pods of the operator run.

    Its pods are replaced each time: during development the image changes while its name stays the same.
    """
    tools = Tools(cluster_dir / "bin", cluster_dir / "kubeconfig")
    options = ["--namespace", SYSTEM, "--create-namespace", "--reset-values"]
    options += [part for value in values for part in ("--set", value)]
    old = {pod["metadata"]["uid"]: pod["metadata"]["name"] for pod in kube.list("pods", SYSTEM)}
    tools.helm("upgrade", "--install", RELEASE, str(CHART), *options)
    for name in old.values():
        kube.delete("pods", name, SYSTEM)
    wanted = kube.get("deployments", RELEASE, SYSTEM)["spec"]["replicas"]

    def replaced(pods: list[Json]) -> bool:
        """Return whether the old pods are gone: one that is being deleted may lead."""
        ready = [pod for pod in pods if is_true(pod, "Ready")]
        return len(ready) >= int(wanted) and not any(pod["metadata"]["uid"] in old for pod in pods)

    # The Deployment's status may still count the deleted pods.
    kube.wait_list("pods", SYSTEM, replaced, timeout=120, what="only new pods of the operator run")
    wait_rolled_out(kube)


def wait_rolled_out(kube: Kube) -> None:
    """Wait until all pods of the operator are available and have the newest template."""
    kube.wait("deployments", RELEASE, SYSTEM, _rolled_out, timeout=120, what="the operator's Deployment has rolled out")


def _rolled_out(deployment: Json) -> bool:
    status, wanted = deployment.get("status", {}), deployment["spec"]["replicas"]
    current = status.get("observedGeneration") == deployment["metadata"]["generation"]
    return bool(current) and all(status.get(n) == wanted for n in ("replicas", "updatedReplicas", "availableReplicas"))

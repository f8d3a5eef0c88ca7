"""Install the operator from the chart, as a user does."""

from __future__ import annotations

from pathlib import Path

from support.cluster.kube import Json, Kube, is_true
from support.cluster.kubectl import REPOSITORY, Tools

CHART = REPOSITORY / "charts/elasticjob"
SYSTEM = "elasticjob-system"
RELEASE = "elasticjob"
OPERATOR = "app.kubernetes.io/component=operator"


def install(kube: Kube, cluster_dir: Path, *values: str) -> None:
    """Install or upgrade the chart with these values alone, such as `kueue.enabled=true`, and wait until only new
    pods of the operator run.

    Its pods are replaced each time: during development the image changes while its name stays the same.
    """
    tools = Tools(cluster_dir / "bin", cluster_dir / "kubeconfig")
    options = ["--namespace", SYSTEM, "--create-namespace", "--reset-values"]
    options += [part for value in values for part in ("--set", value)]
    old = {pod["metadata"]["uid"]: pod["metadata"]["name"] for pod in kube.list("pods", SYSTEM, OPERATOR)}
    tools.helm("upgrade", "--install", RELEASE, str(CHART), *options)
    for name in old.values():
        kube.delete("pods", name, SYSTEM)
    wait_rolled_out(kube, without=frozenset(old))


def wait_rolled_out(kube: Kube, without: frozenset[str] = frozenset()) -> None:
    """Wait until the operator has as many pods as its Deployment wants, all with the newest template and none with
    one of these UIDs. One that is being deleted may lead, and one that the old ReplicaSet made for a deleted pod, too:
    neither is in the Deployment's status."""
    kube.wait("deployments", RELEASE, SYSTEM, _rolled_out, timeout=120, what="the operator's Deployment has rolled out")
    wanted = int(kube.get("deployments", RELEASE, SYSTEM)["spec"]["replicas"])

    def only_new(pods: list[Json]) -> bool:
        new = [pod for pod in pods if pod["metadata"]["uid"] not in without and is_true(pod, "Ready")]
        return len(new) == len(pods) == wanted

    kube.wait_list("pods", SYSTEM, only_new, selector=OPERATOR, timeout=120, what="only new pods of the operator run")


def _rolled_out(deployment: Json) -> bool:
    status, wanted = deployment.get("status", {}), deployment["spec"]["replicas"]
    current = status.get("observedGeneration") == deployment["metadata"]["generation"]
    return bool(current) and all(status.get(n) == wanted for n in ("replicas", "updatedReplicas", "availableReplicas"))

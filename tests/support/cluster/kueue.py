"""The real Kueue on the test cluster, installed from its own chart, and its queues."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from cluster import kueue, verbs
from cluster.layout import Layout
from cluster.waiting import until
from support.cluster.kube import ApiError, Json, Kube, is_true
from support.cluster.kubectl import Tools

SYSTEM = "kueue-system"
RELEASE = "kueue"
DEPLOYMENT = "kueue-controller-manager"
CERTIFICATE = "kueue-webhook-server-cert"
API = "kueue.x-k8s.io/v1beta2"
FRAMEWORK = "ElasticJob.v1alpha1.elasticjob.dev"


@contextmanager
def installed(kube: Kube, cluster_dir: Path) -> Iterator[None]:
    """Install Kueue for the time of the context, with its own settings, and ElasticJob as an external framework."""
    built = kueue.kueue(Layout.default())
    verbs.load(built.image)
    tools = Tools(cluster_dir / "bin", cluster_dir / "kubeconfig")
    options = ["--namespace", SYSTEM, "--create-namespace", "--values", "-"]
    try:
        tools.helm("upgrade", "--install", RELEASE, str(built.chart), *options, stdin=yaml.safe_dump(_values(built)))
        _wait_ready(kube)
        try:
            yield
        finally:
            _delete_objects(kube)
    finally:
        tools.helm("uninstall", RELEASE, "--namespace", SYSTEM, "--wait", "--timeout", "90s")


def _delete_objects(kube: Kube) -> None:
    """Delete the objects that have a finalizer of Kueue, while it is there to remove that."""
    for plural in ("clusterqueues", "resourceflavors", "topologies"):
        for item in kube.list(plural):
            kube.delete(plural, item["metadata"]["name"])
        kube.wait_list(plural, None, lambda found: not found, timeout=90, what=f"no {plural}")


def _values(built: kueue.Kueue) -> Json:
    """Return the values of Kueue's chart. Its configuration is the chart's, with what docs/operate/kueue.md adds."""
    defaults = yaml.safe_load((built.chart / "values.yaml").read_text())
    configuration = yaml.safe_load(defaults["managerConfig"]["controllerManagerConfigYaml"])
    configuration["integrations"]["externalFrameworks"] = [FRAMEWORK]
    configuration["waitForPodsReady"] = {"timeout": "5m", "recoveryTimeout": "5m", "blockAdmission": False}
    repository, tag = kueue.IMAGE
    manager = {
        "image": {"repository": repository, "tag": tag, "pullPolicy": "Never"},
        # The nodes of the test cluster have little room.
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}},
    }
    probe = {"initialDelaySeconds": 0, "periodSeconds": 1}
    return {
        "controllerManager": {"manager": manager, "readinessProbe": probe},
        "managerConfig": {"controllerManagerConfigYaml": yaml.safe_dump(configuration)},
    }


def _wait_ready(kube: Kube) -> None:
    """Wait until Kueue's controller runs and its webhooks answer."""
    has_key = lambda secret: "tls.key" in (secret.get("data") or {})  # noqa: E731
    kube.wait("secrets", CERTIFICATE, SYSTEM, has_key, timeout=90, what="Kueue has made its certificate")
    for pod in kube.list("pods", SYSTEM):
        # The kubelet brings the Secret into the pod with the next change of the pod, else within 90 s.
        changed = {"metadata": {"annotations": {"elasticjob.dev/certificate": "made"}}}
        kube.patch("pods", pod["metadata"]["name"], changed, SYSTEM)
    available = lambda deployment: is_true(deployment, "Available")  # noqa: E731
    kube.wait("deployments", DEPLOYMENT, SYSTEM, available, timeout=120, what="Kueue's controller is available")

    def problem() -> str | None:
        try:
            kube.create("resourceflavors", flavor("webhooks-answer"), dry_run=True)
        except ApiError as error:
            if error.code != 500:
                raise
            return str(error)
        return None

    # kube-proxy may learn of the webhook's address after the Deployment has.
    until("Kueue's webhooks", problem, timeout=30)


def flavor(name: str, **spec: object) -> Json:
    """Return a ResourceFlavor whose Nodes run Linux."""
    body = {"nodeLabels": {"kubernetes.io/os": "linux"}, **spec}
    return {"apiVersion": API, "kind": "ResourceFlavor", "metadata": {"name": name}, "spec": body}


def cluster_queue(name: str, cpu: str, flavor_name: str, cohort: str = "") -> Json:
    """Return a ClusterQueue with this quota of CPU, in which a job may preempt those of lower priority.

    With a `cohort` it lends what it does not use to the other queues of the cohort, and takes it back when it needs it.
    """
    quotas = [{"name": "cpu", "nominalQuota": cpu}, {"name": "memory", "nominalQuota": "64Gi"}]
    group = {"coveredResources": ["cpu", "memory"], "flavors": [{"name": flavor_name, "resources": quotas}]}
    preemption = {"withinClusterQueue": "LowerPriority"}
    spec: Json = {"namespaceSelector": {}, "preemption": preemption, "resourceGroups": [group]}
    if cohort:
        spec["cohortName"] = cohort
        preemption["reclaimWithinCohort"] = "Any"
    return {"apiVersion": API, "kind": "ClusterQueue", "metadata": {"name": name}, "spec": spec}


def local_queue(name: str, target: str) -> Json:
    return {"apiVersion": API, "kind": "LocalQueue", "metadata": {"name": name}, "spec": {"clusterQueue": target}}


def priority_class(name: str, value: int) -> Json:
    return {"apiVersion": API, "kind": "WorkloadPriorityClass", "metadata": {"name": name}, "value": value}


def used_cpu(queue: Json) -> str:
    """Return how much CPU of a ClusterQueue is reserved, such as `100m`."""
    (reserved,) = queue.get("status", {}).get("flavorsReservation") or [{"resources": []}]
    return str(next((item["total"] for item in reserved["resources"] if item["name"] == "cpu"), "0"))

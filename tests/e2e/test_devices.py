"""Resource claims as objects: no driver is installed, so the pods wait for their devices."""

from __future__ import annotations

from collections.abc import Callable

from support.cluster.jobs import Job, manifest
from support.cluster.kube import Json, Kube

Submit = Callable[[Json], Job]
REQUEST = {"name": "gpu", "exactly": {"deviceClassName": "gpu.example.com", "count": 2}}
TEMPLATE: Json = {
    "apiVersion": "resource.k8s.io/v1",
    "kind": "ResourceClaimTemplate",
    "metadata": {"name": "two-gpus"},
    "spec": {"spec": {"devices": {"requests": [REQUEST]}}},
}


def claiming(name: str, **spec: object) -> Json:
    """Return a job each pod of which claims two devices."""
    resources = {"claims": [{"name": "gpus"}]}
    body = manifest(name, ["python3", "-c", "pass"], replicas=2, preload=[], resources=resources, **spec)
    body["spec"]["template"]["spec"]["resourceClaims"] = [{"name": "gpus", "resourceClaimTemplateName": "two-gpus"}]
    return body


def test_each_pod_has_a_resource_claim_of_its_own(submit: Submit, kube: Kube, namespace: str) -> None:
    kube.create("resourceclaimtemplates", TEMPLATE, namespace)
    job = submit(claiming("claims", nprocPerNode=2))
    job.wait("Running", status="False", reason="Unschedulable")
    claimed = lambda pod: bool(pod["status"].get("resourceClaimStatuses"))  # noqa: E731
    made = []
    for name in ("claims-0-0", "claims-1-0"):
        pod = kube.wait("pods", name, namespace, claimed, timeout=90, what="the pod has its claim")
        made.append(pod["status"]["resourceClaimStatuses"][0]["resourceClaimName"])
        trainer = next(c for c in pod["spec"]["containers"] if c["name"] == "trainer")
        assert trainer["resources"]["claims"] == [{"name": "gpus"}]
    assert sorted(claim["metadata"]["name"] for claim in kube.list("resourceclaims", namespace)) == sorted(made)


def test_workers_for_the_devices_of_a_claim_are_not_counted(submit: Submit) -> None:
    job = submit(claiming("uncounted", nprocPerNode="gpu"))
    failed = job.wait("Failed", reason="InvalidSpec")
    message = next(c["message"] for c in failed["status"]["conditions"] if c["type"] == "Failed")
    assert "set nprocPerNode to a number (the devices of a resource claim cannot be counted)" in message

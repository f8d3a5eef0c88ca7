"""Gang scheduling as objects: no gang scheduler is installed, only the CRD of its PodGroups, made by the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from support.cluster.install import RELEASE, SYSTEM
from support.cluster.jobs import Job, manifest
from support.cluster.kube import Json, Kube, condition

Submit = Callable[[Json], Job]
GROUP = "scheduling.x-k8s.io"
POD_GROUPS: Json = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": f"podgroups.{GROUP}"},
    "spec": {
        "group": GROUP,
        "scope": "Namespaced",
        "names": {"kind": "PodGroup", "plural": "podgroups", "singular": "podgroup"},
        "versions": [
            {
                "name": "v1alpha1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {
                            "spec": {
                                "type": "object",
                                "required": ["minMember"],
                                "properties": {"minMember": {"type": "integer", "format": "int32", "minimum": 1}},
                            }
                        },
                    }
                },
            }
        ],
    },
}


@pytest.fixture
def install_pod_groups(kube: Kube) -> Iterator[Callable[[], Json]]:
    """A function that installs the CRD of the coscheduling plugin; it is deleted after the test."""
    yield lambda: kube.create("customresourcedefinitions", POD_GROUPS)
    kube.delete("customresourcedefinitions", f"podgroups.{GROUP}")


def permit(kube: Kube, namespace: str) -> None:
    """Give the operator in one namespace what the chart's value gang.coscheduling gives it."""
    operator = kube.get("deployments", RELEASE, SYSTEM)["spec"]["template"]["spec"]["serviceAccountName"]
    api = "rbac.authorization.k8s.io"
    rule = {"apiGroups": [GROUP], "resources": ["podgroups"], "verbs": ["create", "delete", "get", "patch"]}
    kube.create("roles", {"metadata": {"name": "gangs"}, "rules": [rule]}, namespace)
    binding = {
        "metadata": {"name": "gangs"},
        "roleRef": {"apiGroup": api, "kind": "Role", "name": "gangs"},
        "subjects": [{"kind": "ServiceAccount", "name": operator, "namespace": SYSTEM}],
    }
    kube.create("rolebindings", binding, namespace)


def wait_blocked(kube: Kube, job: Job, sentence: str) -> None:
    """Wait until the job says that no pod can be created, with this advice."""

    def blocked(current: Json) -> bool:
        running = condition(current, "Running")
        return running.get("reason") == "PodCreationFailed" and sentence in running["message"]

    kube.wait("elasticjobs", job.name, job.namespace, blocked, timeout=90, what=sentence)


def test_a_job_waits_for_its_gang_scheduler_and_then_has_a_pod_group(
    submit: Submit, kube: Kube, namespace: str, install_pod_groups: Callable[[], Json]
) -> None:
    sizes = {"replicas": 2, "elasticPolicy": {"minReplicas": 1, "maxReplicas": 2, "spares": 1}}
    command = ["python3", "-c", "import signal; signal.pause()"]
    job = submit(manifest("gang", command, preload=[], gang={"provider": "coscheduling"}, **sizes))
    wait_blocked(kube, job, "set gang.coscheduling to true in the values of elasticjob's chart")
    permit(kube, namespace)
    wait_blocked(kube, job, "install the coscheduling plugin of scheduler-plugins with its CRDs")
    assert job.pods() == []
    install_pod_groups()
    pods = job.wait_pods(lambda pods: len(pods) == 3, timeout=60, what="the pods are created")
    groups = {pod["metadata"]["name"]: pod["metadata"]["labels"].get(f"{GROUP}/pod-group") for pod in pods}
    assert groups == {"gang-0-0": "gang", "gang-1-0": "gang", "gang-2-0": None}
    group = kube.get("podgroups", "gang", namespace)
    assert group["spec"] == {"minMember": 1}
    assert group["metadata"]["ownerReferences"][0]["uid"] == job.read()["metadata"]["uid"]
    kube.patch("elasticjobs", job.name, {"spec": {"elasticPolicy": {"minReplicas": 2}}}, namespace)
    resized = kube.wait(
        "podgroups", "gang", namespace, lambda g: g["spec"]["minMember"] == 2, timeout=90, what="minMember follows"
    )
    assert resized["metadata"]["uid"] == group["metadata"]["uid"]
    kube.patch("elasticjobs", job.name, {"spec": {"suspend": True}}, namespace)
    kube.wait_gone("podgroups", namespace, job.selector, timeout=60)

"""Gang scheduling: as objects with the CRD of the coscheduling plugin, made by the test, and by Kubernetes itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from support.cluster.install import RELEASE, SYSTEM
from support.cluster.jobs import DIGITS, Job, manifest
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


def permit(kube: Kube, namespace: str, group: str) -> None:
    """Give the operator in one namespace what the chart's value gang.coscheduling or gang.kubernetes gives it."""
    operator = kube.get("deployments", RELEASE, SYSTEM)["spec"]["template"]["spec"]["serviceAccountName"]
    api = "rbac.authorization.k8s.io"
    rule = {"apiGroups": [group], "resources": ["podgroups"], "verbs": ["create", "delete", "get", "patch"]}
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
    permit(kube, namespace, GROUP)
    wait_blocked(kube, job, "install the coscheduling plugin of scheduler-plugins with its CRDs")
    assert job.pods() == []
    install_pod_groups()
    pods = job.wait_pods(lambda pods: len(pods) == 3, timeout=60, what="the spare follows once the gang has a Node")
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


# ---- Kubernetes' own scheduler

GATE = "GenericWorkload"
KUBERNETES_GROUP = "scheduling.k8s.io"
PAUSE = ["python3", "-c", "import signal; signal.pause()"]
ONE_GPU: Json = {"limits": {"nvidia.com/gpu": 1}}


def nodes_of(job: Job) -> dict[str, str]:
    """Return the Node of each worker pod that has one."""
    return {p["metadata"]["name"]: p["spec"]["nodeName"] for p in job.pods() if "nodeName" in p["spec"]}


def count_of(group: Json) -> int:
    """Return how many pods a PodGroup asks for."""
    count: int = group["spec"]["schedulingPolicy"]["gang"]["minCount"]
    return count


def wait_for_probe(kube: Kube, namespace: str) -> None:
    """Wait until a pod of no gang gets a GPU, which shows that the gangs before it have left the GPU alone."""
    container = {"name": "probe", "image": DIGITS, "command": PAUSE, "resources": ONE_GPU}
    spec = {"containers": [container], "terminationGracePeriodSeconds": 0}
    metadata = {"name": "probe", "labels": {"name": "probe"}}
    kube.create("pods", {"metadata": metadata, "spec": spec}, namespace)
    placed = lambda pod: "nodeName" in pod["spec"]  # noqa: E731
    kube.wait("pods", "probe", namespace, placed, timeout=90, what="a pod of no gang gets the GPU")
    kube.delete("pods", "probe", namespace)
    kube.wait_gone("pods", namespace, "name=probe", timeout=60)


@pytest.mark.needs_gate(GATE)
@pytest.mark.takes_turns("gpus")
def test_two_jobs_that_each_have_room_for_half_do_not_hold_each_others_nodes(
    submit: Submit, kube: Kube, namespace: str, gpus: Callable[[str, int], None]
) -> None:
    permit(kube, namespace, KUBERNETES_GROUP)
    sizes = {"replicas": 2, "elasticPolicy": {"minReplicas": 2, "maxReplicas": 2, "spares": 1}}
    more = {"gang": {"provider": "kubernetes"}, "resources": ONE_GPU, "preload": [], **sizes}
    jobs = [submit(manifest(name, PAUSE, **more)) for name in ("first", "second")]
    for job in jobs:
        job.wait("Running", status="False", reason="Unschedulable")
    gpus("node1", 1)
    wait_for_probe(kube, namespace)
    assert [nodes_of(job) for job in jobs] == [{}, {}]
    gpus("node2", 1)
    trains = lambda found: any(body.get("status", {}).get("worldSize") == 2 for body in found)  # noqa: E731
    found = kube.wait_list("elasticjobs", namespace, trains, timeout=120, what="one of the jobs trains")
    (name,) = (body["metadata"]["name"] for body in found if body.get("status", {}).get("worldSize") == 2)
    winner, loser = sorted(jobs, key=lambda job: job.name != name)
    assert (sorted(nodes_of(winner).values()), nodes_of(loser)) == (["node1", "node2"], {})
    gpus("node3", 2)
    spare = f"{winner.name}-2-0"
    placed = lambda pod: pod["spec"].get("nodeName") == "node3"  # noqa: E731
    kube.wait("pods", spare, namespace, placed, timeout=90, what="the spare follows the gang that has its Nodes")
    assert [p["metadata"]["name"] for p in loser.pods()] == [f"{loser.name}-0-0", f"{loser.name}-1-0"]
    groups = "podgroups.scheduling.k8s.io"
    group = kube.get(groups, loser.name, namespace)
    assert (count_of(group), nodes_of(loser)) == (2, {})
    smaller = {"spec": {"elasticPolicy": {"minReplicas": 1}}}
    kube.patch("elasticjobs", loser.name, smaller, namespace)
    loser.wait_status(worldSize=1)
    resized = kube.get(groups, loser.name, namespace)
    assert (count_of(resized), resized["metadata"]["uid"]) == (1, group["metadata"]["uid"])


@pytest.mark.needs_gate(GATE, on=False)
def test_without_the_feature_gate_the_job_says_what_the_cluster_lacks(
    submit: Submit, kube: Kube, namespace: str
) -> None:
    permit(kube, namespace, KUBERNETES_GROUP)
    job = submit(manifest("gang", PAUSE, preload=[], gang={"provider": "kubernetes"}, replicas=1))
    wait_blocked(kube, job, "start Kubernetes 1.37 or newer with the feature gate GenericWorkload")

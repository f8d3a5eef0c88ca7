"""A job with a queue. No Kueue is installed: the test makes its CRDs and decides as Kueue does, by status patches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elasticjob_operator.model.cluster.raw import timestamp
from support.cluster.install import install
from support.cluster.jobs import Job, manifest
from support.cluster.kube import Json, Kube, condition, is_true

pytestmark = pytest.mark.alone

Submit = Callable[[Json], Job]
GROUP = "kueue.x-k8s.io"
OBJECT: Json = {"type": "object"}
OPEN: Json = {**OBJECT, "x-kubernetes-preserve-unknown-fields": True}
STRING: Json = {"type": "string"}
COUNT: Json = {"type": "integer", "format": "int32", "minimum": 0}
STRINGS: Json = {**OBJECT, "additionalProperties": STRING}


def of(required: list[str], **properties: Json) -> Json:
    return {**OBJECT, "required": required, "properties": properties}


def list_map(key: str, item: Json) -> Json:
    return {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key], "items": item}


CONDITION = of(
    ["type", "status", "reason", "message", "lastTransitionTime"],
    type={**STRING, "maxLength": 316},
    status={**STRING, "enum": ["True", "False", "Unknown"]},
    reason={**STRING, "minLength": 1, "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
    message={**STRING, "maxLength": 32768},
    observedGeneration={"type": "integer", "format": "int64", "minimum": 0},
    lastTransitionTime={**STRING, "format": "date-time"},
)
POD_SET = of(
    ["name", "count", "template"],
    name={**STRING, "maxLength": 63},
    count=COUNT,
    minCount={**COUNT, "minimum": 1},
    template=of(["spec"], metadata=of([], labels=STRINGS, annotations=STRINGS), spec=OPEN),
)
POD_SET["x-kubernetes-validations"] = [
    {"rule": "has(self.minCount) ? self.minCount <= self.count : true", "message": "minCount is above count"}
]
PRIORITY_CLASS = of(["group", "kind", "name"], group=STRING, kind=STRING, name=STRING)
SPEC = of(
    ["podSets"],
    podSets={**list_map("name", POD_SET), "minItems": 1, "maxItems": 8},
    queueName=STRING,
    priorityClassRef=PRIORITY_CLASS,
    priority={"type": "integer", "format": "int32"},
    active={"type": "boolean", "default": True},
)
ASSIGNMENT = of(["name"], name=STRING, count=COUNT, flavors=STRINGS, resourceUsage=STRINGS)
STATUS = of(
    [],
    conditions={**list_map("type", CONDITION), "maxItems": 16},
    admission=of(
        ["clusterQueue", "podSetAssignments"],
        clusterQueue=STRING,
        podSetAssignments={**list_map("name", ASSIGNMENT), "maxItems": 8},
    ),
    reclaimablePods=list_map("name", of(["name", "count"], name=STRING, count=COUNT)),
)
RESERVED = "self.status.conditions.exists(c, c.type == 'QuotaReserved' && c.status == 'True')"
WORKLOAD = of(["spec"], spec=SPEC, status=STATUS)
WORKLOAD["x-kubernetes-validations"] = [
    {
        "rule": f"has(self.status) && has(self.status.conditions) && {RESERVED} && has(self.status.admission)"
        " ? size(self.spec.podSets) == size(self.status.admission.podSetAssignments) : true",
        "message": "podSetAssignments must have the same number of podSets as the spec",
    }
]
FLAVOR = of([], spec=of([], nodeLabels=STRINGS, tolerations={"type": "array", "items": OPEN}))


def crd(kind: str, scope: str, schema: Json) -> Json:
    """Return the CRD of a kind of Kueue's API, with the fields that the operator and this test use."""
    plural = f"{kind.lower()}s"
    served = {"name": "v1beta2", "served": True, "storage": True, "subresources": {"status": {}}}
    version: Json = {**served, "schema": {"openAPIV3Schema": schema}}
    names = {"kind": kind, "plural": plural, "singular": kind.lower()}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {"group": GROUP, "scope": scope, "names": names, "versions": [version]},
    }


@pytest.fixture
def kueue(kube: Kube, cluster_dir: Path) -> Iterator[None]:
    """Kueue's API and one flavor, and an operator that uses the API; all of it is undone after the test."""
    crds = [crd("Workload", "Namespaced", WORKLOAD), crd("ResourceFlavor", "Cluster", FLAVOR)]
    try:
        for body in crds:
            kube.create("customresourcedefinitions", body)
        for body in crds:
            established = lambda c: is_true(c, "Established")  # noqa: E731
            name = body["metadata"]["name"]
            kube.wait("customresourcedefinitions", name, None, established, timeout=20, what=f"{name} is served")
        flavor = {"metadata": {"name": "linux"}, "spec": {"nodeLabels": {"kubernetes.io/os": "linux"}}}
        kube.create("resourceflavors", {"apiVersion": f"{GROUP}/v1beta2", "kind": "ResourceFlavor", **flavor})
        install(kube, cluster_dir, "kueue.enabled=true")
        yield
    finally:
        install(kube, cluster_dir)
        for body in crds:
            kube.delete("customresourcedefinitions", body["metadata"]["name"])


class Queue:
    """What Kueue does with the Workload of one job."""

    def __init__(self, kube: Kube, job: Job) -> None:
        self.kube, self.job = kube, job
        found = self._until_listed()
        self.name: str = found["metadata"]["name"]

    def _until_listed(self) -> Json:
        events = self.kube.watch("workloads", self.job.namespace, selector=self.job.selector, timeout=30)
        return next(current for kind, current in events if kind == "ADDED")

    def read(self) -> Json:
        return self.kube.get("workloads", self.name, self.job.namespace)

    def wait(self, until: Callable[[Json], bool], what: str) -> Json:
        return self.kube.wait("workloads", self.name, self.job.namespace, until, timeout=60, what=what)

    def write(self, admission: Json | None, time: float, **conditions: tuple[bool, str]) -> None:
        """Write conditions (status and reason by type), and the admission; the other conditions stay."""
        kept = {c["type"]: c for c in self.read().get("status", {}).get("conditions", [])}
        for kind, (true, reason) in conditions.items():
            written = {"type": kind, "status": str(true), "reason": reason, "message": "by the test"}
            kept[kind] = {**written, "lastTransitionTime": timestamp(time)}
        status = {"conditions": [*kept.values()], **({} if admission is None else {"admission": admission})}
        self.kube.patch("workloads", self.name, {"status": status}, self.job.namespace, "/status")

    def admit(self, count: int, time: float) -> None:
        assignment = {"name": "worker", "count": count, "flavors": {"cpu": "linux", "memory": "linux"}}
        admission = {"clusterQueue": "all", "podSetAssignments": [assignment]}
        evicted = {"Evicted": (False, "QuotaReserved")} if condition(self.read(), "Evicted") else {}
        self.write(admission, time, QuotaReserved=(True, "QuotaReserved"), Admitted=(True, "Admitted"), **evicted)

    def evict(self, time: float) -> None:
        self.write(None, time, Evicted=(True, "Preempted"))


@pytest.mark.usefixtures("kueue")
def test_a_job_is_admitted_in_part_evicted_admitted_again_and_finished(
    submit: Submit, kube: Kube, namespace: str, shared_dir: str
) -> None:
    script = "import os, time\nwhile not os.path.exists('/shared/end'): time.sleep(0.1)"
    shared = {"volumes": [{"name": "shared", "hostPath": {"path": shared_dir, "type": "Directory"}}]}
    sizes = {"replicas": 3, "elasticPolicy": {"minReplicas": 2, "maxReplicas": 3}}
    mounts = [{"name": "shared", "mountPath": "/shared"}]
    body = manifest("queued", ["python3", "-c", script], preload=[], mounts=mounts, **shared, **sizes)
    body["metadata"]["labels"] = {f"{GROUP}/queue-name": "team-a"}
    job = submit(body)
    job.wait("Suspended", reason="SuspendedByQueue", timeout=30)
    queue = Queue(kube, job)
    asked = queue.read()["spec"]
    (pods,) = asked["podSets"]
    assert (asked["queueName"], pods["name"], pods["count"], pods["minCount"]) == ("team-a", "worker", 3, 2)
    assert kube.list("pods", namespace) == []

    queue.admit(2, 1.7e9)
    status = job.wait_world(2, after=0, timeout=60)
    assert status["targetReplicas"] == 2
    assert condition(job.read(), "FullyScaled")["reason"] == "InsufficientCapacity"
    queue.wait(lambda workload: is_true(workload, "PodsReady"), "the Workload says that the job trains")
    assert kube.get("pods", "queued-0-0", namespace)["spec"]["nodeSelector"] == {"kubernetes.io/os": "linux"}

    queue.evict(1.7e9 + 100)
    released = queue.wait(
        lambda workload: condition(workload, "QuotaReserved")["status"] == "False", "its quota is free"
    )
    kube.wait_gone("pods", namespace, job.workers, timeout=30)
    assert "admission" not in released["status"]
    expected = {"Admitted": "False", "Requeued": "True", "PodsReady": "False", "Evicted": "True"}
    assert {kind: condition(released, kind)["status"] for kind in expected} == expected
    assert condition(job.read(), "Suspended")["reason"] == "SuspendedByQueue"

    queue.admit(3, 1.7e9 + 200)
    status = job.wait_world(3, after=status["rendezvousRound"], timeout=60)
    assert (status["executionAttempts"], status["restarts"]) == (2, 0)
    (Path(shared_dir) / "end").touch()
    job.wait("Complete", timeout=60)
    finished = queue.wait(lambda workload: is_true(workload, "Finished"), "the Workload is Finished")
    assert condition(finished, "Finished")["reason"] == "Succeeded"
    assert "template" in job.read()["spec"]
    assert "nodeSelector" not in job.read()["spec"]["template"]["spec"]

"""A HorizontalPodAutoscaler scales a job by its scale subresource: Kubernetes' own controller, by metrics-server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from support.cluster.jobs import Job, manifest
from support.cluster.kube import Json, Kube, condition
from support.cluster.logbook import LogBook
from support.cluster.metrics_server import metrics_server

pytestmark = pytest.mark.alone
"""The autoscaler acts on the processor time of the pods, which they do not get beside other tests."""

Submit = Callable[[Json], Job]
Follow = Callable[[Job], LogBook]
EXAMPLE = Path(__file__).parents[2] / "examples" / "autoscaler" / "digits.yaml"
SCRIPT = """
import os, time
from pathlib import Path
import elasticjob

def write(path, text):
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)

first, world = os.environ["RANK"] == "0", os.environ["WORLD_SIZE"]
last, begin = Path("/shared/last"), Path("/shared/begin-" + os.environ["ELASTICJOB_ROUND"].replace(".", "-"))
if first:
    write(begin, last.read_text() if last.exists() else "0")
while not begin.exists():
    time.sleep(0.01)
step = int(begin.read_text())
while True:
    end = time.monotonic() + 0.1
    while Path("/shared/busy").exists() and time.monotonic() < end - 0.05:
        pass
    step += 1
    if first:
        write(last, str(step))
    print(f"step={step} loss=0 world={world}", flush=True)
    elasticjob.progress(step)
    time.sleep(max(0.0, end - time.monotonic()))
"""
CPU: Json = {
    "type": "Resource",
    "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 60}},
}
SMALL: Json = {"requests": {"cpu": "100m", "memory": "64Mi"}}


@pytest.fixture
def metrics(kube: Kube, cluster_dir: Path, tmp_path: Path) -> Iterator[None]:
    """The API `metrics.k8s.io`, from which an autoscaler learns what pods use."""
    authority = cluster_dir / "pki/ca.crt"
    if not authority.exists():
        pytest.skip("metrics-server listens on an address of the bare cluster")
    with metrics_server(kube, authority, tmp_path):
        yield


@pytest.fixture
def autoscaler(kube: Kube, namespace: str) -> Callable[..., Json]:
    """Create the autoscaler of the example for a job, or change it."""

    def write(job: Job, **spec: object) -> Json:
        found = kube.find("horizontalpodautoscalers", job.name, namespace)
        if found is not None:
            return kube.patch("horizontalpodautoscalers", job.name, {"spec": spec}, namespace)
        body: Json = yaml.safe_load(EXAMPLE.read_text())
        body["metadata"]["name"] = body["spec"]["scaleTargetRef"]["name"] = job.name
        body["spec"] |= spec
        return kube.create("horizontalpodautoscalers", body, namespace)

    return write


def selected(job: Job) -> set[str]:
    """Return the pods that the scale subresource selects."""
    scale = job.kube.request("GET", job.kube.path("elasticjobs", job.namespace, job.name, "/scale"))
    pods = {pod["metadata"]["name"] for pod in job.pods(scale["status"]["selector"])}
    assert scale["status"]["replicas"] == len(pods), json.dumps(scale)
    return pods


@pytest.mark.usefixtures("metrics")
def test_an_autoscaler_adds_and_removes_nodes_within_the_bounds_of_the_job(
    submit: Submit, follow: Follow, kube: Kube, namespace: str, shared_dir: str, autoscaler: Callable[..., Json],
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    busy = Path(shared_dir) / "busy"
    busy.touch()
    shared = {"volumes": [{"name": "shared", "hostPath": {"path": shared_dir}}]}
    policy = {"minReplicas": 2, "maxReplicas": 4, "replicaIncrementStep": 2, "spares": 1}
    mounts = [{"name": "shared", "mountPath": "/shared"}]
    command = ["python3", "-c", SCRIPT]
    body = manifest(
        "load", command, replicas=2, elasticPolicy=policy, preload=[], resources=SMALL, mounts=mounts, **shared
    )
    began = time.monotonic()
    job = submit(body)
    at_once = {kind: {"stabilizationWindowSeconds": 0} for kind in ("scaleUp", "scaleDown")}
    autoscaler(job, maxReplicas=3, metrics=[CPU], behavior=at_once)
    book = follow(job)

    def trains(nodes: int, moment: float) -> None:
        def members() -> set[str]:
            return {step.pod for step in book.steps if step.time > moment and step.world == nodes}

        job.wait_status(worldSize=nodes, standby=1, replicas=nodes)
        book.wait(lambda: len(members()) == nodes, timeout=60, what=f"steps of {nodes} pods")
        assert selected(job) == members()

    def asks(replicas: int) -> None:
        asked = lambda current: current["spec"]["replicas"] == replicas  # noqa: E731
        found = kube.wait("elasticjobs", job.name, namespace, asked, timeout=90, what=f"replicas {replicas}")
        job.wait_status(observedGeneration=found["metadata"]["generation"])

    trains(2, 0)
    asks(3)  # which is between two steps
    record_property("seconds to the first change", round(time.monotonic() - began, 1))
    assert (job.status()["targetReplicas"], job.status()["worldSize"]) == (2, 2)
    kube.patch("elasticjobs", job.name, {"spec": {"elasticPolicy": {"replicaIncrementStep": 1}}}, namespace)
    trains(3, 0)
    autoscaler(job, maxReplicas=9)

    def refused(current: Json) -> bool:
        able = condition(current, "AbleToScale")
        return able.get("reason") == "FailedUpdateScale" and "elasticPolicy.maxReplicas" in able["message"]

    kube.wait("horizontalpodautoscalers", job.name, namespace, refused, timeout=60, what="the job's bound is named")
    assert job.read()["spec"]["replicas"] == 3
    busy.unlink()
    autoscaler(job, maxReplicas=3)
    asks(2)
    trains(2, time.time())
    record_property("seconds", round(time.monotonic() - began, 1))
    for pod in {step.pod for step in book.steps}:
        steps = [s.step for s in book.steps if s.pod == pod]
        assert steps == list(range(steps[0], steps[0] + len(steps)))
    status = job.status()
    assert (status["restarts"], len(status.get("recentFailures", []))) == (0, 0)


def test_an_autoscaler_needs_the_replicas_of_the_job(
    submit: Submit, kube: Kube, namespace: str, autoscaler: Callable[..., Json]
) -> None:
    policy = {"minReplicas": 2, "maxReplicas": 4}
    job = submit(manifest("unset", ["python3", "-c", "pass"], elasticPolicy=policy, preload=[], suspend=True))
    autoscaler(job)

    def wait_able(reason: str) -> None:
        able = lambda current: condition(current, "AbleToScale").get("reason") == reason  # noqa: E731
        kube.wait("horizontalpodautoscalers", job.name, namespace, able, timeout=60, what=f"AbleToScale: {reason}")

    wait_able("FailedGetScale")
    kube.scale(job.name, namespace, 2)
    wait_able("SucceededGetScale")

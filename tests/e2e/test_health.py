"""A node whose health check fails is avoided: the status names it, and its pod is replaced on another node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster import verbs
from support.cluster.jobs import Job, manifest
from support.cluster.kube import Json, condition

pytestmark = pytest.mark.takes_turns("gpus")

Submit = Callable[[Json], Job]
SICK = "node2"
NODES = ("node1", SICK, "node3")
SCRIPT = "import os, time; print('trains on', os.environ['NODE'], flush=True); time.sleep(3600)"


@pytest.fixture
def gpus() -> Iterator[Callable[[str], None]]:
    """Give a node one GPU; after the test it has none."""
    touched: set[str] = set()

    def give(node: str) -> None:
        touched.add(node)
        verbs.gpus(node, 1)

    yield give
    for node in touched:
        verbs.gpus(node, 0)


def sick_gpu(directory: str) -> Json:
    """Return a job of two nodes with one GPU each.

    nvidia-smi is a script in a directory that all nodes share. It reports a lost GPU on node SICK while the file `sick`
    exists there.
    """
    program = Path(directory) / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n"
        f'if [ "$NODE" = {SICK} ] && [ -e /tools/sick ]; then\n'
        '    echo "Unable to determine the device handle for GPU0: GPU is lost."\n'
        "else\n"
        '    echo "0, 0, No, No"\n'
        "fi\n"
    )
    program.chmod(0o755)
    body = manifest(
        "sick-gpu", ["python3", "-c", SCRIPT], replicas=2, preload=[],
        resources={"limits": {"nvidia.com/gpu": 1}, "requests": {"cpu": "50m", "memory": "128Mi"}},
        volumes=[{"name": "tools", "hostPath": {"path": directory}}],
        mounts=[{"name": "tools", "mountPath": "/tools"}],
    )  # fmt: skip
    container = body["spec"]["template"]["spec"]["containers"][0]
    container["env"] = [
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "PATH", "value": "/tools:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
    ]
    return body


def nodes_of(pods: list[Json]) -> set[str]:
    """Return the nodes of Pending and Running pods."""
    alive = [pod for pod in pods if pod["status"].get("phase") in ("Pending", "Running")]
    return {pod["spec"]["nodeName"] for pod in alive if "nodeName" in pod["spec"]}


def test_a_node_whose_gpu_is_lost_is_avoided(submit: Submit, gpus: Callable[[str], None], shared_dir: str) -> None:
    (Path(shared_dir) / "sick").touch()
    gpus("node1")
    gpus(SICK)
    job = submit(sick_gpu(shared_dir))
    fault = condition(job.wait("FullyScaled", status="False", reason="NodeFault"), "FullyScaled")
    assert "GPU is lost" in fault["message"]
    gpus("node3")
    job.wait_status(worldSize=2)
    assert nodes_of(job.pods()) == {"node1", "node3"}
    status = job.status()
    (avoided,) = status["avoidedNodes"]
    assert (avoided["name"], avoided["reason"]) == (SICK, "DeviceUnhealthy")
    assert (status["lastFailure"]["class"], status["lastFailure"]["node"]) == ("DeviceUnhealthy", SICK)
    assert status["restarts"] == 0
    job.wait_events("DeviceUnhealthy")


def test_a_node_whose_gpu_is_lost_under_a_worker_leaves_the_job(
    submit: Submit, gpus: Callable[[str], None], shared_dir: str
) -> None:
    """A worker fails because its GPU is lost, and no other node has a free GPU."""
    for node in NODES:
        gpus(node)
    body = sick_gpu(shared_dir)
    body["spec"] |= {"replicas": 3, "elasticPolicy": {"minReplicas": 2, "maxReplicas": 3}}
    script = (
        "import os, pathlib, time\n"
        f"while not (os.environ['NODE'] == '{SICK}' and pathlib.Path('/tools/sick').exists()): time.sleep(0.05)\n"
        "raise RuntimeError('CUDA error: unspecified launch failure')\n"
    )
    body["spec"]["template"]["spec"]["containers"][0]["command"] = ["python3", "-c", script]
    job = submit(body)
    job.wait_status(worldSize=3)
    (Path(shared_dir) / "sick").touch()
    fault = job.wait("FullyScaled", status="False", reason="NodeFault")
    job.wait_status(worldSize=2)
    (avoided,) = fault["status"]["avoidedNodes"]
    assert (avoided["name"], avoided["reason"]) == (SICK, "DeviceUnhealthy")
    job.wait_pods(lambda pods: nodes_of(pods) == {"node1", "node3"}, timeout=60, what=f"the job leaves {SICK}")

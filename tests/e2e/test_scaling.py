"""The number of nodes follows `kubectl scale` and the capacity of the cluster."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.cluster.jobs import Job, end_soon, kubectl, manifest, slow_digits
from support.cluster.kube import Json, Kube, condition
from support.cluster.logbook import LogBook

Submit = Callable[[Json], Job]
Follow = Callable[[Job], LogBook]


def test_scale_up_and_down_while_training(
    submit: Submit, follow: Follow, shared_dir: str, cluster_dir: Path, namespace: str
) -> None:
    elastic = {"minReplicas": 2, "maxReplicas": 4}
    job = submit(slow_digits("scaled", shared_dir, replicas=2, elasticPolicy=elastic))
    book = follow(job)
    book.wait_step(5, timeout=120)
    for nodes in (4, 3):
        moment = time.time()
        kubectl(cluster_dir, "scale", "-n", namespace, "elasticjob/scaled", f"--replicas={nodes}")
        book.wait_steps_after(moment, world=nodes, timeout=120)
        job.wait_status(worldSize=nodes, targetReplicas=nodes)
        job.wait("FullyScaled", reason="AtDesiredReplicas")
    end_soon(shared_dir)
    job.wait("Complete", timeout=240)
    assert job.status()["restarts"] == 0


@pytest.mark.takes_turns("room")
def test_replicas_beyond_the_capacity_of_the_cluster(submit: Submit, follow: Follow, shared_dir: str) -> None:
    job = submit(
        slow_digits(
            "greedy", shared_dir,
            replicas=4, elasticPolicy={"minReplicas": 2, "maxReplicas": 4},
            resources={"requests": {"cpu": "1100m", "memory": "256Mi"}},
        )
    )  # fmt: skip
    book = follow(job)
    book.wait_step(5, timeout=120)
    full = condition(job.wait("FullyScaled", status="False", reason="InsufficientCapacity"), "FullyScaled")
    assert "Insufficient cpu" in full["message"]
    job.wait_status(worldSize=3)
    end_soon(shared_dir)
    job.wait("Complete", timeout=180)


@pytest.mark.takes_turns("gpus")
def test_gpu_pods_run_on_nodes_with_free_gpus(
    submit: Submit, kube: Kube, gpus: Callable[[str, int], None], namespace: str
) -> None:
    gpus("node1", 2)
    script = "import os, time; print('rank', os.environ['RANK'], os.environ['LOCAL_WORLD_SIZE'], flush=True)"
    job = submit(
        manifest("gpu", ["python3", "-c", script], replicas=2, preload=[], resources={"limits": {"nvidia.com/gpu": 2}})
    )
    waiting = condition(job.wait("Running", status="False", reason="Unschedulable"), "Running")
    assert "Insufficient nvidia.com/gpu" in waiting["message"]
    gpus("node3", 2)
    job.wait("Complete")
    nodes = {p["spec"]["nodeName"] for p in job.pods()}
    assert nodes == {"node1", "node3"}
    logs = "".join(kube.logs(p["metadata"]["name"], namespace) for p in job.pods())
    assert all(f"rank {rank} 2" in logs for rank in range(4))

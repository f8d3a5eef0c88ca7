"""Jobs on a cluster that has no room for all of their pods. Three pods of `ROOM` fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.cluster.jobs import ROOM, Job, manifest
from support.cluster.kube import Json, Kube, condition

pytestmark = pytest.mark.takes_turns("room")

Submit = Callable[[Json], Job]
FOR_EVER = "import time; time.sleep(600)"


def python(name: str, script: str, **spec: Any) -> Json:
    return manifest(name, ["python3", "-c", script], preload=[], resources=ROOM, **spec)


def pending(job: Job) -> list[str]:
    """Return the names of the job's worker pods that have no machine."""
    return [p["metadata"]["name"] for p in job.pods() if "nodeName" not in p["spec"]]


def test_a_job_does_without_pods_that_have_no_room_until_there_is_room(
    submit: Submit, kube: Kube, namespace: str
) -> None:
    holder = submit(python("holder", FOR_EVER, replicas=1))
    holder.wait("Running")
    policy = {"minReplicas": 1, "maxReplicas": 4, "faultyScaleDownSeconds": 3, "scaleUpStabilizationSeconds": 0}
    job = submit(python("greedy", FOR_EVER, replicas=4, elasticPolicy=policy))
    full = condition(job.wait_status(targetReplicas=2, worldSize=2, replicas=3), "FullyScaled")
    assert (full["status"], full["reason"]) == ("False", "InsufficientCapacity")
    assert "status.targetReplicas is 2" in full["message"]
    assert len(pending(job)) == 1
    assert job.read()["spec"]["replicas"] == 4
    kube.delete("elasticjobs", "holder", namespace)
    job.wait_status(targetReplicas=3, worldSize=3, replicas=4)
    assert job.status()["restarts"] == 0


def test_a_job_below_its_minimum_gives_its_pods_to_another_job_and_comes_back(
    submit: Submit, kube: Kube, namespace: str
) -> None:
    holder = submit(python("holder", FOR_EVER, replicas=1))
    holder.wait("Running")
    patient = submit(python("patient", "print('done')", replicas=3, waitForMinSeconds=4))
    patient.wait("Running", status="False", reason="Unschedulable")
    other = submit(python("other", "print('done')", replicas=2))
    running = condition(patient.wait("Running", status="False", reason="BackedOff"), "Running")
    assert "The operator tries again at " in running["message"]
    other.wait("Complete")
    kube.delete("elasticjobs", "holder", namespace)
    patient.wait("Complete")
    assert "backOff" not in patient.status()

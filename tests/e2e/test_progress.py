"""What the script reports of its training is in status and in the columns of kubectl."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from support.cluster.jobs import Job, kubectl, manifest
from support.cluster.kube import Json, Kube

Submit = Callable[[Json], Job]
STEPS = """
import time, elasticjob
for step in range(1, 76):
    time.sleep(0.2)
    elasticjob.progress(step, total=75, metrics={"loss": 1 / step})
"""


def test_progress_is_in_status_while_the_job_trains_and_at_its_end(
    submit: Submit, kube: Kube, cluster_dir: Path, namespace: str
) -> None:
    job = submit(manifest("trains", ["python3", "-c", STEPS], replicas=1, preload=[]))

    def trains(found: Json) -> bool:
        return bool(0 < found.get("status", {}).get("trainerStatus", {}).get("progressPercentage", 0) < 100)

    middle = kube.wait("elasticjobs", job.name, namespace, trains, timeout=60, what="the progress of a running job")
    assert 0 < middle["status"]["trainerStatus"]["estimatedRemainingSeconds"] < 60
    last = job.wait("Complete", timeout=60)["status"]["trainerStatus"]
    assert last.pop("lastUpdatedTime")
    assert last == {
        "step": 75, "progressPercentage": 100, "estimatedRemainingSeconds": 0,
        "metrics": [{"name": "loss", "value": "0.0133333"}],
    }  # fmt: skip
    header, row = kubectl(cluster_dir, "get", "ej", "trains", "-n", namespace).splitlines()
    assert dict(zip(header.split(), row.split(), strict=True))["PROGRESS"] == "100"

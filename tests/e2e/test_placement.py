"""Where pods are: packed on one machine, or spread over the places that labels of machines name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.install import install
from support.jobs import Job, manifest
from support.kube import Json, Kube

Submit = Callable[[Json], Job]
BLOCK = "example.com/block"


def label(kube: Kube, nodes: list[str], block: str | None) -> None:
    """Set the label of these machines; None removes it."""
    for node in nodes:
        kube.patch("nodes", node, {"metadata": {"labels": {BLOCK: block}}})


@pytest.fixture(scope="module")
def blocks(kube: Kube, cluster_dir: Path) -> Iterator[list[str]]:
    """The names of the machines, with an operator that knows the label of their blocks; no machine has it yet."""
    install(kube, cluster_dir, f"topologyLabels={{{BLOCK}}}")
    nodes = sorted(node["metadata"]["name"] for node in kube.list("nodes"))
    yield nodes
    label(kube, nodes, None)
    install(kube, cluster_dir)


def machines(job: Job) -> list[str]:
    """Return the machine of each worker pod, by index."""
    return [pod["spec"]["nodeName"] for pod in job.pods()]


def job_of(name: str, replicas: int, **spec: object) -> Json:
    return manifest(name, ["python3", "-c", "pass"], replicas=replicas, preload=[], **spec)


def test_a_packed_job_is_on_one_machine(submit: Submit) -> None:
    job = submit(job_of("packed", 4, placement="Packed"))
    job.wait("Complete")
    assert len(machines(job)) == 4
    assert len(set(machines(job))) == 1


def test_a_job_is_spread_over_blocks_not_over_machines(submit: Submit, kube: Kube, blocks: list[str]) -> None:
    label(kube, blocks[:2], "a")
    label(kube, blocks[2:], "b")
    job = submit(job_of("spread", 6, placement="Spread"))
    job.wait("Complete")
    assert Counter("a" if machine in blocks[:2] else "b" for machine in machines(job)) == {"a": 3, "b": 3}

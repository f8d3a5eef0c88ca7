"""Where pods are: ranks that follow the labels of machines, and pods that are packed or spread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import pytest

from support.cluster.install import install
from support.cluster.jobs import DIGITS, Job, manifest
from support.cluster.kube import Json, Kube

Submit = Callable[[Json], Job]
BLOCK = "example.com/block"
RANK = ["python3", "-c", "import os; print('group rank', os.environ['GROUP_RANK'])"]


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
    return manifest(name, RANK, replicas=replicas, preload=[], **spec)


@pytest.mark.takes_turns("room")
def test_a_packed_job_is_on_one_machine(submit: Submit) -> None:
    job = submit(job_of("packed", 4, placement="Packed"))
    job.wait("Complete")
    assert len(machines(job)) == 4
    assert len(set(machines(job))) == 1


@pytest.mark.alone
def test_a_job_is_spread_over_blocks_not_over_machines(submit: Submit, kube: Kube, blocks: list[str]) -> None:
    label(kube, blocks[:2], "a")
    label(kube, blocks[2:], "b")
    job = submit(job_of("spread", 6, placement="Spread"))
    job.wait("Complete")
    assert Counter("a" if machine in blocks[:2] else "b" for machine in machines(job)) == {"a": 3, "b": 3}


@pytest.mark.alone
def test_nodes_of_one_block_have_neighbouring_ranks(
    submit: Submit, kube: Kube, namespace: str, blocks: list[str], shared_dir: str
) -> None:
    """The machines of the first and of the third pod are one block, so that the order of indices is another one."""
    label(kube, blocks, None)
    gate = {"name": "gate", "mountPath": "/gate"}
    volumes = [{"name": "gate", "hostPath": {"path": shared_dir, "type": "Directory"}}]
    body = job_of("ranks", 5, volumes=volumes)
    spread = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"}
    closed = ["sh", "-c", "until test -e /gate/open; do sleep 0.1; done"]
    body["spec"]["template"] = {
        "metadata": {"labels": {"app": "ranks"}},
        "spec": {
            **body["spec"]["template"]["spec"],
            "initContainers": [{"name": "gate", "image": DIGITS, "command": closed, "volumeMounts": [gate]}],
            "topologySpreadConstraints": [{**spread, "labelSelector": {"matchLabels": {"app": "ranks"}}}],
        },
    }
    job = submit(body)
    placed = lambda pod: bool(pod["spec"].get("nodeName"))  # noqa: E731
    for index in range(5):
        kube.wait("pods", f"ranks-{index}-0", namespace, placed, timeout=60, what="the pods have machines")
    where = machines(job)
    first, _, third = dict.fromkeys(where)
    label(kube, [first, third], "a")
    (Path(shared_dir) / "open").touch()
    job.wait("Complete")
    logs = {index: kube.logs(f"ranks-{index}-0", namespace, "trainer") for index in range(5)}
    ranks = {index: int(log.partition("group rank ")[2][0]) for index, log in logs.items()}
    by_rank = [where[index] in (first, third) for index in sorted(ranks, key=lambda index: ranks[index])]
    assert sorted(ranks.values()) == list(range(5))
    assert ranks[0] == 0
    assert len([*groupby(by_rank)]) == 2, f"in one block or not, by rank: {by_rank}; by index: {where}"

"""Manifests for local runs: the fields that are read, and the message for each mistake."""

from __future__ import annotations

from typing import Any

import pytest

from elasticjob.contract.names import Backend
from elasticjob.local.manifest import ManifestError, parse_local_job
from support.local_run import manifest


def job(container: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    raw: Any = manifest(["python", "train.py"], **spec)
    raw["spec"]["template"]["spec"]["containers"][0].update(container or {})
    return dict(raw)


def test_defaults_are_those_of_the_api() -> None:
    raw = job()
    del raw["spec"]["preload"]
    local = parse_local_job(raw)
    settings = local.settings
    assert (settings.min_nodes, settings.max_nodes, settings.target, settings.max_restarts) == (1, 1, 1, 3)
    assert (settings.join_timeout, settings.stop_grace, settings.scale_up_stabilization) == (600, 1, 30)
    assert (local.nproc_per_node, local.preload) == (1, ("torch", "torch._dynamo"))
    assert local.command == ("python", "train.py")


ELASTIC = {"minReplicas": 2, "maxReplicas": 4}


@pytest.mark.parametrize(
    ("spec", "nodes", "expected"),
    [
        ({"replicas": 3}, None, (3, 3, 3)),
        ({"replicas": 3}, 2, (2, 2, 2)),
        ({"elasticPolicy": ELASTIC}, None, (2, 4, 4)),
        ({"elasticPolicy": ELASTIC, "replicas": 3}, None, (2, 4, 3)),
        ({"elasticPolicy": ELASTIC, "replicas": 3}, 2, (2, 4, 2)),
    ],
)
def test_replicas(spec: dict[str, Any], nodes: int | None, expected: tuple[int, int, int]) -> None:
    settings = parse_local_job(job(**spec), nodes=nodes).settings
    assert (settings.min_nodes, settings.max_nodes, settings.target) == expected


def test_the_graceful_shutdown_time_is_read() -> None:
    assert parse_local_job(job(elasticPolicy={**ELASTIC, "gracefulShutdownSeconds": 7})).settings.graceful_shutdown == 7
    assert parse_local_job(job()).settings.graceful_shutdown == 120


def test_spares() -> None:
    assert parse_local_job(job(elasticPolicy={**ELASTIC, "spares": 2})).settings.desired_pods == 6
    with pytest.raises(ManifestError, match=r"elasticPolicy\.spares: want a whole number from 0 to 64, got 65"):
        parse_local_job(job(elasticPolicy={**ELASTIC, "spares": 65}))


def test_the_trainer_container_is_read_and_variables_expand_as_in_kubernetes() -> None:
    raw = job()
    raw["spec"]["template"]["spec"]["containers"] = [
        {"name": "sidecar", "command": ["no"]},
        {
            "name": "trainer",
            "command": ["python", "$(FILE)"],
            "args": ["--a", "$$(FILE)", "$(OTHER)"],
            "env": [{"name": "DIR", "value": "/x"}, {"name": "FILE", "value": "$(DIR)/t.py"}],
            "workingDir": "/tmp",
            "resources": {"limits": {"nvidia.com/gpu": 2}},
        },
    ]
    local = parse_local_job(raw)
    assert local.command == ("python", "/x/t.py", "--a", "$(FILE)", "$(OTHER)")
    assert local.working_dir == "/tmp"
    assert local.nproc_per_node == 2


def test_backend_and_role() -> None:
    assert (parse_local_job(job()).backend, parse_local_job(job()).role) == (Backend.ELASTICJOB, "")
    raw = job(rendezvous={"backend": "c10d"})
    raw["spec"]["template"]["metadata"] = {"annotations": {"elasticjob.dev/worker-role": "trainer"}}
    assert (parse_local_job(raw).backend, parse_local_job(raw).role) == (Backend.C10D, "trainer")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (None, "apiVersion: is required"),
        ([], "manifest: want an object, got []"),
        ({**job(), "apiVersion": "v1"}, "apiVersion: want elasticjob.dev/v1alpha1, got 'v1'"),
        ({**job(), "metadata": {"name": "A_b"}}, "metadata.name: 'A_b': lower-case letters, digits and '-'"),
        ({**job(), "spec": 3}, "spec: want an object, got 3"),
        (job(replicas="2"), "spec.replicas: want a whole number from 1 to 4096, got '2'"),
        (job(replicas=True), "spec.replicas: want a whole number from 1 to 4096, got True"),
        (job(replicas=5, elasticPolicy=ELASTIC), "spec.replicas: 5 must be within minReplicas, 2, and maxReplicas, 4"),
        (job(elasticPolicy={"minReplicas": 3, "maxReplicas": 2}), "spec.elasticPolicy.minReplicas: 3 is more than"),
        (job(elasticPolicy={"minReplicas": 3}), "spec.elasticPolicy.maxReplicas: is required"),
        (job(nprocPerNode=0), "spec.nprocPerNode: want a whole number from 1 to 64, got 0"),
        (job(preload="torch"), "spec.preload: want a list, got 'torch'"),
        (job(rendezvous={"backend": "etcd"}), "spec.rendezvous.backend: want elasticjob or c10d, got 'etcd'"),
        (job(stopGraceSeconds=-1), "spec.stopGraceSeconds: want seconds from 0 to 3600, got -1"),
        (job(failurePolicy={"maxRestarts": -1}), "spec.failurePolicy.maxRestarts: want a whole number"),
        (
            job({"command": None}),
            "spec.template.spec.containers[0].command: is required, for example [python, train.py]",
        ),
        (job({"args": [1]}), "spec.template.spec.containers[0].args[0]: want text, got 1; put it in quotes"),
        (job({"env": [{"name": "A", "valueFrom": {}}]}), "env[0].valueFrom: cannot be resolved outside a cluster"),
    ],
)
def test_each_mistake_has_a_message(raw: Any, message: str) -> None:
    with pytest.raises(ManifestError) as caught:
        parse_local_job(raw)
    assert message in str(caught.value)

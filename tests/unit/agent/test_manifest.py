"""Manifests for local runs: the fields that are read, and the message for each mistake."""

from __future__ import annotations

from typing import Any

import pytest

from elasticjob._runtime.contract.failures.failure_rules import FailureAction, FailureRule
from elasticjob._runtime.contract.names import Backend
from elasticjob._runtime.local.manifest.manifest import ManifestError, parse_local_job
from support.local.run import manifest


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
        ({"replicas": 3, "elasticPolicy": {"spares": 1}}, None, (3, 3, 3)),
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
    with pytest.raises(ManifestError, match=r"elasticPolicy\.spares: Invalid value: 65: .* less than or equal to 64"):
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
        ({**job(), "metadata": {"name": "A_b"}}, "metadata.name must start with a letter and have only a-z, 0-9"),
        ({**job(), "spec": 3}, 'spec in body must be of type object: "integer"'),
        (job(replicas="2"), 'spec.replicas in body must be of type integer: "string"'),
        (job(replicas=True), 'spec.replicas in body must be of type integer: "boolean"'),
        (job(replicas=5, elasticPolicy=ELASTIC), "spec: replicas is above elasticPolicy.maxReplicas: lower replicas"),
        (
            job(elasticPolicy={"minReplicas": 3, "maxReplicas": 2}),
            "spec.elasticPolicy: elasticPolicy.minReplicas is above max",
        ),
        (
            job(elasticPolicy={"minReplicas": 3}),
            "spec.elasticPolicy: elasticPolicy needs both minReplicas and maxReplicas",
        ),
        (job(nprocPerNode=0), "spec.nprocPerNode: nprocPerNode must be a number from 1 to 64"),
        (job(preload="torch"), 'spec.preload in body must be of type array: "string"'),
        (
            job(rendezvous={"backend": "etcd"}),
            'backend: Unsupported value: "etcd": supported values: "elasticjob", "c10d"',
        ),
        (job(stopGraceSeconds=-1), "spec.stopGraceSeconds: Invalid value: -1"),
        (job(failurePolicy={"maxRestarts": -1}), "spec.failurePolicy.maxRestarts: Invalid value: -1"),
        (
            job({"command": None}),
            'spec.template.spec.containers[0].command in body must be of type array: "null"',
        ),
        (job({"args": [1]}), "spec.template.spec.containers[0].args[0] in body must be of type string"),
        (job(suspend=True), "spec.suspend: nothing of a suspended job runs: remove it, or set it to false"),
        (
            job({"env": [{"name": "A", "valueFrom": {}}]}),
            "containers[0].env[0].valueFrom: cannot be resolved outside a cluster",
        ),
    ],
)
def test_each_mistake_has_a_message(raw: Any, message: str) -> None:
    with pytest.raises(ManifestError) as caught:
        parse_local_job(raw)
    assert message in str(caught.value)


def test_failure_rules_reach_the_coordinator() -> None:
    rule = {"name": "user-error", "action": "FailJob", "onExitCodes": {"operator": "In", "values": [2, 3]}}
    expected = FailureRule("user-error", FailureAction.FAIL_JOB, exit_codes=(2, 3))
    assert parse_local_job(job(failurePolicy={"rules": [rule]})).settings.failure_rules == (expected,)


def test_the_restart_window_reaches_the_coordinator() -> None:
    assert parse_local_job(job()).settings.restart_window == 0
    assert parse_local_job(job(failurePolicy={"restartWindowSeconds": 9})).settings.restart_window == 9


def test_the_wait_before_a_restart_reaches_the_coordinator() -> None:
    settings = parse_local_job(job(failurePolicy={"backoffSeconds": 9})).settings
    assert (settings.backoff, settings.max_backoff) == (9, 300)
    assert parse_local_job(job(failurePolicy={"maxBackoffSeconds": 60})).settings.max_backoff == 60


def test_nodes_are_within_the_limits_of_the_job() -> None:
    with pytest.raises(ManifestError, match="--nodes: 5 must be within minReplicas, 2, and maxReplicas, 4"):
        parse_local_job(job(elasticPolicy=ELASTIC), nodes=5)
    with pytest.raises(ManifestError, match="--nodes: 0 must be within 1 and 4096"):
        parse_local_job(job(), nodes=0)


def test_an_open_number_of_workers_is_left_to_the_agent() -> None:
    assert parse_local_job(job()).nproc_is_default
    assert not parse_local_job(job(nprocPerNode=1)).nproc_is_default
    option = {"name": "N", "value": "--nproc_per_node=3"}
    asked = parse_local_job(job({"command": ["torchrun", "$(N)", "t.py"], "env": [option]}))
    assert (asked.nproc_per_node, asked.nproc_is_default) == (3, False)

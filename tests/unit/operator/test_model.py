"""Parsing of jobs, specs, status and pods: defaults, and no input that raises."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticjob._runtime.contract.commands.worker_count import quantity
from elasticjob._runtime.contract.messages import Outcome
from elasticjob_operator.model.cluster.pods import parse_pod
from elasticjob_operator.model.cluster.raw import moment, timestamp
from elasticjob_operator.model.job.spec import GangProvider, parse_spec, read_spec
from elasticjob_operator.model.job.status import parse_status
from elasticjob_operator.model.observed import Observed, parse_job
from elasticjob_operator.plan import plan
from support.common.examples import examples
from support.operator.build import declared, ended, job, raw_job, raw_pod, worker


def container(**resources: Any) -> dict[str, Any]:
    main = {"name": "main", "image": "i", "command": ["python", "t.py"], "resources": resources}
    return {"spec": {"containers": [main]}}


@pytest.mark.parametrize(
    ("nproc", "resources", "expected"),
    [
        (None, {}, 1),
        ("auto", {"limits": {"nvidia.com/gpu": "2"}}, 2),
        ("gpu", {"requests": {"amd.com/gpu": 4}}, 4),
        ("auto", {"requests": {"nvidia.com/gpu": "2"}, "limits": {"nvidia.com/gpu": "2"}}, 2),
        ("cpu", {"limits": {"cpu": "1500m"}}, 2),
        ("cpu", {}, 1),
        (3, {"limits": {"nvidia.com/gpu": "8"}}, 3),
        ("5", {}, 5),
    ],
)
def test_workers_per_node(nproc: Any, resources: dict[str, Any], expected: int) -> None:
    assert parse_spec({"nprocPerNode": nproc, "template": container(**resources)}).nproc_per_node == expected


def test_defaults() -> None:
    spec = parse_spec({"template": container()})
    assert (spec.target, spec.min_replicas, spec.max_replicas, spec.port, spec.stop_grace) == (1, 1, 1, 29400, 1)
    assert (spec.preload, spec.max_restarts, spec.join_timeout) == (("torch", "torch._dynamo"), 3, 600)
    assert parse_spec({"template": container(), "preload": []}).preload == ()


@pytest.mark.parametrize(("replicas", "target"), [(2, 2), (4, 2), (5, 5), (7, 5), (8, 8), (None, 8)])
def test_a_target_between_two_steps_is_rounded_down(replicas: int | None, target: int) -> None:
    policy = {"minReplicas": 2, "maxReplicas": 8, "replicaIncrementStep": 3}
    spec = parse_spec({"template": container(), "elasticPolicy": policy, "replicas": replicas})
    assert (spec.target, spec.settings.increment) == (target, 3)


def test_a_job_of_a_fixed_size_has_spares_and_a_limit_of_planned_ends() -> None:
    policy = {"spares": 2, "gracefulShutdownSeconds": 7, "replicaIncrementStep": 1}
    spec = parse_spec({"template": container(), "elasticPolicy": policy, "replicas": 3})
    assert (spec.min_replicas, spec.target, spec.max_replicas, spec.spares) == (3, 3, 3, 2)
    assert spec.settings.graceful_shutdown == 7
    assert parse_spec({"template": container(), "elasticPolicy": policy}).target == 1


@pytest.mark.parametrize("written", ["None", "none", None])
def test_no_gang_is_written_in_two_ways(written: str | None) -> None:
    spec = parse_spec({"template": container(), "gang": {"provider": written}})
    assert spec.gang is GangProvider.NONE


@pytest.mark.parametrize(
    ("own", "refused"),
    [({}, False), ({"restartPolicy": "Never"}, False), ({"restartPolicy": "Always"}, True),
     ({"restartPolicy": "OnFailure"}, True), ({"restartPolicy": "Never", "restartPolicyRules": []}, True)],
)  # fmt: skip
def test_a_trainer_that_its_kubelet_restarts_is_refused(own: dict[str, Any], refused: bool) -> None:
    template = container()
    template["spec"]["containers"][0] |= own
    _, error = read_spec({"template": template})
    assert ("has a restartPolicy or restartPolicyRules of its own: remove them" in error) is refused


@pytest.mark.parametrize(("grace", "stop_grace", "planned"), [(None, 1, 24), (600, 1, 594), (0, 1, 0), (None, 40, 0)])
def test_a_planned_end_takes_no_longer_than_the_kubelet_gives_a_pod(
    grace: int | None, stop_grace: int, planned: int
) -> None:
    template = container()
    template["spec"]["terminationGracePeriodSeconds"] = grace
    spec = parse_spec({"template": template, "stopGraceSeconds": stop_grace})
    assert spec.settings.graceful_shutdown == planned


@pytest.mark.parametrize(
    ("policy", "requested", "planned", "grace"),
    [({}, None, 120, 126), ({}, 600, 120, 600), ({"gracefulShutdownSeconds": 0}, None, 0, 30),
     ({"gracefulShutdownSeconds": 300}, 30, 300, 306)],
)  # fmt: skip
def test_the_kubelet_gives_a_pod_longer_than_a_planned_end_may_take(
    policy: dict[str, int], requested: int | None, planned: int, grace: int
) -> None:
    template = container()
    template["spec"]["terminationGracePeriodSeconds"] = requested
    elastic = {"minReplicas": 1, "maxReplicas": 2, **policy}
    spec = parse_spec({"template": template, "elasticPolicy": elastic})
    assert (spec.settings.graceful_shutdown, spec.termination_grace) == (planned, grace)


@pytest.mark.parametrize(
    ("written", "value"), [("500m", 0.5), ("4", 4.0), (2, 2.0), ("2Gi", 2.0**31), ("x", 0.0), (None, 0.0), (True, 0.0)]
)
def test_quantities(written: Any, value: float) -> None:
    assert quantity(written) == value


def test_timestamps_survive_a_round_trip() -> None:
    assert moment({"t": timestamp(12.345678, precise=True)}, "t") == pytest.approx(12.345678, abs=1e-6)
    assert moment({"t": timestamp(12.9)}, "t") == 12.0
    assert moment({"t": "yesterday"}, "t") is None


def test_a_pod_ends_when_its_trainer_container_ends() -> None:
    raw = raw_pod(0, container={"name": "side", "state": {"terminated": {"exitCode": 1}}})
    assert parse_pod(raw).end is None
    done = worker(0, **ended(0, "Completed", declared(Outcome.SUCCEEDED)))
    assert done.end is not None
    assert done.end.outcome is Outcome.SUCCEEDED


@pytest.mark.parametrize("message", ["", "{", "[]", '{"outcome": "Won"}', '{"outcome": 1, "reason": 2}', "x" * 5000])
def test_an_unreadable_termination_message_declares_no_outcome(message: str) -> None:
    pod = worker(0, **ended(1, termination=message))
    assert pod.end is not None
    assert (pod.end.outcome, len(pod.end.message) <= 1024) == (None, True)


def test_the_end_of_a_killed_container_names_the_signal() -> None:
    pod = worker(0, **ended(137, "OOMKilled"))
    assert pod.end is not None
    assert (pod.end.signal, pod.end.reason) == ("SIGKILL", "OOMKilled")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
STATUS_FIELDS = (
    "incarnations", "rendezvous", "chargedRound", "restarts", "conditions", "avoidedNodes", "suspectNodes",
    "incarnationRanges", "lastChargedRound", "chargedFailures", "uncountedFailures", "scaledDown", "goodput",
    "lastFailure", "defaults", "chargedOutages", "failedStarts", "startFailures", "lastStartFailureTime",
    "recentFailures", "targetReplicas", "lastRendezvousTime", "runtimeImage", "rendezvousRound", "executionAttempts",
)  # fmt: skip
SPEC_FIELDS = (
    "replicas",
    "nprocPerNode",
    "elasticPolicy",
    "rendezvous",
    "preload",
    "failurePolicy",
    "stopGraceSeconds",
)


@examples(200)
@given(st.dictionaries(st.sampled_from(STATUS_FIELDS), JSON), st.dictionaries(st.sampled_from(SPEC_FIELDS), JSON))
def test_no_status_or_spec_makes_a_plan_crash(status: dict[str, Any], spec: dict[str, Any]) -> None:
    parse_status(status)
    plan(Observed(parse_job(raw_job(status=status, **spec))), "image", 0.0)


@examples(100)
@given(st.dictionaries(st.sampled_from(("metadata", "spec", "status")), JSON))
def test_no_pod_makes_the_model_crash(raw: dict[str, Any]) -> None:
    parse_pod(raw)
    assert job().name == "bert"

"""Pods that end after SIGTERM: only evidence that Kubernetes took the pod keeps the end from being charged.

A kubelet also stops a pod for the pod's own fault: a livenessProbe or a postStart hook failed, or the template's
activeDeadlineSeconds are over. Such an end comes again with each successor, so maxRestarts must bound it.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from elasticjob._runtime.contract.messages import EndReason, FailureClass, Outcome, RoundPhase, Termination
from elasticjob._runtime.contract.names import Role, RoundId
from elasticjob_operator.kube import EVENTS, Refused, Resource
from elasticjob_operator.model.cluster.pods import Pod, parse_pod
from elasticjob_operator.model.observed import Observed
from elasticjob_operator.observation import observe as observe_module
from elasticjob_operator.observation.stop_causes import MAX_READS, StopCauses, stop_cause
from elasticjob_operator.plan.failure_policy.failures import pod_record
from support.operator.build import (
    NOW,
    Raw,
    conditions_of,
    ended,
    events_of,
    failed_init,
    failure,
    gathering,
    job,
    round_ended,
    run,
    status,
    status_of,
    steady,
    worker,
)
from support.operator.cluster import Cluster
from support.operator.world import job_status

ROUND = RoundId(1, 0, 1)
LIVENESS = "Liveness probe failed: HTTP probe failed with statuscode: 500"
KILLING = "Container main failed liveness probe"


def left(reason: str = "NodeLeft", message: str = "SIGTERM", **more: Any) -> Termination:
    """Return the termination message of an agent that left; by default the coordinator has answered."""
    return Termination(Outcome.LEFT, reason, ROUND, message, **more)


def event(pod: Pod, reason: str, message: str, at: int = 0, container: str = "main") -> dict[str, Any]:
    """Return an Event of a kubelet about a container, as `kubectl get events -o json` shows it."""
    return {
        "metadata": {"name": f"{pod.name}.{reason}.{at}"}, "reason": reason, "message": message,
        "involvedObject": {"kind": "Pod", "uid": pod.uid, "fieldPath": f"spec.containers{{{container}}}"},
        "lastTimestamp": f"2026-01-01T00:00:{at:02}Z",
    }  # fmt: skip


def observed(pod: Pod, **fields: Any) -> Observed:
    other = worker(1, node="n2")
    spec = {name: fields.pop(name) for name in ("failurePolicy",) if name in fields}
    seen = steady(workers=(pod, other), last_report=gathering(other, rounds=1))
    return replace(seen, job=job(status=status(rendezvousRound=1, **fields), **spec))


TAKEN = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
SIGTERM = ended(143, termination=left())
DEADLINE = {"status": {"reason": "DeadlineExceeded", "message": "Pod was active on the node longer than the deadline"}}

ENDS: list[tuple[str, Raw, bool]] = [
    ("the coordinator has answered", SIGTERM, True),
    ("the coordinator has not answered", ended(143, termination=left("SIGTERM", "")), True),
    ("another signal of the image", ended(143, termination=left(message="SIGINT")), True),
    ("before the agent could write why", ended(143), True),
    ("killed after its grace", ended(137), True),
    ("its deadline", SIGTERM | DEADLINE, True),
    ("its deadline, killed", ended(137) | DEADLINE, True),
    ("a worker had failed before", ended(143, termination=left(failure=failure())), True),
    ("a DisruptionTarget that is not true", SIGTERM | {"conditions": [TAKEN | {"status": "False"}]}, True),
    ("deleted", SIGTERM | {"deleting": NOW + 20}, False),
    ("evicted", SIGTERM | {"conditions": [TAKEN]}, False),
    ("its node shuts down", SIGTERM | {"status": {"reason": "Terminated"}}, False),
    ("its node shuts down, an older kubelet", SIGTERM | {"status": {"reason": "NodeShutdown"}}, False),
    ("a critical pod needs the room", SIGTERM | {"status": {"reason": "Preempting"}}, False),
    ("the operator deletes it", ended(143, termination=left(message="its pod is being deleted")), False),
    ("restartStrategy Recreate", ended(143, termination=left(message="a worker of its round failed")), False),
    ("released", ended(143, termination=left("RendezvousClosed", "the job ends")), False),
    ("superseded", ended(76, termination=Termination(Outcome.SUPERSEDED, "Superseded", ROUND)), False),
    ("the job has ended", ended(143, termination=Termination(Outcome.SUCCEEDED, "SIGTERM", ROUND, "SIGTERM")), False),
    (
        "its node is unhealthy",
        ended(143, termination=left("DeviceUnhealthy: GPU", failure=failure(kind=FailureClass.DEVICE_UNHEALTHY))),
        False,
    ),
]


@pytest.mark.parametrize(("name", "end", "charged"), ENDS, ids=[row[0] for row in ENDS])
def test_a_pod_that_leaves_after_a_signal_is_charged_unless_kubernetes_took_it(
    name: str, end: Raw, charged: bool
) -> None:
    p = run(observed(worker(0, **end)))
    status_ = p.status or {}
    assert status_.get("restartsCountTowardsMax", 0) == int(charged)
    assert ("WorkerFailed" in events_of(p)) == charged


def test_the_budget_bounds_pods_that_their_kubelet_stops() -> None:
    p = run(observed(worker(0, **SIGTERM), restarts=1, restartsCountTowardsMax=1, failurePolicy={"maxRestarts": 1}))
    target = conditions_of(p)["FailureTarget"]
    assert (target["status"], target["reason"]) == ("True", "MaxRestartsExceeded")


def test_the_deadline_of_the_template_is_named_and_a_rule_matches_it() -> None:
    rules = [{"name": "long", "action": "FailJob", "onReasons": ["DeadlineExceeded"]}]
    p = run(observed(worker(0, **(SIGTERM | DEADLINE)), failurePolicy={"rules": rules}))
    last = status_of(p)["lastFailure"]
    assert (last["reason"], last["exitCode"], last["rule"]) == ("DeadlineExceeded", 143, "long")
    assert "longer than the deadline (activeDeadlineSeconds of the template limits each pod;" in last["message"]
    assert conditions_of(p)["FailureTarget"]["reason"] == "FailurePolicyRule"


def test_a_deadline_before_the_trainer_starts_is_a_failed_start() -> None:
    end = failed_init()
    end["status"] |= DEADLINE["status"]
    p = run(replace(observed(worker(0, **end)), link=steady().link))
    status_ = status_of(p)
    assert (status_["failedStarts"], status_["lastFailure"]["reason"]) == (1, "DeadlineExceeded")
    assert "restartsCountTowardsMax" not in status_ or status_["restartsCountTowardsMax"] == 0


@pytest.mark.parametrize("reported", [True, False], ids=["with the end of the round", "after it"])
def test_the_condition_does_not_say_that_the_pod_was_evicted(reported: bool) -> None:
    ends = (round_ended(1, EndReason.NODE_LEFT),) if reported else ()
    seen = observed(worker(0, **SIGTERM))
    other = worker(1, node="n2")
    last = gathering(other, rounds=1, ended_rounds=ends, phase=RoundPhase.GATHERING)
    restarting = conditions_of(run(replace(seen, link=replace(seen.link, report=last))))["Restarting"]
    assert (restarting["status"], restarting["reason"]) == ("True", "WorkerFailed")
    assert "bert-0-0 on n1 failed: SIGTERM: a signal from outside ended the agent" in restarting["message"]


POD = worker(0, **SIGTERM)

CAUSES: list[tuple[str, list[Raw], tuple[str, str]]] = [
    ("no Events", [], ("", "")),
    ("a livenessProbe", [event(POD, "Unhealthy", LIVENESS, 1), event(POD, "Killing", KILLING, 2)],
     ("Unhealthy", LIVENESS)),
    ("the newest message of the probe",
     [event(POD, "Unhealthy", LIVENESS, 3), event(POD, "Killing", KILLING, 4),
      event(POD, "Unhealthy", "Liveness probe failed: old", 1)], ("Unhealthy", LIVENESS)),
    ("a startupProbe",
     [event(POD, "Unhealthy", "Startup probe failed: no", 1),
      event(POD, "Killing", "Container main failed startup probe", 2)], ("Unhealthy", "Startup probe failed: no")),
    ("a probe whose own Event is missing", [event(POD, "Killing", KILLING)], ("Unhealthy", KILLING)),
    ("a livenessProbe of the pod's last container",
     [event(POD, "Killing", "Stopping container main", 2), event(POD, "Unhealthy", LIVENESS, 2)],
     ("Unhealthy", LIVENESS)),
    ("a livenessProbe that failed long before",
     [event(POD, "Killing", "Stopping container main", 9), event(POD, "Unhealthy", LIVENESS, 2)], ("", "")),
    ("a probe that failed once", [event(POD, "Unhealthy", LIVENESS)], ("", "")),
    ("a readinessProbe", [event(POD, "Unhealthy", "Readiness probe failed: no"),
                          event(POD, "Killing", "Stopping container main", 1)], ("", "")),
    ("a probe of a sidecar", [event(POD, "Killing", "Container proxy failed liveness probe", container="proxy")],
     ("", "")),
    ("a postStart hook", [event(POD, "FailedPostStartHook", "PostStartHook failed"),
                          event(POD, "Killing", "FailedPostStartHook", 1)],
     ("FailedPostStartHook", "PostStartHook failed")),
    ("fields of other types",
     [{"reason": 3, "message": ["x"], "involvedObject": "pod", "lastTimestamp": {}}, {}], ("", "")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "events", "cause"), CAUSES, ids=[row[0] for row in CAUSES])
def test_the_event_for_which_a_kubelet_stopped_the_trainer(
    name: str, events: list[Raw], cause: tuple[str, str]
) -> None:
    assert stop_cause(POD, events) == cause


def test_last_failure_has_the_reason_and_the_message_of_the_kubelet() -> None:
    causes = StopCauses()
    assert causes.to_read([POD]) == (POD,)
    causes.record(POD, [event(POD, "Killing", KILLING, 2), event(POD, "Unhealthy", LIVENESS, 1)])
    assert causes.to_read([POD]) == (), "they are read once"
    (pod,) = causes.applied([POD])
    rules = [{"name": "probe", "action": "RestartGroupAndIgnoreMaxRestarts", "onReasons": ["Unhealthy"]}]
    p = run(observed(pod, failurePolicy={"rules": rules}))
    last = status_of(p)["lastFailure"]
    assert (last["reason"], last["message"], last["class"], last["rule"]) == ("Unhealthy", LIVENESS, "Killed", "probe")
    assert [e.message for e in p.event_records if e.reason == "FailurePolicyMatched"] == [
        f"failurePolicy rule probe matched: bert-0-0 on n1 failed: Unhealthy (SIGTERM): {LIVENESS} (exit code 143); "
        "the workers restart, which does not count towards maxRestarts"
    ]


@pytest.mark.parametrize(
    "pod",
    [
        pytest.param(worker(0), id="runs"),
        pytest.param(worker(0, **ended(1)), id="exited"),
        pytest.param(worker(0, **ended(137, "OOMKilled")), id="out of memory"),
        pytest.param(worker(0, **SIGTERM, deleting=NOW + 20), id="deleted"),
        pytest.param(worker(0, **SIGTERM, conditions=[TAKEN]), id="evicted"),
        pytest.param(worker(0, **(SIGTERM | DEADLINE)), id="known"),
        pytest.param(worker(0, **ended(143, termination=left(message="its pod is being deleted"))), id="released"),
    ],
)
def test_no_events_are_read_about_other_pods(pod: Pod) -> None:
    assert StopCauses().to_read([pod]) == ()


def test_the_events_of_a_bounded_number_of_pods_are_read_at_a_time() -> None:
    pods, causes = [worker(i, **SIGTERM) for i in range(3 * MAX_READS)], StopCauses()
    first = causes.to_read(pods)
    assert len(first) == MAX_READS
    for pod in first:
        causes.record(pod, [])
    assert not {*first} & {*causes.to_read(pods)}


def test_a_long_message_of_a_probe_is_cut() -> None:
    (pod,) = (replace(POD, end=replace(POD.end, own_fault="Unhealthy", message="x" * 10**6)) for _ in [0] if POD.end)
    assert len(pod_record(pod, NOW)["message"]) <= 1024


@pytest.mark.parametrize("readable", [True, False])
async def test_a_pod_that_its_livenessprobe_stops_is_charged_with_or_without_its_events(
    readable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(failurePolicy={"maxRestarts": 1})
    await cluster.reconcile()
    if not readable:  # the operator has the role of an older chart

        async def refuse(resource: Resource, *arguments: Any, listed: Any = cluster.api.list, **fields: Any) -> Any:
            if resource is EVENTS:
                raise Refused("events is forbidden", 403)
            return await listed(resource, *arguments, **fields)

        monkeypatch.setattr(cluster.api, "list", refuse)
    for round_number in (1, 2):
        raw = next(p for p in cluster.api.pods(Role.WORKER) if p.get("status", {}).get("phase") != "Failed")
        raw["spec"]["nodeName"] = "n1"
        name = raw["spec"]["containers"][0]["name"]
        end = ended(143, termination=replace(left(), round=RoundId(1, 0, round_number)))
        end["container"]["name"] = name
        raw["status"] = {"phase": "Failed", "containerStatuses": [end["container"]]}
        pod = parse_pod(raw)
        cluster.api.put(EVENTS, event(pod, "Killing", f"Container {name} failed liveness probe", container=name))
        await cluster.reconcile_for(1)
        found = job_status(cluster.api)
        assert found["restartsCountTowardsMax"] == 1
        assert found["lastFailure"]["reason"] == ("Unhealthy" if readable else "Error")
    target = next(c for c in job_status(cluster.api)["conditions"] if c["type"] in ("FailureTarget", "Failed"))
    assert (target["status"], target["reason"]) == ("True", "MaxRestartsExceeded")


@pytest.mark.parametrize(("exit_code", "reason"), [(255, "Unknown"), (137, "ContainerStatusUnknown")])
def test_a_reboot_is_no_fault_of_the_pod(exit_code: int, reason: str) -> None:
    """The kubelet that starts again finds no container; the agent's message is from before the machine went down."""
    left = Termination(Outcome.LEFT, "NodeLeft", RoundId(1, 0, 1), "SIGTERM")
    pod = worker(0, **ended(exit_code, reason, left))
    assert pod.end is not None
    assert not pod.end.left_on_signal


async def test_events_that_are_slow_to_read_do_not_keep_failed_pods_from_their_successors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(replicas=4, failurePolicy={"maxRestarts": 5})
    await cluster.reconcile()
    pods = cluster.api.pods(Role.WORKER)
    for raw in pods:
        raw["spec"]["nodeName"] = "n1"
        end = ended(143, termination=left())
        end["container"]["name"] = raw["spec"]["containers"][0]["name"]
        raw["status"] = {"phase": "Failed", "containerStatuses": [end["container"]]}
    answered, failed = parse_pod(pods[0]), {raw["metadata"]["name"] for raw in pods}
    waiting = 0

    async def slow(resource: Resource, *arguments: Any, listed: Any = cluster.api.list, fields: str = "") -> Any:
        nonlocal waiting
        if resource is not EVENTS:
            return await listed(resource, *arguments, fields=fields)
        if answered.uid in fields:
            return [event(answered, "Killing", KILLING, container=answered.trainer)]
        waiting += 1
        await asyncio.Event().wait()
        raise AssertionError("it is never set")

    monkeypatch.setattr(cluster.api, "list", slow)
    monkeypatch.setattr(observe_module, "STOP_CAUSE_SECONDS", 0.1)
    await asyncio.wait_for(cluster.reconcile_for(1), 10.0)
    assert waiting == len(failed) - 1, "each is asked about once, all at the same time"
    found = job_status(cluster.api)
    assert found["restartsCountTowardsMax"] == 1
    assert found["lastFailure"]["reason"] == "Unhealthy"
    assert {*cluster.workers()} - failed, "their successors are created"

"""What a job says while its pods are refused, cannot be placed or do not start: the reason, and a change that helps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticjob._runtime.contract.messages import RoundPhase
from elasticjob_operator.kube import Refused
from elasticjob_operator.model.cluster.pods import Pod
from elasticjob_operator.model.observed import Observed, Refusal, RefusalReason, Remedy
from elasticjob_operator.observation.job_memory import JobMemory
from support.operator.build import (
    NOW,
    Raw,
    condition,
    conditions_of,
    elastic,
    failed_init,
    gathering,
    job,
    report,
    run,
    status,
    status_of,
    steady,
    unschedulable,
    worker,
)
from support.operator.cluster import Cluster
from support.operator.world import job_status

CHANGE = "set suspend to true in the same change, and to false once the job is suspended"
ROOM = "0/3 nodes are available: 3 Insufficient cpu."
SELECTOR = "0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector."
CLAIM = '0/3 nodes are available: persistentvolumeclaim "nope" not found.'


def waits(reason: str, message: str) -> Raw:
    """Return the arguments for a pod whose container waits for this reason."""
    return {"phase": "Pending", "container": {"state": {"waiting": {"reason": reason, "message": message}}}}


def starting(*pods: Pod, **fields: Any) -> Observed:
    """Return a job of two nodes that has not trained yet."""
    return steady(workers=pods, last_report=gathering(*(p for p in pods if p.running)), **fields)


def refused(reason: RefusalReason, remedy: Remedy) -> Observed:
    """Return a job whose second pod the API server refuses."""
    refusal = Refusal(reason, "create pods bert-1-0: no.", NOW + 5, NOW, remedy)
    return replace(starting(worker(0)), refusals={"bert-1-0": refusal})


@pytest.mark.parametrize(
    ("observed", "running", "scaled", "advice"),
    [
        (
            refused(RefusalReason.POD_CREATION_FAILED, Remedy.CORRECT_SPEC),
            "PodCreationFailed",
            "PodCreationFailed",
            f"no. Correct the template: {CHANGE}",
        ),
        (
            refused(RefusalReason.POD_CREATION_FAILED, Remedy.EITHER),
            "PodCreationFailed",
            "PodCreationFailed",
            f"no. The operator tries again. If the template is wrong, correct it: {CHANGE}",
        ),
        (
            refused(RefusalReason.QUOTA_EXCEEDED, Remedy.EITHER),
            "QuotaExceeded",
            "InsufficientCapacity",
            "no. The operator tries again until the quota has room",
        ),
        (
            starting(worker(0), worker(1, **unschedulable(ROOM))),
            "Unschedulable",
            "InsufficientCapacity",
            "Insufficient cpu",
        ),
        (
            starting(worker(0), worker(1, **unschedulable(SELECTOR))),
            "Unschedulable",
            "Unschedulable",
            f"If the template asks for the wrong thing, correct it: {CHANGE}",
        ),
        (
            starting(worker(0), worker(1, **unschedulable(CLAIM))),
            "Unschedulable",
            "Unschedulable",
            f"If the template asks for the wrong thing, correct it: {CHANGE}",
        ),
        (
            starting(worker(0), worker(1, **waits("ErrImagePull", "no such host."))),
            "ImagePullFailed",
            "ImagePullFailed",
            "bert-1-0 cannot pull image user:1: no such host. Push the image, or correct its name or imagePullSecrets "
            f"in the template: {CHANGE}",
        ),
        (
            starting(worker(0), worker(1, **waits("CreateContainerConfigError", 'configmap "nope" not found'))),
            "PodStartFailed",
            "PodStartFailed",
            f"not found. Create what is missing, or correct the template: {CHANGE}",
        ),
    ],
    ids=["invalid", "forbidden", "quota", "no room", "selector", "claim", "image", "config map"],
)
def test_a_job_that_cannot_start_says_what_to_change(
    observed: Observed, running: str, scaled: str, advice: str
) -> None:
    found = conditions_of(run(observed))
    assert (found["Running"]["reason"], found["FullyScaled"]["reason"]) == (running, scaled)
    assert found["FullyScaled"]["message"].startswith("none of 2 pods trains yet; ")
    for message in (found["Running"]["message"], found["FullyScaled"]["message"]):
        assert advice in message
    room = (running, scaled) == ("Unschedulable", "InsufficientCapacity")
    assert found["Running"]["message"].endswith("The job continues once the cluster has room") == room


@pytest.mark.parametrize(
    ("pod", "reason"),
    [
        (worker(1, **unschedulable(ROOM)), "InsufficientCapacity"),
        (worker(1, **unschedulable(SELECTOR)), "Unschedulable"),
        (worker(1, **waits("ImagePullBackOff", "x")), "ImagePullFailed"),
        (worker(1, **waits("CreateContainerConfigError", "x")), "PodStartFailed"),
    ],
    ids=["no room", "selector", "image", "config map"],
)
@pytest.mark.parametrize("trains", [False, True], ids=["below the minimum", "above it"])
def test_each_problem_is_one_event(pod: Pod, reason: str, trains: bool) -> None:
    observed = starting(worker(0), pod)
    if trains:
        observed = steady(workers=(worker(0), pod), last_report=report(worker(0)))
        observed = replace(observed, job=job(status=observed.job.status.raw, **elastic(1, 2)))
    p = run(observed)
    found = {e.reason: e for e in p.event_records}
    assert (found[reason].warning, found[reason].message) == (True, conditions_of(p)["FullyScaled"]["message"])
    again = run(replace(observed, job=job(status=status_of(p), **(elastic(1, 2) if trains else {}))))
    assert reason not in [e.reason for e in again.event_records]


def test_a_missing_config_map_is_an_event_also_after_an_init_container_has_failed() -> None:
    failed = run(starting(worker(0, **failed_init()), worker(1)))
    assert conditions_of(failed)["FullyScaled"]["reason"] == "PodStartFailed"
    stuck = worker(1, **waits("CreateContainerConfigError", 'configmap "nope" not found'))
    observed = replace(starting(worker(0, **failed_init()), stuck), job=job(status=status_of(failed)))
    p = run(observed)
    (event,) = [e for e in p.event_records if e.reason == "PodStartFailed"]
    assert 'bert-1-0 does not start: container main: CreateContainerConfigError: configmap "nope"' in event.message
    assert p.write_delay == 0, "the next reconcile would record the Event again"
    again = run(replace(observed, job=job(status=status_of(p))))
    assert "PodStartFailed" not in [e.reason for e in again.event_records]


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (Refused("spec.containers[0].image: Required value", 422), Remedy.CORRECT_SPEC),
        (Refused("failed quota: compute: must specify cpu for: trainer", 403), Remedy.CORRECT_SPEC),
        (Refused('violates PodSecurity "restricted:latest"', 403), Remedy.CORRECT_SPEC),
        (Refused('error looking up service account: serviceaccount "nope" not found', 403), Remedy.EITHER),
    ],
)
async def test_a_refused_pod_has_a_remedy(monkeypatch: pytest.MonkeyPatch, error: Refused, remedy: Remedy) -> None:
    cluster = Cluster()
    create = cluster.api.create

    async def refusing(kind: Any, namespace: str, body: Raw) -> Any:
        if body["metadata"]["name"] in ("bert-0-0", "bert-1-0"):
            raise error
        return await create(kind, namespace, body)

    monkeypatch.setattr(cluster.api, "create", refusing)
    await cluster.reconcile_for(3.0)
    await cluster.recorder.flush()
    events = [raw for (resource, _), raw in cluster.api.objects.items() if resource.plural == "events"]
    (failed,) = [event for event in events if event["reason"] == "FailedCreatePod"]
    for message in (failed["message"], cluster.running()["message"]):
        assert CHANGE in message
        assert ("The operator tries again" in message) == (remedy is Remedy.EITHER)
    assert "InsufficientCapacity" not in [event["reason"] for event in events]


def test_a_pod_that_was_not_tried_has_no_remedy_of_its_own() -> None:
    memory = JobMemory("uid")
    memory.record_skipped("bert-0-0", "Secret/bert-rdzv: no", NOW)
    assert memory.refusals["bert-0-0"].remedy is Remedy.WAIT


@pytest.mark.parametrize(
    ("error", "running", "scaled", "advice"),
    [
        (
            Refused("exceeded quota: compute", 403),
            "QuotaExceeded",
            "InsufficientCapacity",
            "The operator tries again until the quota has room",
        ),
        (
            Refused("spec.containers[0].resources: Invalid value", 422),
            "PodCreationFailed",
            "PodCreationFailed",
            f"Correct rendezvous.store: {CHANGE}",
        ),
    ],
    ids=["quota", "invalid"],
)
async def test_conditions_agree_while_the_store_is_refused_and_so_no_worker_is_tried(
    monkeypatch: pytest.MonkeyPatch, error: Refused, running: str, scaled: str, advice: str
) -> None:
    cluster = Cluster()
    create = cluster.api.create

    async def refusing(kind: Any, namespace: str, body: Raw) -> Any:
        if body["kind"] == "Pod" and body["metadata"]["name"].startswith("bert-rdzv-"):
            raise error
        return await create(kind, namespace, body)

    monkeypatch.setattr(cluster.api, "create", refusing)
    await cluster.reconcile_for(6.0)
    found = {c["type"]: c for c in job_status(cluster.api)["conditions"]}
    assert (found["Running"]["reason"], found["FullyScaled"]["reason"]) == (running, scaled)
    assert found["Running"]["message"].endswith(advice)
    assert found["FullyScaled"]["message"].endswith(advice)
    assert cluster.workers() == []


# ---- the start of a job


def test_while_nodes_import_no_message_says_that_they_train() -> None:
    importing = replace(starting(worker(0), worker(1)), job=job(status=status()))
    reason = "0 of at least 2 pods available"
    nodes = tuple(replace(node, ready=False, member=False) for node in report(worker(0), worker(1)).nodes)
    last_report = gathering(worker(0), worker(1), reason=reason, nodes=nodes)
    p = run(replace(importing, link=replace(importing.link, report=last_report)))
    found = conditions_of(p)
    assert found["Running"]["message"] == f"starting: {reason}"
    assert found["FullyScaled"]["message"] == (
        "none of 2 pods trains yet; the pods are starting: each imports the modules of spec.preload first"
    )
    assert status_of(p)["ready"] == 0


@pytest.mark.parametrize("trained", [False, True])
def test_while_workers_start_the_messages_agree(trained: bool) -> None:
    pods = (worker(0), worker(1))
    last_report = report(*pods, formed_at=0.0, phase=RoundPhase.RUNNING, reason="2 nodes training")
    fields: Raw = {"rendezvousRound": 1, "conditions": [condition("Restarting")]} if trained else {}
    found = conditions_of(run(steady(workers=pods, last_report=last_report, **fields)))
    active = "training on 0 of 2 pods" if trained else "none of 2 pods trains yet"
    assert found["Running"]["message"] == "the workers of 2 pods are starting"
    assert found["FullyScaled"]["message"] == f"{active}; the workers of 2 pods are starting"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (ROOM, "InsufficientCapacity"),
        ("0/3 nodes are available: 3 node(s) were unschedulable.", "InsufficientCapacity"),
        ("0/3 nodes are available: 3 node(s) had untolerated taint(s) {node.kubernetes.io/not-ready: }.",
         "InsufficientCapacity"),
        ("0/3 nodes are available: 3 node(s) had untolerated taint {node.kubernetes.io/unreachable: }.",
         "InsufficientCapacity"),
        ("0/3 nodes are available: 3 node(s) didn't match pod anti-affinity rules.", "InsufficientCapacity"),
        ("0/3 nodes are available: 3 node(s) didn't match pod topology spread constraints.", "InsufficientCapacity"),
        ("no nodes available to schedule pods", "InsufficientCapacity"),
        (SELECTOR, "Unschedulable"),
        (CLAIM, "Unschedulable"),
        ("0/3 nodes are available: 3 node(s) had untolerated taint {dedicated: search}.", "Unschedulable"),
    ],
)  # fmt: skip
def test_only_what_the_template_may_have_wrong_has_advice(message: str, reason: str) -> None:
    found = conditions_of(run(starting(worker(0), worker(1, **unschedulable(message)))))
    assert found["FullyScaled"]["reason"] == reason
    assert ("correct it" in found["Running"]["message"]) == (reason == "Unschedulable")
    assert "The job continues once" in found["Running"]["message"]

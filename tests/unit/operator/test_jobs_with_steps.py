"""A job whose pods above its minimum are steps in a queue of Kueue: its Workloads, and what it does about each."""

from __future__ import annotations

from typing import Any

import pytest

from elasticjob_operator import manifests
from elasticjob_operator.kube import JOBS
from elasticjob_operator.kube.api import KUEUE_WORKLOADS, RESOURCE_FLAVORS, WORKLOAD_PRIORITY_CLASSES
from elasticjob_operator.model.cluster.workload import STEP, parse_workload, queue_view
from elasticjob_operator.model.observed import parse_job
from support.operator.build import Raw, condition, elastic, raw_job
from support.operator.cluster import Cluster
from support.operator.world import Node, job_status

LABEL, ANNOTATION = "kueue.x-k8s.io/queue-name", "elasticjob.dev/step-priority-class"
BASE, STEPS = "elasticjob-bert-11111", ("elasticjob-bert-11111-s0", "elasticjob-bert-11111-s1")
RESERVED, ADMITTED = condition("QuotaReserved"), condition("Admitted")
EVICTED = condition("Evicted", reason="Preempted") | {"message": "for job urgent"}


def stepped(value: int | None = -1, annotations: Raw | None = None) -> Cluster:
    """Return a cluster with a job of 2 to 4 pods in a queue, and the class of its steps with this priority."""
    cluster = Cluster(**elastic(2, 4, 4))
    meta = cluster.api.objects[JOBS, "bert"]["metadata"]
    meta["labels"], meta["annotations"] = {LABEL: "team-a"}, {ANNOTATION: "low", **(annotations or {})}
    if value is not None:
        cluster.api.put(WORKLOAD_PRIORITY_CLASSES, {"metadata": {"name": "low"}, "value": value})
    return cluster


def workloads(cluster: Cluster) -> dict[str, Raw]:
    return {name: raw for (kind, name), raw in cluster.api.objects.items() if kind is KUEUE_WORKLOADS}


def decide(cluster: Cluster, name: str, *conditions: Raw, admitted: bool = False, flavor: str = "") -> None:
    """Write conditions of a Workload as Kueue does, and with `admitted` the quota of all its pods."""
    found = workloads(cluster)[name]
    kept = {c["type"]: c for c in (*found.get("status", {}).get("conditions", []), *conditions)}
    changed: Raw = {**found.get("status", {}), "conditions": [*kept.values()]}
    if admitted:
        assigned: Raw = {"name": "worker", "count": found["spec"]["podSets"][0]["count"]}
        changed["admission"] = {"podSetAssignments": [assigned | ({"flavors": {"cpu": flavor}} if flavor else {})]}
    cluster.api.put(KUEUE_WORKLOADS, {**found, "status": changed})


def admit(cluster: Cluster, name: str, flavor: str = "") -> None:
    decide(cluster, name, RESERVED, ADMITTED, condition("Evicted", value=False), admitted=True, flavor=flavor)


async def live(cluster: Cluster, turns: int = 8) -> None:
    """Let kubelets, agents and the operator do what they have to."""
    cluster.world.nodes = {"a": Node("a")}
    for _ in range(turns):
        cluster.world.run_pods()
        cluster.world.run_rounds(2)
        await cluster.reconcile_for(1.0)


async def with_all_steps(cluster: Cluster) -> Cluster:
    """Let the job train on 4 pods."""
    await live(cluster)
    admit(cluster, BASE)
    await live(cluster)
    for name in STEPS:
        admit(cluster, name)
    await live(cluster)
    assert len(cluster.workers()) == 4
    return cluster


def is_true(raw: Raw, kind: str) -> bool:
    return any(c["type"] == kind and c["status"] == "True" for c in raw["status"]["conditions"])


def message(cluster: Cluster, kind: str) -> str:
    return str(next(c["message"] for c in job_status(cluster.api)["conditions"] if c["type"] == kind))


# ---- the objects


async def test_the_job_asks_for_its_minimum_and_then_for_each_step_with_a_lower_priority() -> None:
    cluster = stepped()
    await live(cluster)
    (base,) = workloads(cluster).values()
    assert (base["spec"]["podSets"][0]["count"], "minCount" in base["spec"]["podSets"][0]) == (2, False)
    assert cluster.workers() == []
    admit(cluster, BASE)
    await live(cluster)
    assert len(cluster.workers()) == 2
    found = workloads(cluster)
    assert sorted(found) == [BASE, *STEPS]
    for index, name in enumerate(STEPS):
        meta, spec = found[name]["metadata"], found[name]["spec"]
        assert meta["annotations"] == base["metadata"]["annotations"] | {STEP: str(index)}
        assert meta["labels"] == base["metadata"]["labels"]
        assert meta["ownerReferences"] == base["metadata"]["ownerReferences"]
        assert (spec["queueName"], spec["priority"]) == ("team-a", -1)
        assert spec["priorityClassRef"] == {
            "group": "kueue.x-k8s.io", "kind": "WorkloadPriorityClass", "name": "low",
        }  # fmt: skip
        assert spec["podSets"] == [base["spec"]["podSets"][0] | {"count": 1}]


def test_the_longest_name_of_a_job_leaves_names_of_steps_that_are_values_of_labels() -> None:
    raw = raw_job()
    raw["metadata"]["name"] = "j" * 63
    job = parse_job(raw)
    assert len(manifests.step_name(job, 31)) <= 63
    assert manifests.step_name(job, 1) not in manifests.workload_names(job)


def test_a_view_tells_steps_from_the_workload_of_the_job() -> None:
    base: Raw = {"metadata": {"name": "b", "uid": "b"}}
    step: Raw = {"metadata": {"name": "s", "uid": "s", "annotations": {STEP: "3"}}}
    view = queue_view([parse_workload(step), parse_workload(base)])
    assert view.workload is not None
    assert (view.workload.name, {i: s.name for i, s in view.steps.items()}) == ("b", {3: "s"})


# ---- life


async def test_a_job_shrinks_by_the_step_that_is_evicted_and_grows_back() -> None:
    cluster = await with_all_steps(stepped())
    assert all(is_true(raw, "PodsReady") for raw in workloads(cluster).values())
    decide(cluster, STEPS[1], EVICTED)
    await cluster.reconcile()
    await cluster.reconcile()
    assert is_true(workloads(cluster)[STEPS[1]], "QuotaReserved"), "its pod has not ended"
    await live(cluster)
    assert len(cluster.workers()) == 3
    released = workloads(cluster)[STEPS[1]]
    assert not is_true(released, "QuotaReserved")
    assert "admission" not in released["status"]
    said = message(cluster, "FullyScaled")
    assert f"queue team-a has quota for 3 of 4 pods: Workload {STEPS[1]} was evicted (Preempted" in said
    assert said.endswith("; 1 of 2 steps admitted")
    admit(cluster, STEPS[1])
    await live(cluster)
    assert len(cluster.workers()) == 4
    assert (job_status(cluster.api)["executionAttempts"], job_status(cluster.api)["restarts"]) == (1, 0)


async def test_steps_end_with_the_pods_of_a_job_that_is_evicted_suspended_or_without_the_annotation() -> None:
    evicted = await with_all_steps(stepped())
    decide(evicted, BASE, EVICTED)
    await live(evicted)
    assert (evicted.workers(), sorted(workloads(evicted))) == ([], [BASE])
    suspended = await with_all_steps(stepped())
    suspended.change(suspend=True)
    await live(suspended)
    assert (suspended.workers(), workloads(suspended)) == ([], {})
    without = await with_all_steps(stepped())
    del without.api.objects[JOBS, "bert"]["metadata"]["annotations"][ANNOTATION]
    await live(without)
    assert (len(without.workers()), sorted(workloads(without))) == (2, [BASE])


async def test_a_step_of_another_flavor_is_deactivated_and_used_for_no_pod() -> None:
    cluster = stepped()
    cluster.api.put(RESOURCE_FLAVORS, {"metadata": {"name": "h100"}, "spec": {}})
    await live(cluster)
    admit(cluster, BASE, "h100")
    await live(cluster)
    admit(cluster, STEPS[0], "a100")
    await live(cluster)
    assert (len(cluster.workers()), workloads(cluster)[STEPS[0]]["spec"]["active"]) == (2, False)


async def test_a_job_that_scales_down_gives_steps_back() -> None:
    cluster = await with_all_steps(stepped())
    cluster.change(replicas=3)
    await live(cluster)
    assert (len(cluster.workers()), sorted(workloads(cluster))) == (3, [BASE, STEPS[0]])
    cluster.change(replicas=4)
    await live(cluster)
    assert (len(cluster.workers()), sorted(workloads(cluster))) == (3, [BASE, *STEPS])


async def test_a_job_whose_minimum_rises_above_its_workload_is_queued_again() -> None:
    cluster = await with_all_steps(stepped())
    cluster.change(elasticPolicy={"minReplicas": 3, "maxReplicas": 4})
    await live(cluster)
    assert (cluster.workers(), sorted(workloads(cluster))) == ([], [BASE])
    assert workloads(cluster)[BASE]["spec"]["podSets"][0]["count"] == 3


# ---- what is refused


@pytest.mark.parametrize(("value", "words"), [
    (0, "WorkloadPriorityClass low has the value 0, which is not below the job's own priority 0"),
    (None, "create this priority class"),
])  # fmt: skip
async def test_a_class_that_would_not_make_steps_go_first_is_refused(value: int | None, words: str) -> None:
    cluster = stepped(value)
    await live(cluster)
    admit(cluster, BASE)
    await live(cluster)
    assert (len(cluster.workers()), sorted(workloads(cluster))) == (2, [BASE])
    assert words in message(cluster, "FullyScaled")
    cluster.api.put(WORKLOAD_PRIORITY_CLASSES, {"metadata": {"name": "low"}, "value": -1})
    await live(cluster, turns=60)
    assert sorted(workloads(cluster)) == [BASE, *STEPS]


async def test_a_job_with_both_annotations_waits_and_says_why_and_one_that_runs_keeps_its_steps() -> None:
    both = {"kueue.x-k8s.io/elastic-job": "true"}
    cluster = stepped(annotations=both)
    await live(cluster)
    assert (cluster.workers(), workloads(cluster)) == ([], {})
    assert "remove one of them" in message(cluster, "Suspended")
    del cluster.api.objects[JOBS, "bert"]["metadata"]["annotations"]["kueue.x-k8s.io/elastic-job"]
    await with_all_steps(cluster)
    cluster.api.objects[JOBS, "bert"]["metadata"]["annotations"] |= both
    await live(cluster)
    assert (len(cluster.workers()), sorted(workloads(cluster))) == (4, [BASE, *STEPS])


def test_a_job_without_a_queue_has_no_steps() -> None:
    raw: dict[str, Any] = raw_job()
    raw["metadata"]["annotations"] = {ANNOTATION: "low", "kueue.x-k8s.io/elastic-job": "true"}
    job = parse_job(raw)
    assert (job.step_priority, job.queue_conflict, job.queue_elastic) == ("", False, True)

"""Evictions of worker pods by an EvictionRequest: pods leave as in a drain, and the operator reports that meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticjob._runtime.contract.names import Role
from elasticjob_operator.actions import AnswerEviction, CreateWorker, DeletePod, WritePolicy
from elasticjob_operator.kube import JOBS, PODS, KubeError
from elasticjob_operator.kube.api import EVICTIONS
from elasticjob_operator.manifests import add_responder, answered_status
from elasticjob_operator.model.cluster.evictions import RESPONDER, Eviction, parse_eviction
from elasticjob_operator.model.cluster.pods import Pod
from elasticjob_operator.model.cluster.raw import moment, timestamp
from elasticjob_operator.model.observed import DisruptionBudget, JobKey, Observed, Policies
from elasticjob_operator.plan import Plan, needs_fresh_read
from elasticjob_operator.plan.life_cycle.evictions import HEARTBEAT_SECONDS
from elasticjob_operator.settings import parse_settings
from elasticjob_operator.watch.watch_cache import WatchCache
from support.operator.build import (
    NOW,
    Raw,
    condition,
    elastic,
    ended,
    events_of,
    job,
    report,
    run,
    status,
    status_of,
    steady,
    worker,
)
from support.operator.cluster import KEY, Cluster
from support.operator.world import Api

LAST = "imperative-eviction.k8s.io/evictor"


def raw_eviction(pod: str = "bert-0-0", state: str = "Active", **report: Any) -> Raw:
    """Return the Eviction of a pod of `bert`, as the API server has it; `report`: of the operator."""
    started = {"startTime": timestamp(NOW - 5)} if state != "Inactive" else {}
    return {
        "apiVersion": "lifecycle.k8s.io/v1alpha1",
        "kind": "Eviction",
        "metadata": {"namespace": "ns", "name": f"e-{pod}", "uid": f"e-{pod}", "resourceVersion": "7"},
        "spec": {"target": {"pod": {"name": pod, "uid": f"uid-{pod}"}}},
        "status": {
            "requesters": [{"name": "a.io/upgrade", "intent": "Eviction"}, {"name": "b.io/x", "intent": "Withdrawn"}],
            "targetResponders": [
                {"name": RESPONDER, "priority": 10000, "state": state},
                {"name": LAST, "priority": 100, "state": "Inactive"},
            ],
            "responders": [{"name": RESPONDER, **started, **report}, {"name": LAST}],
        },
    }


def eviction(pod: str = "bert-0-0", heartbeat: float = 0.0) -> Eviction:
    return Eviction(f"e-{pod}", f"e-{pod}", pod, f"uid-{pod}", ("a.io/upgrade",), heartbeat=heartbeat)


def asked(*pods: Pod, of: tuple[Eviction, ...] = (eviction(),), budget: int | None = 2, **more: Any) -> Observed:
    """Return a job with these worker pods and Evictions; `budget`: what its PodDisruptionBudget asks for.

    `spec` and `ready` (the pods that train) may be given; the rest are fields of its status.
    """
    spec, ready = more.pop("spec", {"replicas": 2}), more.pop("ready", pods)
    known = status(rendezvous={"incarnation": 0, "standby": 1, "round": "1.0.1"}, **more)
    observed = steady(workers=pods, last_report=report(*(p for p in ready if p.running)))
    policies = Policies(None if budget is None else DisruptionBudget("b", budget))
    return replace(observed, job=job(status=known, **spec), nodes_watched=True, evictions=of, policies=policies)


TWO = worker(0, node="n1"), worker(1, node="n2")
THREE = (*TWO, worker(2, node="n3"))
SPARE: Raw = elastic(2, 3, 3)
OF_THREE: Raw = {"spec": SPARE, "incarnations": "0,0,0", "targetReplicas": 3}


def created(p: Plan) -> list[str]:
    return [a.name for a in p.actions if isinstance(a, CreateWorker)]


def deleted(p: Plan) -> list[str]:
    return [a.name for a in p.actions if isinstance(a, DeletePod)]


def answers(p: Plan) -> list[tuple[str, bool]]:
    """Return the pods in whose Evictions the plan reports, and whether they have left."""
    return [(a.eviction.pod, a.completed) for a in p.actions if isinstance(a, AnswerEviction)]


# ---- decisions


def test_a_pod_that_the_job_can_spare_leaves_at_once_and_that_is_no_failure() -> None:
    p = run(asked(*THREE, **OF_THREE))
    assert (created(p), deleted(p), answers(p)) == (["bert-0-1"], ["bert-0-0"], [("bert-0-0", False)])
    messages = {e.reason: e.message for e in p.event_records}
    assert messages["EvictionRequested"] == "Eviction e-bert-0-0 of a.io/upgrade asks bert-0-0 to leave"
    assert messages["PodReplaced"].startswith(messages["EvictionRequested"])
    now = status_of(p)
    assert (now["restarts"], now["restartsCountTowardsMax"], "avoidedNodes" in now) == (0, 0, False)
    assert (now["lastFailure"]["class"], now["lastFailure"]["reason"]) == ("Preempted", "EvictionRequested")
    (answer,) = (a for a in p.actions if isinstance(a, AnswerEviction))
    assert answer.message == "bert-0-0 ends: its workers save, and another pod of job bert takes over"


def test_pods_leave_one_after_the_other_as_far_as_the_minimum_allows() -> None:
    both = eviction("bert-0-0"), eviction("bert-2-0")
    p = run(asked(*THREE, of=both, **OF_THREE))
    assert (deleted(p), answers(p)) == (["bert-2-0"], [("bert-0-0", False), ("bert-2-0", False)])


def test_a_job_with_no_pod_to_spare_starts_another_pod_before_one_leaves() -> None:
    first = run(asked(*TWO))
    assert (created(first), deleted(first), status_of(first)["cordonSpares"]) == (["bert-2-0"], [], 1)
    (event,) = (e for e in first.event_records if e.reason == "NodeCordoned")
    assert event.message.startswith("pods are asked to leave (bert-0-0): the job has 1 standby pod more, so that")
    (answer,) = (a for a in first.actions if isinstance(a, AnswerEviction))
    assert answer.message == "bert-0-0 ends as soon as 2 other pods of job bert are ready to train"

    known: Raw = {"incarnations": "0,0,0", "cordonSpares": 1, "budget": 3}
    reported = (eviction(heartbeat=NOW - 10),)
    starting = run(asked(*THREE, of=reported, ready=TWO, **known))
    assert (deleted(starting), answers(starting), "EvictionRequested" in events_of(starting)) == ([], [], False)

    joined = run(asked(*THREE, of=reported, **known))
    assert (created(joined), deleted(joined)) == (["bert-0-1"], ["bert-0-0"])

    successor = worker(0, 1, node="n4")
    over = run(asked(successor, *THREE[1:], of=reported, **known | {"incarnations": "1,0,0"}))
    assert (answers(over), deleted(over)) == ([("bert-0-0", True)], ["bert-2-0"])


def test_an_eviction_that_is_cancelled_takes_the_additional_pod_back() -> None:
    p = run(asked(*THREE, of=(), incarnations="0,0,0", cordonSpares=1))
    assert (deleted(p), "cordonSpares" in status_of(p)) == (["bert-2-0"], False)


@pytest.mark.parametrize(
    "more",
    [
        {"spec": {"replicas": 2, "disruptionBudget": False}},
        {"scaledDown": {"time": timestamp(NOW - 9), "indices": "2", "reason": "InsufficientCapacity"}},
    ],
    ids=["by its spec", "without room in the cluster"],
)
def test_a_pod_of_a_job_without_a_budget_leaves_below_the_minimum_as_by_any_other_eviction(more: Raw) -> None:
    p = run(asked(*TWO, budget=None, **more))
    assert (created(p), deleted(p)) == (["bert-0-1"], ["bert-0-0"])


def test_a_budget_that_is_not_known_yet_counts_as_one() -> None:
    unknown = replace(asked(*TWO), policies=Policies(known=False))
    assert deleted(run(unknown)) == []


def test_an_operator_that_watches_no_nodes_lets_the_pod_go_once_there_is_no_budget() -> None:
    observed = replace(asked(*TWO), nodes_watched=False)
    assert not any(isinstance(a, WritePolicy) for a in run(observed).actions)
    assert deleted(run(replace(observed, policies=Policies()))) == ["bert-0-0"]


@pytest.mark.parametrize("age", [0.0, HEARTBEAT_SECONDS - 1, HEARTBEAT_SECONDS, 2 * HEARTBEAT_SECONDS])
def test_an_eviction_that_waits_has_a_heartbeat_each_minute(age: float) -> None:
    p = run(asked(*TWO, of=(eviction(heartbeat=NOW - age),), cordonSpares=1, incarnations="0,0,0", budget=3))
    due = age >= HEARTBEAT_SECONDS
    assert answers(p) == ([("bert-0-0", False)] if due else [])
    assert p.requeue_after is not None
    assert p.requeue_after <= (HEARTBEAT_SECONDS if due else HEARTBEAT_SECONDS - age)


@pytest.mark.parametrize(
    ("pod", "left"),
    [
        (worker(0, deleting=NOW + 30), False),
        (worker(0, **ended(0, "Completed") | {"phase": "Running"}), False),
        (worker(0, **ended(0, "Completed")), True),
        (None, True),
    ],
    ids=["is being deleted", "a sidecar runs", "has ended", "is gone"],
)
def test_an_eviction_is_complete_once_its_pod_has_ended(pod: Pod | None, left: bool) -> None:
    pods = (worker(0, 1), worker(1)) if pod is None else (pod, worker(0, 1), worker(1))
    assert answers(run(asked(*pods, incarnations="1,0"))) == [("bert-0-0", left)]


@pytest.mark.parametrize(
    "observed",
    [
        asked(*TWO, spec={"replicas": 2, "suspend": True}),
        asked(*TWO, conditions=[condition("SuccessCriteriaMet")]),
    ],
    ids=["suspended", "ended"],
)
def test_an_eviction_is_answered_although_the_job_needs_its_pod_no_more(observed: Observed) -> None:
    p = run(observed)
    assert (answers(p), created(p)) == ([("bert-0-0", False)], [])


@pytest.mark.parametrize(("pod", "fresh"), [("bert-0-0", False), ("bert-7-0", True)], ids=["heartbeat", "completion"])
def test_only_a_report_that_a_pod_has_left_needs_a_fresh_read(pod: str, fresh: bool) -> None:
    observed = replace(asked(*TWO, of=(eviction(pod, NOW - 90),)), nodes_watched=None)
    p = run(observed)
    assert [type(a) for a in p.actions] == [AnswerEviction]
    assert (
        needs_fresh_read(replace(p, status=None), replace(observed, job=job(status=observed.job.status.raw))) is fresh
    )


# ---- objects


def test_an_eviction_is_the_operators_while_its_own_turn_lasts() -> None:
    found = parse_eviction(raw_eviction(heartbeatTime=timestamp(NOW)))
    assert found == Eviction("e-bert-0-0", "e-bert-0-0", "bert-0-0", "uid-bert-0-0", ("a.io/upgrade",), True, NOW)
    for turn in ("Inactive", "Interrupted", "Canceled", "Completed"):
        other = parse_eviction(raw_eviction(state=turn))
        assert other is not None
        assert not other.active
    done = parse_eviction(raw_eviction(completionTime=timestamp(NOW)))
    assert done is not None
    assert not done.active


@pytest.mark.parametrize(
    "status", [{"responders": []}, {"requesters": [{"name": "a", "intent": "Withdrawn"}]}], ids=str
)
def test_an_eviction_without_a_report_to_write_or_anybody_who_still_asks_is_left_alone(status: Raw) -> None:
    raw = raw_eviction()
    raw["status"] |= status
    found = parse_eviction(raw)
    assert found is not None
    assert not found.active


def test_an_eviction_of_a_pod_with_other_responders_is_none_of_the_operators() -> None:
    raw = raw_eviction()
    raw["status"]["targetResponders"].pop(0)
    assert parse_eviction(raw) is None
    assert parse_eviction({**raw_eviction(), "spec": {"target": {}}}) is None
    assert parse_eviction({}) is None


def test_a_report_changes_nothing_but_the_operators_own_entry() -> None:
    raw = raw_eviction()
    first = answered_status(raw, NOW, "m", completed=False)
    own, last = first["responders"]
    assert own == raw["status"]["responders"][0] | {"heartbeatTime": timestamp(NOW), "message": "m"}
    assert (last, {**first, "responders": []}) == ({"name": LAST}, {**raw["status"], "responders": []})
    done = answered_status({**raw, "status": first}, NOW + 9, "m", completed=True)["responders"][0]
    assert (done["heartbeatTime"], done["completionTime"]) == (timestamp(NOW + 9), timestamp(NOW + 9))


@pytest.mark.parametrize("known", [{"startTime": timestamp(NOW)}, {"heartbeatTime": timestamp(NOW)}])
def test_a_report_has_no_time_before_one_that_is_there(known: Raw) -> None:
    own = answered_status(raw_eviction(**known), NOW - 8, "m", completed=True)["responders"][0]
    assert [moment(own, name) for name in ("heartbeatTime", "completionTime")] == [NOW, NOW]


def test_worker_pods_name_the_operator_unless_they_are_in_a_pod_group() -> None:
    pod: Raw = {"spec": {}}
    add_responder(pod)
    assert pod["spec"] == {"evictionResponders": [{"name": RESPONDER, "priority": 10000}]}
    grouped: Raw = {"spec": {"schedulingGroup": {"podGroupName": "g"}}}
    add_responder(grouped)
    assert "evictionResponders" not in grouped["spec"]


# ---- the watch, and the requests


def test_the_job_of_an_eviction_is_reconciled_and_no_other_one_is() -> None:
    concerned: list[JobKey] = []
    cache = WatchCache(concerned.append, eviction_requests=True)
    cache.see_eviction(raw_eviction())
    assert ([e.pod for e in cache.evictions(KEY)], concerned) == (["bert-0-0"], [KEY])
    foreign = raw_eviction("web-7d9f-x")
    foreign["status"]["targetResponders"].pop(0)
    cache.see_eviction(foreign)
    cache.see_eviction(foreign, deleted=True)
    assert concerned == [KEY]
    canceled = raw_eviction(state="Canceled")
    canceled["metadata"]["resourceVersion"] = "8"
    cache.see_eviction(canceled)
    cache.see_eviction(raw_eviction())
    assert (cache.evictions(KEY), concerned) == ((), [KEY, KEY]), "an older version changes nothing"
    cache.see_eviction(canceled, deleted=True)
    assert concerned == [KEY, KEY, KEY]


async def test_a_list_finds_an_eviction_that_is_gone() -> None:
    api, cache = Api(NOW), WatchCache(eviction_requests=True)
    api.put(EVICTIONS, raw_eviction())
    await cache.list_resource(EVICTIONS, api, None)
    assert len(cache.evictions(KEY)) == 1
    api.remove(EVICTIONS, "e-bert-0-0")
    await cache.list_resource(EVICTIONS, api, None)
    assert cache.evictions(KEY) == ()


async def until_two_pods(cluster: Cluster) -> None:
    for _ in range(10):
        await cluster.reconcile()
        if len(cluster.workers()) == 2:
            return
    raise AssertionError("the job has no two pods")


async def test_pods_have_the_responder_only_if_the_operator_answers_evictions() -> None:
    for answers_them in (False, True):
        cluster = Cluster(replicas=2)
        cluster.controller.watched.eviction_requests = answers_them
        await until_two_pods(cluster)
        responders = ["evictionResponders" in pod["spec"] for pod in cluster.api.pods(Role.WORKER)]
        assert responders == [answers_them, answers_them]
        assert not any("evictionResponders" in pod["spec"] for pod in cluster.api.pods(Role.STORE))


async def test_the_report_is_in_the_eviction_and_is_not_repeated() -> None:
    cluster = Cluster(replicas=2)
    await until_two_pods(cluster)
    cache = cluster.controller.watched
    raw = raw_eviction("bert-9-0", startTime=timestamp(cluster.api.now))
    cluster.api.put(EVICTIONS, raw)
    cache.see_eviction(cluster.api.objects[EVICTIONS, "e-bert-9-0"])
    await cluster.reconcile()
    own = cluster.api.objects[EVICTIONS, "e-bert-9-0"]["status"]["responders"][0]
    assert (own["message"], "completionTime" in own) == ("bert-9-0 has ended", True)
    assert cache.evictions(KEY) == ()


@pytest.mark.parametrize(("missing", "retried"), [(True, False), (False, True)], ids=["deleted", "refused"])
async def test_a_report_that_fails_is_tried_again_unless_the_eviction_has_changed(
    missing: bool, retried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(replicas=2)
    await until_two_pods(cluster)
    cache, update = cluster.controller.watched, cluster.api.update
    refused: list[str] = []

    async def refuse(resource: Any, namespace: str, body: Any, subresource: str = "") -> Raw:
        if resource == EVICTIONS and not missing:
            refused.append(subresource)
            raise KubeError("the API server refuses it")
        return await update(resource, namespace, body, subresource)

    monkeypatch.setattr(cluster.api, "update", refuse)
    cache.see_eviction(raw_eviction("bert-9-0"))
    delay = await cluster.reconcile()
    assert (refused == ["status"]) is retried
    assert (delay <= 2.0) is retried
    assert cluster.api.objects[JOBS, "bert"]
    assert len([name for resource, name in cluster.api.objects if resource == PODS]) >= 2


@pytest.mark.parametrize(
    ("argv", "environ", "expected"),
    [([], {}, False), (["--eviction-requests"], {}, True), ([], {"EVICTION_REQUESTS": "true"}, True)],
)
def test_evictions_are_answered_only_on_request(argv: list[str], environ: dict[str, str], expected: bool) -> None:
    assert parse_settings(argv, environ).eviction_requests is expected

"""Plans for jobs with pods on machines whose end is announced, or that are cordoned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticjob._runtime.contract.messages import EndingPod, PodState
from elasticjob_operator.actions import CreateStore, CreateWorker, DeletePod
from elasticjob_operator.model.cluster.nodes import NodeWarning
from elasticjob_operator.model.observed import Observed
from elasticjob_operator.plan import Plan
from support.operator.build import (
    NOW,
    condition,
    conditions_of,
    elastic,
    ended,
    events_of,
    job,
    report,
    run,
    status,
    status_of,
    steady,
    store,
    unschedulable,
    worker,
)

NOTICE = "taint aws-node-termination-handler/spot-itn"


def noticed(*nodes: str) -> dict[str, NodeWarning]:
    return {name: NodeWarning(NOTICE) for name in nodes}


def deleted(p: Plan) -> list[str]:
    return [a.name for a in p.actions if isinstance(a, DeletePod)]


def created(p: Plan) -> list[CreateWorker]:
    return [a for a in p.actions if isinstance(a, CreateWorker)]


def apart(*workers: Any, **fields: Any) -> Observed:
    """Return a job whose store is on n5, its standby store on n6; `workers`: else one on n1 and one on n2."""
    pods = workers or (worker(0, node="n1"), worker(1, node="n2"))
    observed = steady(workers=pods, **fields)
    return replace(observed, stores=(store(node="n5"), store(1, node="n6")))


# ---- the end of a machine is announced


@pytest.mark.parametrize(
    "spec", [{"replicas": 2}, elastic(1, 4, 2), elastic(2, 4, 2)], ids=["fixed", "elastic", "at the minimum"]
)
def test_a_worker_leaves_a_machine_that_is_about_to_end_and_its_successor_avoids_it(spec: dict[str, Any]) -> None:
    observed = replace(apart(), job=job(status=status(), **spec), warnings=noticed("n1"))
    p = run(observed)
    assert created(p) == [CreateWorker("bert-0-1", 0, 1, ("n1",))]
    assert deleted(p) == ["bert-0-0"]
    (deletion,) = (a for a in p.actions if isinstance(a, DeletePod))
    assert (deletion.force, deletion.grace) == (False, None), "it has the grace period of the pod"
    assert p.operator_view is not None
    assert [(e.pod, e.state) for e in p.operator_view.pods] == [
        ("bert-0-1", PodState.STARTING),
        ("bert-1-0", PodState.RUNNING),
    ]


def test_leaving_is_not_charged_and_status_and_events_name_the_notice() -> None:
    p = run(replace(apart(), warnings=noticed("n1")))
    now = status_of(p)
    assert (now["restarts"], now["restartsCountTowardsMax"]) == (0, 0)
    assert (now["lastFailure"]["class"], now["lastFailure"]["reason"]) == ("Preempted", "NodeTerminating")
    assert (now["lastFailure"]["node"], now["lastFailure"]["pod"]) == ("n1", "bert-0-0")
    assert "avoidedNodes" not in now, "the machine is not avoided for longer than the notice lasts"
    messages = {e.reason: e.message for e in p.event_records}
    assert messages["NodeTerminating"] == f"n1 has the {NOTICE}: the job's pods leave it"
    assert NOTICE in messages["PodReplaced"]
    leaving = replace(
        apart(worker(0, deleting=NOW + 30, node="n1"), worker(0, 1, phase="Pending", node="n3"), worker(1, node="n2"),
              last_report=report(worker(1)), incarnations="1,0"),
        warnings=noticed("n1"),
    )  # fmt: skip
    after = run(leaving)
    assert f"bert-0-0 must leave: n1 has the {NOTICE}" in conditions_of(after)["FullyScaled"]["message"]
    assert (created(after), deleted(after), "NodeTerminating" in events_of(after)) == ([], [], False)


def test_a_cordon_alone_moves_no_pod() -> None:
    observed = replace(apart(), job=job(status=status(), **elastic(1, 4, 2)))
    cordoned = {"n1": NodeWarning(cordoned=True), "n5": NodeWarning(cordoned=True)}
    p = run(replace(observed, warnings=cordoned))
    assert (created(p), deleted(p)) == ([], [])


@pytest.mark.parametrize(
    "pod",
    [
        worker(0, node="n1", avoids="n1"),
        worker(0, **ended(0, "Completed"), node="n1"),
    ],
    ids=["placed there all the same", "has ended"],
)
def test_a_pod_that_cannot_leave_is_not_replaced_for_the_notice(pod: Any) -> None:
    p = run(replace(apart(pod, worker(1, node="n2")), warnings=noticed("n1")))
    assert "NodeTerminating" not in events_of(p)
    assert status_of(p).get("lastFailure", {}).get("reason") != "NodeTerminating"


def test_a_pod_without_room_asks_for_the_machine_again_once_the_notice_is_gone() -> None:
    waiting = worker(0, 1, **unschedulable(), avoids="n1")
    observed = apart(waiting, worker(1, node="n2"), last_report=report(worker(1)), incarnations="1,0")
    assert observed.node_names >= {"n1", "n2", "n5", "n6"}
    assert created(run(replace(observed, warnings=noticed("n1")))) == []
    assert created(run(observed)) == [CreateWorker("bert-0-2", 0, 2)]


def test_pod_replacement_policy_failed_awaits_the_end_of_the_pod_that_leaves() -> None:
    observed = replace(apart(), job=job(status=status(), podReplacementPolicy="Failed"), warnings=noticed("n1"))
    p = run(observed)
    assert (created(p), deleted(p), status_of(p)["incarnations"]) == ([], ["bert-0-0"], "1,0")


def test_the_store_learns_when_machines_with_worker_pods_end() -> None:
    timed = {
        "n1": NodeWarning(NOTICE, ends=((NOTICE, NOW + 120.0), ("annotation their/notice", NOW + 90.0))),
        "n2": NodeWarning(NOTICE),
        "n3": NodeWarning(NOTICE, ends=((NOTICE, NOW + 60.0),)),
    }
    leaving = worker(0, deleting=NOW + 30, node="n1")
    pods = (worker(0, 1, node="n3", avoids="n3"), leaving, worker(1, node="n2"), worker(2, **ended(0), node="n1"))
    observed = replace(apart(*pods, incarnations="1,0,0"), warnings=timed, nodes_watched=True)
    view = run(observed).operator_view
    assert view is not None
    assert view.ending_pods == (EndingPod("bert-0-0", NOW + 90.0), EndingPod("bert-0-1", NOW + 60.0))
    later = run(replace(observed, workers=tuple(reversed(pods))), NOW + 5).operator_view
    assert later is not None
    assert later.ending_pods == view.ending_pods, "the view stays the same while nothing changes"


@pytest.mark.parametrize(("watched", "ending"), [(True, ()), (None, None), (False, None)])
def test_an_operator_that_does_not_watch_nodes_says_nothing_of_their_ends(
    watched: bool | None, ending: tuple[EndingPod, ...] | None
) -> None:
    view = run(replace(apart(), nodes_watched=watched)).operator_view
    assert view is not None
    assert view.ending_pods == ending


# ---- stores


def test_a_store_leaves_a_machine_that_is_about_to_end_as_in_a_drain() -> None:
    p = run(replace(apart(), warnings=noticed("n5")))
    assert deleted(p) == ["bert-rdzv-0"]
    assert status_of(p)["rendezvous"]["incarnation"] == 0, "it serves until its nodes have moved"
    assert "NodeTerminating" in events_of(p)
    drained = apart()
    drained = replace(drained, stores=(store(node="n5", deleting=NOW + 30), drained.stores[1]), warnings=noticed("n5"))
    assert (deleted(run(drained)), "NodeTerminating" in events_of(run(drained))) == ([], False)


def test_a_standby_store_leaves_and_the_next_one_avoids_the_machine() -> None:
    p = run(replace(apart(), warnings=noticed("n6")))
    assert deleted(p) == ["bert-rdzv-1"]
    gone = replace(apart(), stores=(store(node="n5"),), warnings=noticed("n6"))
    again = run(replace(gone, job=job(status=status_of(p))))
    assert "NodeTerminating" not in events_of(again)
    lost = replace(gone, stores=(store(node="n5", **ended(1)),), job=job(status=status(rendezvous={"incarnation": 0})))
    (new,) = (a for a in run(replace(lost, warnings=noticed("n5"))).actions if isinstance(a, CreateStore))
    assert new.avoid == ("n5",)


@pytest.mark.parametrize("conditions", [[condition("SuccessCriteriaMet")], [condition("Suspended")]])
def test_a_job_that_has_ended_or_is_suspended_makes_no_event_of_a_notice(conditions: list[Any]) -> None:
    spec = {"suspend": True} if conditions[0]["type"] == "Suspended" else {}
    observed = replace(apart(), job=job(status=status(conditions=conditions), **spec), warnings=noticed("n1", "n5"))
    p = run(observed)
    assert (created(p), "NodeTerminating" in events_of(p)) == ([], False)


# ---- a drain is asked for


TAINT = "taint karpenter.sh/disrupted"


def drained(*nodes: str) -> dict[str, NodeWarning]:
    return {name: NodeWarning(drain=TAINT) for name in nodes}


def four(low: int, *, ready: int = 4, **fields: Any) -> Observed:
    """Return a job of four pods on n1 to n4, of which so many are ready to train; its stores are elsewhere."""
    pods = tuple(worker(index, node=f"n{index + 1}") for index in range(4))
    known = status(incarnations="0,0,0,0", targetReplicas=4)
    observed = replace(apart(*pods, last_report=report(*pods[:ready])), nodes_watched=True)
    return replace(observed, job=job(status=known, **elastic(low, 8, 4), **fields))


@pytest.mark.parametrize(
    ("low", "gone"),
    [(1, ["bert-0-0", "bert-1-0", "bert-2-0"]), (2, ["bert-1-0", "bert-2-0"]), (3, ["bert-2-0"])],
)
def test_a_drain_leaves_as_many_pods_as_the_budget_says(low: int, gone: list[str]) -> None:
    p = run(replace(four(low), warnings=drained("n1", "n2", "n3")))
    assert deleted(p) == gone
    assert [a.avoid for a in created(p)] == [("n1", "n2", "n3")] * len(gone)
    assert status_of(p)["restarts"] == 0


def test_an_end_that_comes_in_any_case_respects_no_budget() -> None:
    assert len(deleted(run(replace(four(3), warnings=noticed("n1", "n2", "n3"))))) == 3


def test_a_drain_of_a_job_at_its_minimum_starts_more_pods_first() -> None:
    p = run(replace(four(4), warnings=drained("n1", "n2", "n3")))
    assert deleted(p) == []
    assert [a.name for a in created(p)] == ["bert-4-0", "bert-5-0", "bert-6-0"]
    assert [a.avoid for a in created(p)] == [("n1", "n2", "n3")] * 3


def test_a_pod_that_is_not_ready_is_not_counted_as_left() -> None:
    assert deleted(run(replace(four(3, ready=3), warnings=drained("n1", "n2")))) == []


def test_without_a_budget_a_drain_has_no_bound() -> None:
    observed = replace(four(4, disruptionBudget=False), warnings=drained("n1", "n2", "n3"))
    assert len(deleted(run(observed))) == 3


def test_pods_stay_once_the_drain_is_withdrawn() -> None:
    p = run(replace(four(3), warnings={}))
    assert (deleted(p), created(p)) == ([], [])


def test_a_store_leaves_a_node_that_is_to_be_drained() -> None:
    p = run(replace(apart(), warnings=drained("n6")))
    assert deleted(p) == ["bert-rdzv-1"]


def test_status_says_which_pod_is_to_leave() -> None:
    p = run(replace(four(3), warnings=drained("n1", "n2", "n3")))
    assert TAINT in {e.reason: e.message for e in p.event_records}["NodeTerminating"]

"""A drain of a job with no pod to spare: additional pods start first, then the budget lets as many go."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticjob_operator.actions import CreateWorker, DeletePod, DeletePolicy, WritePolicy
from elasticjob_operator.model.cluster.nodes import NodeWarning
from elasticjob_operator.model.cluster.pods import Pod
from elasticjob_operator.model.cluster.workload import QueueView, WorkloadCondition, parse_workload
from elasticjob_operator.model.observed import DisruptionBudget, Observed, Policies
from elasticjob_operator.plan import Plan
from elasticjob_operator.plan.pods.cordons import MAX_CORDON_SPARES
from support.operator.build import (
    NOW,
    Raw,
    condition,
    conditions_of,
    elastic,
    events_of,
    job,
    report,
    run,
    status,
    steady,
    unschedulable,
    worker,
)

CORDONED = NodeWarning(cordoned=True)
ON_1, ON_2 = worker(0, node="n1"), worker(1, node="n2")
FIXED: Raw = {"replicas": 2}


def drained(
    *workers: Pod, cordoned: str = "n1", ready: tuple[Pod, ...] | None = None, spec: Raw = FIXED,
    at_least: int = 2, **fields: Any,
) -> Observed:  # fmt: skip
    """Return a job with these worker pods, of which `ready` are connected and ready; `cordoned`: names of nodes.

    `fields` are of its status; its budget asks for `at_least` pods.
    """
    nodes = [pod for pod in workers if pod.running] if ready is None else ready
    known = status(rendezvous={"incarnation": 0, "standby": 1, "round": "1.0.1"}, **fields)
    observed = steady(workers=workers, last_report=report(*nodes, active=2))
    return replace(
        observed, job=job(status=known, **spec), nodes_watched=True,
        warnings=dict.fromkeys(cordoned.split(), CORDONED), policies=Policies(DisruptionBudget("b", at_least)),
    )  # fmt: skip


def spares(p: Plan, before: int = 0) -> int:
    """Return the additional pods that status names after the plan; `before`: those that it named before."""
    return before if p.status is None else int(p.status.get("cordonSpares", 0))


def created(p: Plan) -> list[str]:
    return [a.name for a in p.actions if isinstance(a, CreateWorker)]


def deleted(p: Plan) -> list[str]:
    return [a.name for a in p.actions if isinstance(a, DeletePod)]


def asked(p: Plan, before: int = 2) -> int | None:
    """Return how many pods the budget asks for after the plan."""
    if any(isinstance(a, DeletePolicy) for a in p.actions):
        return None
    written = (a.policy for a in p.actions if isinstance(a, WritePolicy))
    return next((policy.min_available for policy in written if isinstance(policy, DisruptionBudget)), before)


def test_a_drain_of_a_job_of_fixed_size_from_the_cordon_to_its_end() -> None:
    cordon = run(drained(ON_1, ON_2))
    assert (spares(cordon), created(cordon), deleted(cordon)) == (1, ["bert-2-0"], [])
    assert asked(cordon) == 3, "no pod may go yet"
    assert cordon.operator_view is not None
    assert (cordon.operator_view.settings.target, cordon.operator_view.settings.spares) == (2, 1)
    assert "NodeCordoned" in events_of(cordon)

    more = worker(2, node="n3")
    started = run(drained(ON_1, ON_2, more, ready=(ON_1, ON_2), at_least=3, incarnations="0,0,0", cordonSpares=1))
    assert (spares(started, 1), asked(started, 3)) == (1, 3), "its container has started, its node is not ready"
    assert "NodeCordoned" not in events_of(started)

    joined = run(drained(ON_1, ON_2, more, at_least=3, incarnations="0,0,0", cordonSpares=1))
    assert (spares(joined, 1), asked(joined, 3)) == (1, 2), "one pod may go"

    gone = worker(0, node="n1", deleting=NOW + 30)
    evicted = run(drained(gone, ON_2, more, ready=(ON_2, more), incarnations="0,0,0", cordonSpares=1))
    assert (created(evicted), deleted(evicted)) == (["bert-0-1"], [])
    assert (spares(evicted, 1), asked(evicted)) == (1, 3), "no other pod may go before its successor is ready"

    successor = worker(0, 1, node="n3")
    starting = run(
        drained(successor, ON_2, more, cordoned="", ready=(ON_2, more), incarnations="1,0,0", cordonSpares=1)
    )
    assert (spares(starting, 1), deleted(starting)) == (1, [])
    ended = run(drained(successor, ON_2, more, cordoned="", at_least=3, incarnations="1,0,0", cordonSpares=1))
    assert (spares(ended), deleted(ended), asked(ended, 3)) == (0, ["bert-2-0"], 2)


def test_a_cordon_that_is_withdrawn_takes_the_additional_pod_back() -> None:
    p = run(drained(ON_1, ON_2, worker(2, node="n3"), cordoned="", incarnations="0,0,0", cordonSpares=1))
    assert (spares(p), deleted(p)) == (0, ["bert-2-0"])


def test_status_says_what_the_additional_pods_are_for() -> None:
    p = run(drained(ON_1, ON_2, worker(2, node="n3"), incarnations="0,0,0", cordonSpares=1))
    message = conditions_of(p)["FullyScaled"]["message"]
    assert message == (
        "training on 2 of 2 pods; standby spares: 0 of 1 (1 added, so that cordoned Nodes can be drained)"
    )
    assert conditions_of(p)["FullyScaled"]["status"] == "True"


SIX = tuple(worker(i, node=f"n{i}") for i in range(6))


@pytest.mark.parametrize("ready", [(), SIX[:2], SIX], ids=["none is ready", "some are ready", "all are ready"])
@pytest.mark.parametrize("cordoned", ["n0", "n0 n3"])
def test_pods_that_are_not_ready_are_no_reason_for_further_ones(ready: tuple[Pod, ...], cordoned: str) -> None:
    number = len(cordoned.split())
    for before in range(number + 1):
        fields: Raw = {"cordonSpares": before} if before else {}
        again = drained(
            *SIX, cordoned=cordoned, ready=ready, spec={"replicas": 6}, incarnations="0,0,0,0,0,0",
            targetReplicas=6, **fields,
        )  # fmt: skip
        assert spares(run(again), before) == number


def test_the_next_node_is_drained_with_the_additional_pod_of_the_one_before() -> None:
    successor, more = worker(0, 1, node="n3"), worker(2, node="n4")
    fields: Raw = {"cordoned": "n2", "at_least": 3, "incarnations": "1,0,0", "cordonSpares": 1}
    starting = run(drained(successor, ON_2, more, ready=(ON_2, more), **fields))
    assert (spares(starting, 1), created(starting), asked(starting, 3)) == (1, [], 3)
    next_one = run(drained(successor, ON_2, more, **fields))
    assert (spares(next_one, 1), created(next_one), asked(next_one, 3)) == (1, [], 2), "one pod may go"


MANY = tuple(worker(i, node="n1") for i in range(MAX_CORDON_SPARES + 4))


@pytest.mark.parametrize(
    ("observed", "number"),
    [
        (drained(ON_1, ON_2, cordoned="n1 n2"), 2),
        (drained(*MANY, spec={"replicas": len(MANY)}, incarnations=",".join("0" * len(MANY))), MAX_CORDON_SPARES),
        (drained(ON_1, ON_2, spec=elastic(2, 4, 2)), 1),
        (drained(ON_1, ON_2, spec=elastic(1, 4, 2)), 0),
        (drained(ON_1, ON_2, cordoned="n7"), 0),
        (drained(ON_1, ON_2, spec=FIXED | {"disruptionBudget": False}), 0),
        (drained(ON_1, ON_2, spec=FIXED | {"suspend": True}), 0),
        (drained(ON_1, ON_2, conditions=[condition("SuccessCriteriaMet")]), 0),
        (drained(ON_1, ON_2, spec=elastic(2, 4), scaledDown={"replicas": 4, "indices": "2,3"}), 0),
        (replace(drained(ON_1, ON_2), nodes_watched=False), 0),
        (replace(drained(ON_1, ON_2), nodes_watched=None), 0),
        (replace(drained(ON_1, ON_2), warnings={"n1": NodeWarning("taint spot", cordoned=True)}), 0),
        (drained(ON_1, worker(1, **unschedulable()), cordoned=""), 0),
    ],
    ids=["two cordoned", "at most", "elastic at the minimum", "above the minimum", "another node", "no budget",
         "suspended", "has ended", "no room", "no permission", "not known yet", "its end is announced", "a failure"],
)  # fmt: skip
def test_only_pods_on_cordoned_nodes_of_a_job_with_none_to_spare_need_additional_ones(
    observed: Observed, number: int
) -> None:
    assert spares(run(observed)) == number


def test_a_new_operator_keeps_the_additional_pods_until_it_knows_the_nodes() -> None:
    known = drained(ON_1, ON_2, worker(2, node="n3"), cordoned="", incarnations="0,0,0", cordonSpares=1)
    p = run(replace(known, nodes_watched=None))
    assert (spares(p, 1), deleted(p)) == (1, [])


@pytest.mark.parametrize(
    ("watched", "absent", "present"),
    [
        (True, (WritePolicy(DisruptionBudget("", 2)),), ()),
        (False, (), (DeletePolicy(DisruptionBudget("b", 2)),)),
        (None, (), ()),
    ],
)
def test_a_job_at_its_minimum_has_a_budget_if_cordons_are_known(
    watched: bool | None, absent: tuple[Any, ...], present: tuple[Any, ...]
) -> None:
    observed = replace(drained(ON_1, ON_2, cordoned=""), nodes_watched=watched)
    assert run(observed).actions == present
    assert run(replace(observed, policies=Policies())).actions == absent


def test_a_job_with_a_queue_has_no_more_pods_than_the_queue_admits() -> None:
    observed = drained(ON_1, ON_2)
    admitted = WorkloadCondition.QUOTA_RESERVED, WorkloadCondition.ADMITTED
    raw = {
        "metadata": {"name": "w", "uid": "w"},
        "spec": {"active": True, "podSets": [{"name": "worker", "count": 2}]},
        "status": {"conditions": [{"type": kind.value, "status": "True"} for kind in admitted]},
    }
    queue = QueueView(workload=parse_workload(raw))
    p = run(replace(observed, job=replace(observed.job, queue="team"), queue=queue))
    assert (spares(p), asked(p)) == (0, None)


def test_a_job_at_its_minimum_for_want_of_room_has_no_budget() -> None:
    observed = drained(ON_1, ON_2, spec=elastic(2, 4), scaledDown={"replicas": 4, "indices": "2,3"})
    assert asked(run(observed)) is None

"""Worker pods that are being deleted: for how long the job waits for their end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticjob._runtime.contract.messages import PodState
from elasticjob_operator.actions import CreateWorker, DeletePod, DeleteService
from elasticjob_operator.model.cluster.pods import Pod
from elasticjob_operator.model.job.spec import parse_spec
from elasticjob_operator.model.observed import Observed
from elasticjob_operator.plan import Plan
from elasticjob_operator.plan.pods.pod_decisions import MIN_POD_LIFETIME
from support.operator.build import (
    NOW,
    condition,
    conditions_of,
    ended,
    events_of,
    job,
    link,
    raw_job,
    reasons_of,
    report,
    run,
    status,
    status_of,
    steady,
    unschedulable,
    worker,
)

MET = condition("SuccessCriteriaMet", reason="AllAgentsSucceeded")
DEAD = {"n1": NOW - 60}
"""The age of a lease that counts as that of a kubelet that is down."""


def observe(pod: Pod, leases: dict[str, float] | None = None, *, conditions: list[Any], **spec: Any) -> Observed:
    """Return a job with one pod that has ended and this one."""
    observed = steady(workers=(worker(0, **ended(0)), pod))
    fields = status(conditions=conditions)
    return replace(observed, job=job(status=fields, **spec), leases=leases or {})


def ends(p: Plan) -> bool:
    """Return whether the plan writes a status that declares the end."""
    return p.status is not None and "Complete" in reasons_of(p)


def forced(p: Plan) -> list[str]:
    """Return the worker pods that the plan deletes by force."""
    return [a.name for a in p.actions if isinstance(a, DeletePod) and a.force and "rdzv" not in a.name]


WAITS: list[tuple[str, dict[str, Any], float, dict[str, float], bool]] = [
    ("shortly before the default", {}, 119, {}, False),
    ("after the default", {}, 120, {}, True),
    ("before its own timeout", {"podTerminationTimeoutSeconds": 20}, 19, {}, False),
    ("after its own timeout", {"podTerminationTimeoutSeconds": 20}, 20, {}, True),
    ("on a dead node", {}, 0, DEAD, True),
    ("for ever", {"podTerminationTimeoutSeconds": 0}, 1e6, {}, False),
    ("for ever, on a dead node", {"podTerminationTimeoutSeconds": 0}, 1e6, DEAD, False),
]


@pytest.mark.parametrize(("name", "spec", "overdue", "leases", "over"), WAITS, ids=[w[0] for w in WAITS])
def test_how_long_a_finished_and_a_suspended_job_wait_for_a_pod_that_is_being_deleted(
    name: str, spec: dict[str, Any], overdue: float, leases: dict[str, float], over: bool
) -> None:
    pod = worker(1, deleting=NOW - overdue)
    assert ends(run(observe(pod, leases, conditions=[MET], **spec))) is over
    p = run(observe(pod, leases, conditions=[condition("Suspended")], suspend=True, **spec))
    assert any(isinstance(a, DeleteService) for a in p.actions) is over


def test_a_job_that_waits_is_reconciled_again_at_the_timeout_and_more_rarely_with_time() -> None:
    last = run(observe(worker(1, deleting=NOW - 118), conditions=[MET]))
    assert last.requeue_after == pytest.approx(2)
    unlimited = run(observe(worker(1, deleting=NOW - 400), conditions=[MET], podTerminationTimeoutSeconds=0))
    assert unlimited.requeue_after == pytest.approx(50)


@pytest.mark.parametrize(("timeout", "names"), [(None, ["bert-1-0"]), (0, [])])
def test_without_a_limit_no_worker_pod_is_deleted_by_force(timeout: int | None, names: list[str]) -> None:
    spec = {} if timeout is None else {"podTerminationTimeoutSeconds": timeout}
    suspended = observe(worker(1, deleting=NOW - 5), DEAD, conditions=[condition("Suspended")], suspend=True, **spec)
    assert forced(run(suspended)) == names
    finished = observe(worker(1, deleting=NOW - 5), DEAD, conditions=[MET], **spec)
    assert forced(run(finished)) == names
    replaced = steady(workers=(worker(0, node="n2"), worker(1, deleting=NOW - 5), worker(1, 1, node="n2")))
    fields = status(incarnations="0,1")
    assert forced(run(replace(replaced, job=job(status=fields, **spec), leases=DEAD))) == names


@pytest.mark.parametrize(("value", "seconds"), [(None, 120), (0, None), (7, 7)])
def test_the_value_of_the_field(value: int | None, seconds: int | None) -> None:
    spec = raw_job(podTerminationTimeoutSeconds=value)["spec"]
    assert parse_spec(spec).termination_timeout == seconds


# ---- podReplacementPolicy


def one_pod(*pods: Pod, withheld: tuple[str, ...] = (), incarnations: str = "0,0", **more: Any) -> Observed:
    """Return a job with podReplacementPolicy Failed and these pods of index 0."""
    spec = {"podReplacementPolicy": "Failed"} | more.pop("spec", {})
    observed = steady(workers=(*pods, worker(1, node="n2")), last_report=report(worker(1)))
    fields = status(incarnations=incarnations)
    return replace(observed, job=job(status=fields, **spec), withheld=frozenset(withheld), **more)


def created(p: Plan) -> list[str]:
    return [a.name for a in p.actions if isinstance(a, CreateWorker)]


def deleted(p: Plan) -> list[str]:
    return [a.name for a in p.actions if isinstance(a, DeletePod)]


def test_a_pod_that_is_being_deleted_is_counted_as_replaced_at_once_and_its_successor_waits() -> None:
    p = run(one_pod(worker(0, deleting=NOW + 25)))
    assert (created(p), deleted(p), sorted(p.withheld)) == ([], [], ["bert-0-1"])
    assert status_of(p)["incarnations"] == "1,0"
    assert "PodReplaced" in events_of(p)
    assert p.operator_view is not None
    assert [(pod.pod, pod.state) for pod in p.operator_view.pods] == [
        ("bert-0-0", PodState.DRAINING),
        ("bert-1-0", PodState.RUNNING),
    ]
    again = run(one_pod(worker(0, deleting=NOW + 25), withheld=("bert-0-1",), incarnations="1,0"))
    assert (created(again), deleted(again), sorted(again.withheld)) == ([], [], ["bert-0-1"])
    assert "PodReplaced" not in events_of(again)
    message = conditions_of(again)["FullyScaled"]["message"]
    assert "the successor of bert-0-0 waits for its end" in message


def test_a_pod_on_a_lost_node_is_deleted_before_its_successor_is_created() -> None:
    lost = replace(one_pod(worker(0)), link=link(report(worker(1)), bert_0_0=NOW - 4))
    p = run(lost)
    assert (created(p), deleted(p), forced(p)) == ([], ["bert-0-0"], [])
    assert [node["name"] for node in status_of(p)["avoidedNodes"]] == ["n1"]
    assert status_of(p)["lastFailure"]["reason"] == "NodeLost"


GONE: list[tuple[str, tuple[Pod, ...], list[str]]] = [
    ("gone", (), ["bert-0-1"]),
    ("failed", (worker(0, **ended(143)),), ["bert-0-1"]),
    ("a sidecar still runs", (worker(0, **(ended(143) | {"phase": "Running"})),), []),
    ("being deleted", (worker(0, deleting=NOW - 119),), []),
    ("being deleted for too long", (worker(0, deleting=NOW - 120),), ["bert-0-1"]),
]


@pytest.mark.parametrize(("name", "older", "names"), GONE, ids=[g[0] for g in GONE])
def test_a_withheld_pod_is_created_once_the_older_one_has_ended(
    name: str, older: tuple[Pod, ...], names: list[str]
) -> None:
    p = run(one_pod(*older, withheld=("bert-0-1",), incarnations="1,0"))
    assert created(p) == names
    assert p.withheld == (set() if names else {"bert-0-1"})


def test_a_pod_with_a_sidecar_that_runs_on_is_deleted_for_its_successor() -> None:
    pod = worker(0, created=NOW - MIN_POD_LIFETIME, **(ended(143) | {"phase": "Running"}))
    p = run(one_pod(pod))
    assert (created(p), deleted(p)) == ([], ["bert-0-0"])


def test_a_restarted_operator_waits_too_and_takes_a_new_number_if_it_missed_the_end() -> None:
    p = run(one_pod(worker(0, deleting=NOW + 25), incarnations="1,0"))
    assert (created(p), sorted(p.withheld), status_of(p)["incarnations"]) == ([], ["bert-0-1"], "1,0")
    assert created(run(one_pod(incarnations="1,0"))) == ["bert-0-2"]


def test_a_pod_that_was_never_scheduled_has_a_successor_once_it_is_gone() -> None:
    pod = worker(0, **unschedulable(), avoids="n9")
    assert (created(run(one_pod(pod))), deleted(run(one_pod(pod)))) == ([], ["bert-0-0"])


def test_a_node_that_is_down_gets_no_deletion_by_force_before_the_timeout() -> None:
    fields: dict[str, Any] = {"withheld": ("bert-0-1",), "incarnations": "1,0", "leases": DEAD}
    early = run(one_pod(worker(0, deleting=NOW - 60), **fields))
    assert (created(early), forced(early)) == ([], [])
    late = run(one_pod(worker(0, deleting=NOW - 120), **fields))
    assert (created(late), forced(late)) == (["bert-0-1"], ["bert-0-0"])
    never = one_pod(worker(0, deleting=NOW - 1e6), **fields, spec={"podTerminationTimeoutSeconds": 0})
    assert (created(run(never)), forced(run(never))) == ([], [])


def test_the_operator_is_due_when_the_successor_of_a_stuck_pod_is() -> None:
    p = run(one_pod(worker(0, deleting=NOW - 118), withheld=("bert-0-1",), incarnations="1,0"))
    assert p.requeue_after == pytest.approx(2)

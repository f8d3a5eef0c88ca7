"""Worker pods that are being deleted: for how long the job waits for their end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticjob_operator.actions import DeletePod, DeleteService
from elasticjob_operator.model.observed import Observed
from elasticjob_operator.model.pods import Pod
from elasticjob_operator.model.spec import parse_spec
from elasticjob_operator.plan import Plan
from support.operator_build import (
    NOW,
    condition,
    ended,
    job,
    raw_job,
    reasons_of,
    run,
    status,
    steady,
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
    replaced = steady(workers=(worker(0, node="n2"), worker(1, deleting=NOW - 5), worker(1, 1, node="n2")))
    fields = status(incarnations="0,1")
    assert forced(run(replace(replaced, job=job(status=fields, **spec), leases=DEAD))) == names


@pytest.mark.parametrize(("value", "seconds"), [(None, 120), (0, None), (7, 7)])
def test_the_value_of_the_field(value: int | None, seconds: int | None) -> None:
    spec = raw_job(podTerminationTimeoutSeconds=value)["spec"]
    assert parse_spec(spec).termination_timeout == seconds

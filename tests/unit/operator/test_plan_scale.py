"""What the scale subresource counts: `status.selector` and `status.replicas` leave out the spares."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticjob._runtime.contract.messages import RoundPhase
from elasticjob_operator.model.observed import LinkView, Observed
from support.operator.build import Raw, elastic, gathering, job, report, run, status, status_of, steady, worker

WORKERS = "elasticjob.dev/job-name=bert,elasticjob.dev/role=worker"
SPARED: Raw = {"elasticPolicy": {"minReplicas": 2, "maxReplicas": 4, "spares": 1}, "replicas": 2}


def without(*indices: int) -> str:
    return f"{WORKERS},elasticjob.dev/index notin ({','.join(map(str, indices))})"


def trains(*members: int, pods: int = 3, spec: Raw = SPARED, **fields: str) -> Observed:
    """Return a job whose round has these members, with `pods` pods, all connected."""
    workers = tuple(worker(index) for index in range(pods))
    nodes = tuple(replace(node, member=node.index in members) for node in report(*workers).nodes)
    last = report(*workers, nodes=nodes, active=len(members), world_size=len(members))
    known = status(incarnations=",".join("0" * pods), **fields)
    return replace(steady(workers=workers, last_report=last), job=job(status=known, **spec))


def counted(observed: Observed) -> tuple[str, int]:
    found = status_of(run(observed))
    return found["selector"], found["replicas"]


@pytest.mark.parametrize(
    ("observed", "selector", "replicas"),
    [
        (trains(0, 1), without(2), 2),
        (trains(0, 2), without(1), 2),
        (trains(0, 1, pods=2), without(2), 2),
        (trains(0, 1, 2), without(2), 2),
        (trains(0, 1, pods=4, spec=SPARED | {"replicas": 3}), without(3), 3),
        (trains(0, 1, pods=2, spec=elastic(2, 4, 2)), WORKERS, 2),
        (trains(0, 1, pods=3, spec=elastic(2, 4, 3)), WORKERS, 3),
    ],
    ids=["spare", "swapped", "no pod yet", "scaled down", "a node joins", "no spares", "joins without spares"],
)
def test_the_scale_subresource_counts_all_pods_but_the_spares(observed: Observed, selector: str, replicas: int) -> None:
    assert counted(observed) == (selector, replicas)


def test_spares_without_room_are_no_reason_to_leave_out_nodes() -> None:
    observed = trains(0, 1, scaledDown={"replicas": 2, "indices": "2,3"}, pods=2)  # type: ignore[arg-type]
    spared = SPARED | {"elasticPolicy": {**SPARED["elasticPolicy"], "spares": 2}}
    known = {**observed.job.status.raw, "incarnations": "0,0,0,0"}
    assert counted(replace(observed, job=job(status=known, **spared)))[1] == 2


@pytest.mark.parametrize("phase", [RoundPhase.GATHERING, RoundPhase.RECOVERING, None])
def test_the_spares_stay_the_same_while_no_round_is_known_to_run(phase: RoundPhase | None) -> None:
    observed = trains(0, 2, selector=without(1))
    link = LinkView() if phase is None else replace(observed.link, report=gathering(*observed.workers, phase=phase))
    assert counted(replace(observed, link=link)) == (without(1), 2)


def test_the_spares_of_a_job_that_has_not_trained_are_the_highest_indices() -> None:
    assert status_of(run(Observed(job(**SPARED))))["selector"] == without(2)


@pytest.mark.parametrize("target", [-1, 10**18])
def test_a_target_in_status_that_no_operator_wrote_costs_nothing(target: int) -> None:
    observed = replace(steady(), job=job(status=status(targetReplicas=target)))
    assert status_of(run(observed))["targetReplicas"] == 2

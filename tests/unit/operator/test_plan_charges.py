"""Charges: one for each outage, however many pods and rounds it ends, in whatever order the operator sees that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticjob._runtime.contract.failures.failure_rules import FailureAction
from elasticjob._runtime.contract.messages import EndReason, Failure, FailureClass, Outcome, RoundEnded
from elasticjob._runtime.contract.names import RoundId
from elasticjob_operator.actions import CreateWorker
from elasticjob_operator.model.cluster.pods import Pod
from elasticjob_operator.model.cluster.raw import timestamp
from elasticjob_operator.model.observed import Observed
from elasticjob_operator.plan import Plan
from elasticjob_operator.plan.failure_policy.budget import MAX_OUTAGES
from support.common.examples import examples
from support.operator.build import (
    NOW,
    Raw,
    declared,
    ended,
    failure,
    gathering,
    job,
    killed,
    round_ended,
    run,
    status,
    status_of,
    steady,
    store,
    worker,
)

PODS = 4
BUDGET = 50


def four(*pods: Pod, rounds: tuple[RoundEnded, ...] = (), max_restarts: int = BUDGET, **fields: Any) -> Observed:
    """Return a job of four pods in round 2; `pods` replace those of the same index, `rounds` have ended."""
    by_index = {index: worker(index) for index in range(PODS)} | {pod.index: pod for pod in pods}
    spec = {"replicas": PODS, "failurePolicy": {"maxRestarts": max_restarts}}
    known = status(**({"incarnations": "0,0,0,0", "targetReplicas": PODS} | fields))
    workers = tuple(by_index[index] for index in range(PODS))
    last_report = gathering(*(p for p in workers if p.running), ended_rounds=rounds)
    return replace(steady(workers=workers, last_report=last_report), job=job(status=known, **spec))


OOM = failure("bert-1-0", kind=FailureClass.OOM_KILLED, signal="SIGKILL", exception="")
LOST = round_ended(2, EndReason.AGENT_LOST, lost_pods=("bert-0-0",))

OUTAGES: list[tuple[str, Observed, int]] = [
    ("four agents killed with their workers", four(*(worker(i, **killed(2)) for i in range(PODS))), 1),
    ("four pods killed before their first round", four(*(worker(i, **killed()) for i in range(PODS))), 1),
    ("and the coordinator lost them", four(*(worker(i, **killed(2)) for i in range(PODS)), rounds=(LOST,)), 1),
    ("an agent reported it first", four(worker(0, **killed(2)), rounds=(round_ended(2, failure=OOM),)), 1),
    ("two rounds", four(worker(0, **killed(1)), worker(1, **killed(2))), 2),
    ("a round and a pod that was in none", four(worker(0, **killed(2)), worker(1, **killed())), 2),
    ("two attempts to start", four(worker(0, **killed()), worker(1, **killed(), failed_starts=1), failedStarts=1), 2),
    ("its agent broke in the round", four(worker(0, **ended(70, termination=declared(Outcome.ERROR)))), 1),
]


@pytest.mark.parametrize(("name", "observed", "charges"), OUTAGES, ids=[o[0] for o in OUTAGES])
def test_each_outage_is_charged_once(name: str, observed: Observed, charges: int) -> None:
    p = run(observed)
    assert status_of(p)["restartsCountTowardsMax"] == charges
    assert p.operator_view is not None
    assert p.operator_view.charged == charges


def test_four_pods_that_run_out_of_memory_together_do_not_fail_a_job_with_one_restart() -> None:
    p = run(four(*(worker(i, **killed(2)) for i in range(PODS)), max_restarts=1))
    assert [c["type"] for c in status_of(p)["conditions"] if c["type"] == "FailureTarget"] == []
    assert sum(isinstance(a, CreateWorker) for a in p.actions) == PODS
    assert [e.reason for e in p.event_records if e.warning] == ["WorkerFailed"]


def test_the_coordinator_learns_of_a_round_that_is_charged_before_it_reports_the_end() -> None:
    p = run(four(worker(0, **killed(2))))
    assert p.operator_view is not None
    assert (p.operator_view.charged_round, p.operator_view.charged_rounds) == (None, (RoundId(1, 0, 2),))
    later = run(replace(four(rounds=(LOST,)), job=job(status=status_of(p), replicas=PODS)))
    assert later.operator_view is not None
    assert (later.operator_view.charged_round, later.operator_view.charged_rounds) == (RoundId(1, 0, 2), ())


def test_the_cause_that_a_worker_reported_is_recorded_though_its_pod_was_charged_first() -> None:
    p = run(four(worker(0, **killed(2))))
    known = replace(four(rounds=(round_ended(2, failure=OOM),)), job=job(status=status_of(p), replicas=PODS))
    status_ = status_of(run(known))
    assert status_["restarts"] == 1
    assert (status_["lastFailure"]["pod"], len(status_["recentFailures"])) == ("bert-1-0", 2)


def test_status_names_a_bounded_number_of_outages() -> None:
    charged = [f"1.0.{n}" for n in range(1, MAX_OUTAGES + 1)]
    pods = (worker(0, **killed(100)), worker(1, **killed(1)))
    assert status_of(run(four(*pods, chargedOutages=charged)))["chargedOutages"] == [*charged[1:], "1.0.100"]


def windowed(start: float, **policy: Any) -> Observed:
    """Return a job with two restarts in a window of a minute, of which a pod has failed 1 s ago."""
    known = status(
        incarnations="0,0,0,0", targetReplicas=PODS, restarts=5, restartsCountTowardsMax=2,
        restartWindow={"start": timestamp(start, precise=True), "count": 2},
    )  # fmt: skip
    spec = {"replicas": PODS, "failurePolicy": {"maxRestarts": 2, "restartWindowSeconds": 60, **policy}}
    return replace(four(worker(0, **killed(2))), job=job(status=known, **spec))


def test_a_failure_after_the_restart_window_starts_the_next_one() -> None:
    p = run(windowed(NOW - 61))
    status_ = status_of(p)
    assert (status_["restarts"], status_["restartsCountTowardsMax"]) == (6, 1)
    assert status_["restartWindow"] == {"start": timestamp(NOW - 1, precise=True), "count": 1}
    assert p.operator_view is not None
    assert (p.operator_view.charged, p.operator_view.charged_since) == (1, NOW - 1)
    assert p.operator_view.settings.restart_window == 60


def test_a_failure_within_the_restart_window_exceeds_its_budget() -> None:
    target = next(c for c in status_of(run(windowed(NOW - 60)))["conditions"] if c["type"] == "FailureTarget")
    assert target["reason"] == "MaxRestartsExceeded"
    assert "workers failed after 2 of 2 restarts within 60 s" in target["message"]


def test_the_time_of_the_failure_counts_and_not_that_of_the_reconcile() -> None:
    late = run(windowed(NOW - 60), now=NOW + 3600)
    assert "FailureTarget" in [c["type"] for c in status_of(late)["conditions"]]


def test_without_a_restart_window_status_has_none() -> None:
    p = run(four(worker(0, **killed(2))))
    assert "restartWindow" not in status_of(p)
    assert p.operator_view is not None
    assert p.operator_view.charged_since == 0


# ---- any order, any batches -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PodFailed:
    """The agent of the index's first pod was killed in this round; None: before its first round."""

    index: int
    round: int | None


Fact = PodFailed | RoundEnded
"""What the operator gets to see at some time."""


@dataclass
class Cluster:
    """What the facts so far have made of the job `bert`, and the operator's status of it."""

    status: Raw
    facts: tuple[Fact, ...] = ()

    def see(self, fact: Fact) -> None:
        self.facts = (*self.facts, fact)

    def reconcile(self, *, crash: bool = False) -> None:
        """Reconcile; with `crash` the operator ends before it writes status."""
        p = self._plan()
        if not crash and p.status is not None:
            self.status = dict(p.status)

    def _plan(self) -> Plan:
        persisted = self.status.get("chargedRound")
        seen = RoundId.parse(persisted) if persisted else RoundId(0, 0, 0)
        rounds = tuple(f for f in self.facts if isinstance(f, RoundEnded) and f.round > seen)
        observed = four(rounds=rounds)
        return run(replace(observed, workers=tuple(self._pods()), job=self._job()))

    def _job(self) -> Any:
        return job(status=self.status, replicas=PODS, failurePolicy={"maxRestarts": BUDGET})

    def _pods(self) -> Iterator[Pod]:
        failed = {f.index: f.round for f in self.facts if isinstance(f, PodFailed)}
        current = self.status["incarnations"].split(",")
        for index in range(PODS):
            yield worker(index, **killed(failed[index])) if index in failed else worker(index)
            if current[index] != "0":
                yield worker(index, 1)


failed_pods = st.lists(
    st.builds(PodFailed, st.integers(0, PODS - 1), st.none() | st.integers(1, 3)),
    unique_by=lambda f: f.index,
    max_size=PODS,
)
UNCOUNTED = FailureAction.RESTART_GROUP_UNCOUNTED
ends_of_rounds: dict[str, dict[str, Any]] = {
    "charged": {},
    "lost": {"reason": EndReason.AGENT_LOST},
    "uncounted": {"rule": "r", "action": UNCOUNTED, "charged": False},
    "ignored": {"rule": "r", "action": FailureAction.IGNORE, "charged": False},
    "charged by a rule": {"rule": "r", "action": FailureAction.RESTART_GROUP},
}
ended_rounds = st.lists(st.sampled_from(sorted(ends_of_rounds)), max_size=3)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Fact], int, int]:
    """Return facts in one possible order, and the numbers of charged outages and of restarts.

    Stores report their rounds in order.
    """
    pods = draw(failed_pods)
    rounds = [round_ended(n, **ends_of_rounds[end]) for n, end in enumerate(draw(ended_rounds), 1)]
    charged = {f.round for f in pods} | {e.round.number for e in rounds if e.charged}
    restarts = charged | {e.round.number for e in rounds if e.action is UNCOUNTED}
    places = draw(st.lists(st.integers(0, len(pods)), min_size=len(rounds), max_size=len(rounds)))
    facts: list[Fact] = list(draw(st.permutations(pods)))
    for place, round_ in reversed([*zip(sorted(places), rounds, strict=True)]):
        facts.insert(place, round_)
    return facts, len(charged), len(restarts)


@pytest.mark.slow
@examples(300)
@given(histories(), st.data())
def test_any_order_and_batching_of_the_same_facts_gives_the_same_charge(
    history: tuple[list[Fact], int, int], data: st.DataObject
) -> None:
    facts, charged, restarts = history
    cluster = Cluster(dict(four().job.status.raw))
    for fact in facts:
        cluster.see(fact)
        for _ in range(data.draw(st.integers(0, 2), label="reconciles before the next fact")):
            cluster.reconcile(crash=data.draw(st.booleans(), label="crash before the status write"))
    cluster.reconcile()
    cluster.reconcile()
    assert (cluster.status["restartsCountTowardsMax"], cluster.status["restarts"]) == (charged, restarts)


def test_a_store_that_is_lost_with_its_report_changes_no_charge_of_a_pod() -> None:
    facts = four(worker(0, **killed(2)))
    no_store = replace(facts, stores=(store(),), link=replace(facts.link, connected=False, report=None, since=NOW))
    assert status_of(run(no_store))["restarts"] == 1


def test_a_failure_that_a_user_wrote_into_the_termination_message_charges_no_more_than_its_pod() -> None:
    forged = Failure(FailureClass.USER_ERROR, "bert-3-0", NOW)
    pods = (worker(i, **ended(1, termination=declared(Outcome.ERROR, forged))) for i in range(PODS))
    assert status_of(run(four(*pods)))["restarts"] == 1

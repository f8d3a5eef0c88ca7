"""The phases of a recovery, timed by a clock that the test advances."""

from __future__ import annotations

import pytest

from elasticjob._runtime.contract.messages import RecoverySeconds, RoundEnded
from elasticjob._runtime.rendezvous.observations import recovery_times
from elasticjob._runtime.rendezvous.state import CoordinatorEvent
from support.rendezvous.rounds import Job, pods


class Timed(Job):
    """A job that tracks the outage as the coordinator does."""

    outage: recovery_times.Outage | None = None

    def decide(self, event: CoordinatorEvent) -> None:
        before = self.state
        super().decide(event)
        self.outage = recovery_times.track_outage(self.outage, before, self.state, self.now)

    def recovered(self) -> RecoverySeconds | None:
        return self.outage.recovery if self.outage else None


def job_of(*indices: int) -> Timed:
    job = Timed()
    job.operator_view(*pods(*indices), target=len(indices), max_restarts=100)
    job.running(*indices)
    return job


def test_a_failure_is_timed_phase_by_phase() -> None:
    job = job_of(0, 1)
    job.fail(1)
    job.now += 0.2
    job.stopped(0, 1)
    assert job.recovered() is None
    job.now += 0.06
    job.started(0, 1)
    recovery = job.recovered()
    assert recovery is not None
    assert recovery.pods == ("j-1-0",)
    assert (recovery.detect, recovery.stop, recovery.rendezvous, recovery.start) == pytest.approx((0, 0.2, 0, 0.06))


def test_the_recovery_from_a_lost_node_names_its_pod() -> None:
    job = job_of(0, 1, 2)
    job.disconnect(2)
    job.advance(0.25)
    job.stopped(0, 1)
    job.started(0, 1)
    recovery = job.recovered()
    assert recovery is not None
    assert recovery.pods == ("j-2-0",)


def test_following_many_ended_rounds_compares_none_of_the_old_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(0, 1)
    for _ in range(20):
        job.fail(1)
        job.stopped(0, 1)
        job.started(0, 1)
    compared: list[RoundEnded] = []

    def compare(one: RoundEnded, other: object) -> bool:
        compared.append(one)
        return one is other

    monkeypatch.setattr(RoundEnded, "__eq__", compare)
    job.fail(1)
    job.stopped(0, 1)
    job.started(0, 1)
    assert job.outage is not None
    assert (job.outage.round.number, job.recovered() is not None, compared) == (21, True, [])


def test_a_planned_end_is_no_outage() -> None:
    job = job_of(0, 1)
    job.operator_view(*pods(0, 1), target=2, min_nodes=1)
    job.fail(1)
    job.stopped(0, 1)
    job.started(0, 1)
    assert job.recovered() is not None
    job.operator_view(*pods(0, 1), target=1, min_nodes=1)
    job.stopped(0, 1)
    assert job.outage is None

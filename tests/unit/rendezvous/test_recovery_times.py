"""How long a fault keeps workers from running, by a clock that the test moves."""

from __future__ import annotations

import pytest

from elasticjob.contract.messages import RecoverySeconds
from elasticjob.rendezvous import recovery_times
from elasticjob.rendezvous.state import CoordinatorEvent
from support.rounds import Job, pods


class Timed(Job):
    """Follows the outage as a coordinator does."""

    outage: recovery_times.Outage | None = None

    def decide(self, event: CoordinatorEvent) -> None:
        before = self.state
        super().decide(event)
        self.outage = recovery_times.track_outage(self.outage, before, self.state, self.now)

    def recovered(self) -> RecoverySeconds | None:
        return self.outage.recovery if self.outage else None


def job_of(*indices: int) -> Timed:
    job = Timed()
    job.facts(*pods(*indices), target=len(indices))
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


def test_a_lost_node_is_timed_from_its_death() -> None:
    job = job_of(0, 1, 2)
    job.gone(2)
    job.later(0.25)
    job.stopped(0, 1)
    job.started(0, 1)
    recovery = job.recovered()
    assert recovery is not None
    assert recovery.pods == ("j-2-0",)


def test_what_is_planned_is_no_outage() -> None:
    job = job_of(0, 1)
    job.facts(*pods(0, 1), target=2, min_nodes=1)
    job.fail(1)
    job.stopped(0, 1)
    job.started(0, 1)
    assert job.recovered() is not None
    job.facts(*pods(0, 1), target=1, min_nodes=1)
    job.stopped(0, 1)
    assert job.outage is None

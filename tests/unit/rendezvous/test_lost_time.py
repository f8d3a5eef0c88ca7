"""How much time faults cost, by a clock that the test advances."""

from __future__ import annotations

from elasticjob._runtime.contract.messages import (
    Failure,
    FailureClass,
    LostTime,
    StageEnded,
    TrainingProgress,
    WorkersFailed,
)
from elasticjob._runtime.rendezvous.observations import lost_time, recovery_times
from elasticjob._runtime.rendezvous.state import CoordinatorEvent
from support.rendezvous.rounds import Job, pods


class Timed(Job):
    """A job that tracks the lost time as the coordinator does."""

    outage: recovery_times.Outage | None = None
    tracker = lost_time.LostTimeTracker()

    def decide(self, event: CoordinatorEvent) -> None:
        before = self.state
        super().decide(event)
        self.outage = recovery_times.track_outage(self.outage, before, self.state, self.now)
        self.tracker = lost_time.track_rounds(self.tracker, self.outage, self.state, self.now)

    def step(self, step: int, step_seconds: float | None = 1.0) -> None:
        assert self.state.round is not None
        progress = TrainingProgress(self.state.round.id, step, 100, step_seconds)
        self.tracker = lost_time.track_step(self.tracker, progress, self.now)

    def lost(self) -> list[float]:
        return [entry.seconds for entry in self.tracker.lost]


def job_of(*indices: int) -> Timed:
    job = Timed()
    job.operator_view(*pods(*indices), target=len(indices), max_restarts=100)
    job.running(*indices)
    return job


def fail(job: Timed, pause: float) -> None:
    job.fail(1)
    job.now += pause
    job.stopped(0, 1)
    job.started(0, 1)


def test_without_reports_of_steps_a_fault_costs_the_pause() -> None:
    job = job_of(0, 1)
    fail(job, 0.5)
    assert job.lost() == [0.5]
    assert job.state.round is not None
    assert job.tracker.lost == (LostTime(job.state.round.id, 0.5),)


def test_steps_that_are_done_again_are_lost() -> None:
    job = job_of(0, 1)
    job.step(10)
    fail(job, 0.5)
    job.now += 4
    job.step(9)
    assert job.lost() == []
    job.now += 3
    job.step(12)
    assert job.lost() == [5.5], "0.5 s of pause, and 7 s of which two steps were new"
    job.now += 50
    job.step(60)
    assert job.lost() == [5.5]


def test_a_fault_while_steps_are_done_again_extends_the_time() -> None:
    job = job_of(0, 1)
    job.step(10)
    fail(job, 1)
    job.now += 2
    job.step(5)
    fail(job, 1)
    job.now += 6
    job.step(10)
    assert job.lost() == [10]


def test_a_clock_that_is_wrong_by_hours_costs_no_more_than_the_round() -> None:
    job = job_of(0, 1)
    job.now += 50
    start = job.start_of(1)
    failure = Failure(FailureClass.USER_ERROR, "j-1-0", job.now - 3600, rank=start.rank, exit_code=1)
    job.send(1, WorkersFailed(start.round, failure))
    job.stopped(0, 1)
    job.started(0, 1)
    assert job.lost() == [50]


def test_only_the_last_ones_are_kept() -> None:
    job = job_of(0, 1)
    for pause in range(1, 12):
        fail(job, pause)
    assert job.lost() == list(range(4, 12))


def test_the_steps_of_the_next_stage_are_counted_by_themselves() -> None:
    job = job_of(0, 1)
    job.step(90)
    for index in (0, 1):
        job.send(index, StageEnded(job.start_of(index).round, 1))
    job.step(3)
    fail(job, 0.5)
    job.now += 1
    job.step(3)  # not 90
    assert job.lost() == [1.5]

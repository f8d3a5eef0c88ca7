"""Which rank is named as the straggler, and when. Step times are milliseconds."""

from __future__ import annotations

import pytest

from elasticjob._runtime.contract.messages import StepTimes, Straggler
from elasticjob._runtime.rendezvous.observations import stragglers
from elasticjob._runtime.rendezvous.state import Round
from support.rendezvous.rounds import Job, agent_id, pods


class TrackedJob(Job):
    """A job that tracks step times as the coordinator does."""

    tracker = stragglers.StragglerTracker()

    @property
    def running_round(self) -> Round:
        assert self.state.round is not None
        return self.state.round

    def report_window(self, *ranks: float, step: float = 100.0) -> int | None:
        """Report a window agent by agent; return the straggler's rank after it. Times are milliseconds."""
        members = self.running_round.members
        for name, member in members.items():
            first = member.assignment.rank
            self.report_times(name, *ranks[first : first + member.local_world_size], step=step)
        return self.straggler_rank

    def report_times(self, name: str, *ranks: float, step: float = 100.0) -> None:
        own = tuple(ms / 1000 for ms in ranks)
        times = StepTimes(self.running_round.id, step / 1000, own)
        self.tracker = stragglers.track_step_times(self.tracker, self.state, name, times, self.now)

    @property
    def straggler_rank(self) -> int | None:
        found = stragglers.current_straggler(self.tracker, self.state)
        return found.rank if found else None


def job_of(*indices: int, workers: int = 1) -> TrackedJob:
    job = TrackedJob()
    job.operator_view(*pods(*indices), target=len(indices), min_nodes=1)
    job.announce(*indices, workers=workers)
    job.started(*indices)
    return job


WINDOWS = [
    ("one rank of four", 100, (20, 21, 80, 19), 2),
    ("one rank of two: the median is the other rank", 100, (20, 80), 1),
    ("all ranks alike", 100, (20, 21, 22, 19), None),
    ("half of them slow: the slowest against the median of the rest", 100, (20, 80, 20, 81), 3),
    ("a lag that is too small a share of the step", 1000, (20, 21, 80, 19), None),
    ("a lag of a tenth of the step", 600, (20, 20, 80, 20), 2),
    ("a large share of a short step, but less than noise", 20, (2, 11, 2, 2), None),
    ("a single rank has no peers", 100, (80,), None),
]


@pytest.mark.parametrize(("name", "step", "ranks", "slow"), WINDOWS, ids=[w[0] for w in WINDOWS])
def test_the_slow_rank_is_found(name: str, step: float, ranks: tuple[float, ...], slow: int | None) -> None:
    job = job_of(*range(len(ranks)))
    job.report_window(*ranks, step=step)
    assert job.report_window(*ranks, step=step) == slow


def test_a_rank_is_named_with_its_pod_and_times() -> None:
    job = job_of(0, 1, workers=2)
    job.report_window(20, 22, 24, 80)
    job.report_window(20, 22, 24, 82)
    found = stragglers.current_straggler(job.tracker, job.state)
    assert found == Straggler(3, "j-1-0", pytest.approx(0.082), pytest.approx(0.022), job.now)  # type: ignore[arg-type]
    job.now += 60
    job.report_window(20, 22, 24, 90)
    assert stragglers.current_straggler(job.tracker, job.state) == found, "it keeps the times at which it was named"


SLOW_1, SLOW_2, NONE_SLOW = (20, 80, 20), (20, 20, 80), (20, 20, 20)
HISTORIES = [
    ("one slow window is not enough", [(SLOW_1, None), (NONE_SLOW, None), (SLOW_1, None), (SLOW_1, 1)]),
    ("two ranks in turn are not named", [(SLOW_1, None), (SLOW_2, None), (SLOW_1, None)]),
    ("the name stays for one good window", [(SLOW_1, None), (SLOW_1, 1), (NONE_SLOW, 1), (SLOW_1, 1)]),
    ("the name goes after two good windows", [(SLOW_1, None), (SLOW_1, 1), (NONE_SLOW, 1), (NONE_SLOW, None)]),
    ("another rank takes its place", [(SLOW_1, None), (SLOW_1, 1), (SLOW_2, 1), (SLOW_2, 2)]),
]


@pytest.mark.parametrize(("name", "history"), HISTORIES, ids=[h[0] for h in HISTORIES])
def test_two_windows_must_agree(name: str, history: list[tuple[tuple[float, ...], int | None]]) -> None:
    job = job_of(0, 1, 2)
    assert [job.report_window(*ranks) for ranks, _ in history] == [named for _, named in history]


def test_a_window_is_complete_when_all_nodes_have_reported() -> None:
    job = job_of(0, 1)
    for _ in range(3):
        job.report_times(agent_id(1), 80)
    assert job.tracker.last_rank is None
    job.report_times(agent_id(0), 20)
    assert job.tracker.last_rank == 1


def test_a_new_round_starts_without_a_straggler() -> None:
    job = job_of(0, 1)
    job.report_window(20, 80)
    assert job.report_window(20, 80) == 1
    job.fail(1)
    assert job.straggler_rank == 1
    job.report_times(agent_id(0), 20)
    assert job.tracker.reports == {}, "reports of a round that ends are dropped"
    job.stopped(0, 1)
    job.started(0, 1)
    assert job.straggler_rank is None
    assert job.report_window(20, 80) is None
    assert job.report_window(20, 80) == 1


def test_reports_that_do_not_match_the_round_are_dropped() -> None:
    job = job_of(0, 1)
    job.report_times("unknown", 80)
    job.report_times(agent_id(0), 20, 80)
    other = StepTimes(job.running_round.id._replace(number=99), 0.1, (0.08,))
    job.tracker = stragglers.track_step_times(job.tracker, job.state, agent_id(0), other, job.now)
    assert job.tracker == stragglers.StragglerTracker()

"""Who is slow, and when it is said: by the milliseconds of a step that each rank has for itself."""

from __future__ import annotations

import pytest

from elasticjob.contract.messages import StepTimes, Straggler
from elasticjob.rendezvous import stragglers
from elasticjob.rendezvous.state import Round
from support.rounds import Job, agent_id, pods


class Paced(Job):
    """Follows the pace of its nodes as a coordinator does."""

    pace = stragglers.StragglerTracker()

    @property
    def running_round(self) -> Round:
        assert self.state.round is not None
        return self.state.round

    def tell(self, *ranks: float, whole: float = 100.0) -> int | None:
        """One window, told node by node; the rank that is named after it."""
        members = self.running_round.members
        for name, member in members.items():
            first = member.assignment.rank
            self.hear(name, *ranks[first : first + member.local_world_size], whole=whole)
        return self.named

    def hear(self, name: str, *ranks: float, whole: float = 100.0) -> None:
        own = tuple(ms / 1000 for ms in ranks)
        times = StepTimes(self.running_round.id, whole / 1000, own)
        self.pace = stragglers.track_step_times(self.pace, self.state, name, times, self.now)

    @property
    def named(self) -> int | None:
        found = stragglers.current_straggler(self.pace, self.state)
        return found.rank if found else None


def job_of(*indices: int, workers: int = 1) -> Paced:
    job = Paced()
    job.facts(*pods(*indices), target=len(indices), min_nodes=1)
    job.announce(*indices, workers=workers)
    job.started(*indices)
    return job


WINDOWS = [
    ("one of many", 100, (20, 21, 80, 19), 2),
    ("of two, the other is what is usual", 100, (20, 80), 1),
    ("all alike", 100, (20, 21, 22, 19), None),
    ("half of them slow: the slowest, against the median of the rest", 100, (20, 80, 20, 81), 3),
    ("too little to matter beside the whole step", 1000, (20, 21, 80, 19), None),
    ("a tenth of the step", 600, (20, 20, 80, 20), 2),
    ("much of a short step, but less than noise", 20, (2, 11, 2, 2), None),
    ("a single rank waits for nobody", 100, (80,), None),
]


@pytest.mark.parametrize(("name", "whole", "ranks", "slow"), WINDOWS, ids=[w[0] for w in WINDOWS])
def test_who_is_slow(name: str, whole: float, ranks: tuple[float, ...], slow: int | None) -> None:
    job = job_of(*range(len(ranks)))
    job.tell(*ranks, whole=whole)
    assert job.tell(*ranks, whole=whole) == slow


def test_a_rank_is_named_with_its_pod_and_times() -> None:
    job = job_of(0, 1, workers=2)
    job.tell(20, 22, 24, 80)
    job.tell(20, 22, 24, 82)
    found = stragglers.current_straggler(job.pace, job.state)
    assert found == Straggler(3, "j-1-0", pytest.approx(0.082), pytest.approx(0.022), job.now)  # type: ignore[arg-type]
    job.now += 60
    job.tell(20, 22, 24, 90)
    assert stragglers.current_straggler(job.pace, job.state) == found, "as it was when it was named"


SLOW_1, SLOW_2, NOBODY = (20, 80, 20), (20, 20, 80), (20, 20, 20)
HISTORIES = [
    ("once is chance", [(SLOW_1, None), (NOBODY, None), (SLOW_1, None), (SLOW_1, 1)]),
    ("two in turn are nobody", [(SLOW_1, None), (SLOW_2, None), (SLOW_1, None)]),
    ("stays for one good window", [(SLOW_1, None), (SLOW_1, 1), (NOBODY, 1), (SLOW_1, 1)]),
    ("goes after two", [(SLOW_1, None), (SLOW_1, 1), (NOBODY, 1), (NOBODY, None)]),
    ("another takes its place", [(SLOW_1, None), (SLOW_1, 1), (SLOW_2, 1), (SLOW_2, 2)]),
]


@pytest.mark.parametrize(("name", "history"), HISTORIES, ids=[h[0] for h in HISTORIES])
def test_two_windows_must_agree(name: str, history: list[tuple[tuple[float, ...], int | None]]) -> None:
    job = job_of(0, 1, 2)
    assert [job.tell(*ranks) for ranks, _ in history] == [named for _, named in history]


def test_a_window_is_complete_when_all_nodes_have_told() -> None:
    job = job_of(0, 1)
    for _ in range(3):
        job.hear(agent_id(1), 80)
    assert job.pace.last_rank is None
    job.hear(agent_id(0), 20)
    assert job.pace.last_rank == 1


def test_a_new_round_begins_anew() -> None:
    job = job_of(0, 1)
    job.tell(20, 80)
    assert job.tell(20, 80) == 1
    job.fail(1)
    assert job.named == 1
    job.hear(agent_id(0), 20)
    assert job.pace.reports == {}, "the round ends"
    job.stopped(0, 1)
    job.started(0, 1)
    assert job.named is None
    assert job.tell(20, 80) is None
    assert job.tell(20, 80) == 1


def test_what_does_not_belong_to_the_round_is_not_taken() -> None:
    job = job_of(0, 1)
    job.hear("stranger", 80)
    job.hear(agent_id(0), 20, 80)
    other = StepTimes(job.running_round.id._replace(number=99), 0.1, (0.08,))
    job.pace = stragglers.track_step_times(job.pace, job.state, agent_id(0), other, job.now)
    assert job.pace == stragglers.StragglerTracker()

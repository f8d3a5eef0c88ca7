"""Group ranks by the topology that the operator sends: nodes of one place are neighbours, after those that stay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticjob.contract.messages import ExpectedPod, RoundSettings
from support.rounds import Job, pods

SETTINGS = RoundSettings(min_nodes=1, max_nodes=8, target=8)


def placed(*places: str, first: int = 0, incarnation: int = 0) -> tuple[ExpectedPod, ...]:
    """Return running pods from index `first` on; a place is written `zone/rack`, an empty one is unknown."""
    found = pods(*range(first, first + len(places)), incarnation=incarnation)
    paths = [tuple(filter(None, place.split("/"))) for place in places]
    return tuple(replace(p, topology=path) for p, path in zip(found, paths, strict=True))


def running(*expected: ExpectedPod) -> Job:
    """Return a job with a round of all these pods."""
    job = Job(replace(SETTINGS, target=len(expected)))
    job.operator_view(*expected)
    job.running(*(p.index for p in expected))
    return job


def indices(job: Job) -> list[int]:
    """Return the indices of the round's nodes by group rank."""
    return [int(pod.split("-")[1]) for pod in job.members]


@pytest.mark.parametrize(
    ("places", "ranks"),
    [
        (("", "", ""), [0, 1, 2]),
        (("a", "b", "a", "b"), [0, 2, 1, 3]),
        (("b", "a", "b", "a"), [0, 2, 1, 3]),
        (("a", "", "a", ""), [0, 2, 1, 3]),
        (("z/a", "y/b", "z/c", "y/b", "z/a"), [0, 4, 2, 1, 3]),
        (("z/a", "y/a", "z/a", "y/a"), [0, 2, 1, 3]),
        (("z", "z/a", "y/b", "z/a"), [0, 1, 3, 2]),
    ],
    ids=["unknown", "two places", "by index, not by name", "partly known", "two levels", "a name twice", "one level"],
)
def test_a_first_round_has_the_nodes_of_one_place_side_by_side(places: tuple[str, ...], ranks: list[int]) -> None:
    assert indices(running(*placed(*places))) == ranks


def test_nodes_that_stay_keep_their_order_and_others_join_beside_the_last_one() -> None:
    job = running(*placed("a", "b", "a"))
    assert indices(job) == [0, 2, 1]
    job.operator_view(*placed("a", "b", "a", "c", "b", "c", "a"), target=7)
    job.announce(3, 4, 5, 6)
    job.stopped(0, 1, 2)
    assert indices(job) == [0, 2, 1, 4, 3, 5, 6]


def test_a_replacement_has_the_last_rank_also_in_the_place_of_the_first() -> None:
    job = running(*placed("a", "b", "a", "b"))
    job.disconnect(2)
    job.advance(1)
    job.stopped(0, 1, 3)
    job.started(0, 1, 3)
    assert indices(job) == [0, 1, 3]
    job.operator_view(*placed("a", "b"), *placed("a", first=2, incarnation=1), *placed("b", first=3))
    job.announce(2, incarnation=1)
    job.stopped(0, 1, 3)
    assert indices(job) == [0, 1, 3, 2]


def test_the_place_of_an_earlier_pod_says_nothing_about_its_successor() -> None:
    job = Job(replace(SETTINGS, target=3))
    job.operator_view(*placed("a", "b"), *placed("a", first=2, incarnation=1))
    job.announce(0, 1)
    job.announce(2, incarnation=2)
    assert indices(job) == [0, 1, 2]
    same = Job(replace(SETTINGS, target=3))
    same.operator_view(*placed("a", "b"), *placed("a", first=2, incarnation=1))
    same.announce(0, 1)
    same.announce(2, incarnation=1)
    assert indices(same) == [0, 2, 1]


def test_without_an_operator_ranks_follow_the_index() -> None:
    job = Job(replace(SETTINGS, max_nodes=3, target=3))
    job.announce(2, 0, 1)
    assert indices(job) == [0, 1, 2]

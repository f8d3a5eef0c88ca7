"""Group ranks by the topology that the operator sends: agents of a place are neighbours; those that stay keep order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticjob._runtime.contract.messages import ExpectedPod, RoundSettings
from support.rendezvous.rounds import Job, pods

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
    """Return the indices of the round's agents by group rank."""
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


@pytest.mark.parametrize(
    ("places", "joining", "ranks"),
    [
        (("a", "b", "a"), ("b", "a", "b"), [0, 2, 4, 1, 3, 5]),
        (("a", "b"), ("c", "d", "b", "c", "a"), [0, 6, 1, 4, 2, 5, 3]),
        (("", "b"), ("", "b", ""), [0, 1, 3, 2, 4]),
        (("", ""), ("", ""), [0, 1, 2, 3]),
        (("z/a", "z/b", "y/a"), ("z/c", "z/a", "x/a", "y/b", "z/c"), [0, 4, 1, 3, 7, 2, 6, 5]),
        (("z/a", "z/b"), ("z/c", "z/b", "z"), [0, 1, 3, 4, 2]),
        (("z/a", "y/b", "x/c"), ("x/c", "y/b", "z/a"), [0, 5, 1, 4, 2, 3]),
    ],
    ids=["two places", "also new ones", "partly known", "unknown", "two levels", "the narrower place first", "all"],
)
def test_nodes_that_stay_keep_their_order_and_others_join_beside_their_place(
    places: tuple[str, ...], joining: tuple[str, ...], ranks: list[int]
) -> None:
    job = running(*placed(*places))
    before = indices(job)
    job.operator_view(*placed(*places, *joining), target=len(places) + len(joining))
    job.announce(*range(len(places), len(places) + len(joining)))
    job.stopped(*range(len(places)))
    assert indices(job) == ranks
    assert [index for index in ranks if index < len(places)] == before


def test_a_place_whose_nodes_are_apart_is_joined_behind_the_last_of_them() -> None:
    """Ranks follow the index while places are unknown; places that become known later change no rank."""
    job = running(*placed("", "", "", ""))
    job.operator_view(*placed("a", "b", "a", "b", "a"), target=5)
    job.announce(4)
    job.stopped(0, 1, 2, 3)
    assert indices(job) == [0, 1, 2, 4, 3]


@pytest.mark.parametrize(
    ("lost", "without", "ranks"),
    [(2, [0, 1, 3], [0, 2, 1, 3]), (1, [0, 2, 3], [0, 2, 3, 1]), (0, [2, 1, 3], [2, 0, 1, 3])],
)
def test_a_replacement_has_a_rank_beside_its_place_and_never_rank_0(
    lost: int, without: list[int], ranks: list[int]
) -> None:
    job = running(*placed("a", "b", "a", "b"))
    stay = [index for index in range(4) if index != lost]
    job.disconnect(lost)
    job.advance(1)
    job.stopped(*stay)
    job.started(*stay)
    assert indices(job) == without
    places = ("a", "b", "a", "b")
    job.operator_view(*(placed(p, first=i, incarnation=int(i == lost))[0] for i, p in enumerate(places)))
    job.announce(lost, incarnation=1)
    job.stopped(*stay)
    assert indices(job) == ranks


def test_a_spare_of_the_same_place_leaves_all_other_nodes_their_ranks() -> None:
    job = Job(replace(SETTINGS, target=4, spares=1))
    job.operator_view(*placed("a", "a", "b", "b", "a"))
    job.announce(0, 1, 2, 3, 4)
    job.started(0, 1, 2, 3)
    job.disconnect(1)
    job.advance(1)
    job.stopped(0, 2, 3)
    assert indices(job) == [0, 4, 2, 3]


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

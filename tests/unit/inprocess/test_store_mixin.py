"""What ranks share in a store: barriers, the outcome of an iteration, and ranks that have ended."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from elasticjob.inprocess._stores.store_mixin import BarrierTimeoutError, IterationOutcome
from elasticjob.inprocess.attribution import Interruption, InterruptionRecord
from support.training.dict_store import DictStore

LONG, SHORT = timedelta(seconds=20), timedelta(milliseconds=1)


def in_threads(*functions: Callable[[], Any]) -> list[Future[Any]]:
    """Call the functions at the same time; return their results once all have returned."""
    with ThreadPoolExecutor(len(functions)) as pool:
        return [pool.submit(function) for function in functions]


@pytest.mark.parametrize("name", ["initial_barrier", "iteration_barrier", "termination_barrier"])
def test_a_barrier_opens_when_all_ranks_have_arrived(name: str) -> None:
    store = DictStore()
    with pytest.raises(BarrierTimeoutError, match=r"ranks 1, 2 of 3 did not reach the \w+ barrier within 0.001 s"):
        getattr(store, name)(0, 3, SHORT)
    results = in_threads(*(lambda rank=rank: getattr(store, name)(rank, 3, LONG) for rank in (0, 1, 2)))
    assert [result.result() for result in results] == [None, None, None]


def test_a_rank_that_arrives_twice_counts_once() -> None:
    store = DictStore()
    assert store.arrive("termination", 0) == {0}
    assert store.arrive("termination", 0) == {0}
    with pytest.raises(BarrierTimeoutError):
        store.termination_barrier(0, 2, SHORT)


def test_a_barrier_opens_though_the_last_rank_ended_before_it_could_open_it() -> None:
    store = DictStore()
    store.append("termination/arrived", "1,")
    store.append("termination/arrived", "0,")
    store.termination_barrier(0, 2, SHORT)


def test_no_barrier_waits_for_a_rank_that_has_ended() -> None:
    store = DictStore()
    store.record_end(1, 2, Interruption.TERMINATED)
    store.iteration_barrier(0, 2, SHORT)
    store.termination_barrier(0, 2, SHORT)
    assert store.get_terminated_ranks() == {1}
    assert store.get_interruption_records() == (InterruptionRecord(1, Interruption.TERMINATED),)
    assert store.wait_for_outcome(SHORT) is IterationOutcome.INTERRUPTED


def test_the_end_of_a_rank_opens_the_barriers_at_which_the_others_wait() -> None:
    store = DictStore()
    store.arrive("iteration", 0)
    store.arrive("termination", 0)
    store.record_end(1, 2, Interruption.TERMINATED)
    assert store.check(["iteration/done", "termination/done"])


def test_the_completion_barrier_opens_when_all_ranks_have_completed() -> None:
    store = DictStore()
    results = in_threads(*(lambda rank=rank: store.completion_barrier(rank, 3, LONG, SHORT) for rank in (0, 1, 2)))
    assert {result.result() for result in results} == {IterationOutcome.COMPLETED}
    # The abort of a rank that has seen this outcome would not end: no other rank would take part in a restart.
    assert store.record_interrupted(InterruptionRecord(0, Interruption.TERMINATED)) is IterationOutcome.COMPLETED


def test_the_completion_barrier_ends_when_another_rank_fails() -> None:
    store = DictStore()
    results = in_threads(
        lambda: store.completion_barrier(0, 2, LONG, LONG),
        lambda: store.record_interrupted(InterruptionRecord(1, Interruption.EXCEPTION)),
    )
    assert results[0].result() is IterationOutcome.INTERRUPTED
    assert store.completion_barrier(1, 2, LONG) is IterationOutcome.INTERRUPTED


def test_the_completion_barrier_has_a_time_limit_and_waits_in_chunks() -> None:
    store = DictStore()
    with pytest.raises(BarrierTimeoutError, match="ranks 1 of 2 did not reach the completion barrier"):
        store.completion_barrier(0, 2, 5 * SHORT, SHORT)
    assert store.calls.count(("wait", "outcome")) > 1


def test_a_completed_rank_ends_the_wait_of_spares() -> None:
    store = DictStore()
    assert not store.is_any_rank_completed()
    assert not store.wait_for_completed_rank(SHORT)
    store.record_completed()
    assert store.is_any_rank_completed()
    assert store.wait_for_completed_rank(LONG)


def test_all_ranks_exclude_the_same_terminated_ranks() -> None:
    store = DictStore()
    store.record_terminated_rank(2)
    store.record_terminated_rank(0)
    assert store.exclude_terminated_ranks() == {0, 2}
    store.record_terminated_rank(1)  # it ended after one rank had decided
    assert store.exclude_terminated_ranks() == {0, 2}


def test_without_terminated_ranks_none_is_excluded_later_either() -> None:
    store = DictStore()
    assert store.exclude_terminated_ranks(LONG) == set()
    store.record_terminated_rank(1)
    assert store.exclude_terminated_ranks(LONG) == set()


def test_the_last_call_waits_for_ranks_that_end_together() -> None:
    class Ending(DictStore):
        def wait(self, keys: Any, timeout: timedelta) -> None:
            self.record_terminated_rank(5)
            super().wait(keys, SHORT)

    store = Ending()
    store.record_terminated_rank(4)
    assert store.exclude_terminated_ranks(timedelta(seconds=1)) == {4, 5}


def test_initial_ranks_and_hosts() -> None:
    store = DictStore()
    store.set_initial_rank(1, 3, "node-3")
    assert store.get_initial_rank(1) == 3
    assert store.get_members([1]) == [(3, "node-3")]
    assert (store.find_rank(3), store.find_rank(0)) == (1, None)


def test_interruption_records_keep_their_order_and_count_once() -> None:
    store = DictStore()
    records = [InterruptionRecord(rank, kind) for rank, kind in enumerate(Interruption)]
    for record in (*records, records[0]):
        store.record_interrupted(record)
    assert store.get_interruption_records() == tuple(records)


def test_iterations_share_no_keys() -> None:
    call = DictStore()
    call.for_iteration(0).record_interrupted(InterruptionRecord(0, Interruption.EXCEPTION))
    assert call.for_iteration(1).wait_for_outcome(SHORT) is None
    assert all(key.startswith("iteration/0/") for key in call.data)


def test_a_rank_that_others_need_waits_until_all_have_left() -> None:
    store = DictStore()
    store.record_base_terminated_rank(0)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(store.wait_for_base_terminated_ranks, 3)
        store.record_base_terminated_rank(2)
        store.record_base_terminated_rank(2)  # its monitor process too
        assert store.get_base_terminated_count() == 2
        assert not store.check(["left_by/3"])
        store.record_base_terminated_rank(1)
        waiting.result(20)
    assert store.check(["left_by/3"])


@pytest.mark.parametrize(
    ("left", "terminated", "missing", "world_size", "expected"),
    [
        ([], [], {2}, 4, False),  # it is only slow
        ([3], [], {2}, 4, True),
        ([3], [], {1, 2}, 4, False),  # one of them is only slow
        ([3, 1], [], {1, 2}, 4, True),
        ([3, 1], [], {2}, 4, True),
        ([3], [1], {2}, 4, False),  # it ended in this iteration: rank 2 is only slow
        ([3, 0], [], {2}, 3, True),  # one of the two was excluded before
        ([3], [], {2}, 3, False),
    ],
)
def test_ranks_that_ended_between_two_iterations(
    left: list[int], terminated: list[int], missing: set[int], world_size: int, expected: bool
) -> None:
    call = DictStore()
    current = call.for_iteration(7)
    for initial_rank in left:
        call.record_base_terminated_rank(initial_rank)
    for rank in terminated:
        current.record_terminated_rank(rank)
    assert current.record_lost_before_iteration(missing, call, 4, world_size) is expected
    assert current.get_terminated_ranks() == ({*terminated, *missing} if expected else set(terminated))


def test_a_barrier_reports_missing_ranks_while_it_waits() -> None:
    call = DictStore()
    current = call.for_iteration(1)
    call.record_base_terminated_rank(1)
    reported: list[set[int]] = []

    def report(missing: set[int]) -> None:
        reported.append(missing)
        current.record_lost_before_iteration(missing, call, 2, 2)

    current.iteration_barrier(0, 2, LONG, on_missing=report)
    assert reported == [{1}]
    assert current.wait_for_outcome(SHORT) is IterationOutcome.INTERRUPTED


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (type("DistStoreError", (RuntimeError,), {})("wait"), False),
        (RuntimeError("Socket Timeout"), False),
        (type("DistNetworkError", (RuntimeError,), {})("the server has ended"), None),
        (ConnectionResetError(), None),
    ],
)
def test_time_outs_of_torchs_clients_are_no_errors(error: Exception, expected: bool | None) -> None:
    class Failing(DictStore):
        def wait(self, keys: Any, timeout: timedelta) -> None:
            raise error

    if expected is None:
        with pytest.raises(type(error)):
            Failing().wait_for(["key"], SHORT)
    else:
        assert Failing().wait_for(["key"], SHORT) is expected

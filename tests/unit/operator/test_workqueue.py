"""The keyed work queue. Times are arguments, so the tests need no clock."""

from __future__ import annotations

import asyncio

import pytest

from elasticjob_operator.queue.workqueue import FIRST_BACKOFF, LONGEST_BACKOFF, Schedule, WorkQueue


def schedule() -> Schedule[str]:
    return Schedule(jitter=lambda: 1.0)


def test_a_key_enqueued_many_times_is_taken_once() -> None:
    s = schedule()
    for _ in range(100):
        s.enqueue("a", 0.0)
    assert (len(s), s.take(0.0), s.take(0.0)) == (1, "a", None)


def test_a_key_enqueued_while_it_runs_is_taken_again_after_it_is_done() -> None:
    s = schedule()
    s.enqueue("a", 0.0)
    assert s.take(0.0) == "a"
    s.enqueue("a", 0.0)
    s.enqueue("b", 0.0)
    assert (s.take(0.0), s.take(0.0), s.next_due()) == ("b", None, None)
    s.done("a", 1.0)
    assert s.take(1.0) == "a"


def test_the_earlier_time_wins() -> None:
    s = schedule()
    s.enqueue("a", 9.0)
    s.enqueue("a", 3.0)
    s.enqueue("a", 5.0)
    assert (s.next_due(), s.take(2.9), s.take(3.0)) == (3.0, None, "a")
    s.done("a", 3.0)
    assert s.next_due() is None


def test_the_longest_waiting_goes_first() -> None:
    s = schedule()
    for key, at in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
        s.enqueue(key, at)
    assert [s.take(5.0) for _ in range(3)] == ["a", "b", "c"]
    assert s.oldest_wait(5.0) == 0.0


def test_failures_back_off_until_a_success() -> None:
    s, now, waits = schedule(), 0.0, []
    s.enqueue("a", now)
    for _ in range(10):
        assert s.take(now) == "a"
        s.done("a", now, failed=True)
        due = s.next_due()
        assert due is not None
        waits.append(due - now)
        now = due
    assert waits[:3] == [FIRST_BACKOFF, FIRST_BACKOFF * 2, FIRST_BACKOFF * 4]
    assert waits[-1] == LONGEST_BACKOFF
    s.take(now)
    s.done("a", now, again_after=7.0)
    assert s.next_due() == now + 7.0
    s.take(now + 7.0)
    s.done("a", now + 7.0, failed=True)
    assert s.next_due() == now + 7.0 + FIRST_BACKOFF


def test_the_delay_of_a_key_that_fails_for_days_does_not_overflow() -> None:
    s = schedule()
    for attempt in range(3000):
        s.enqueue("a", float(attempt))
        assert s.take(float(attempt)) == "a"
        s.done("a", float(attempt), failed=True)
        assert s.next_due() == attempt + min(LONGEST_BACKOFF, FIRST_BACKOFF * 2.0 ** min(attempt, 60))


def test_keys_that_are_not_due_do_not_wait() -> None:
    s = schedule()
    s.enqueue("a", 9.0)
    assert (s.oldest_wait(5.0), s.oldest_wait(10.0)) == (0.0, 1.0)
    assert (s.due(5.0), s.due(10.0), len(s)) == (0, 1, 1)


def test_a_key_that_runs_for_minutes_does_not_wait_meanwhile() -> None:
    """The creations of a large job take so long, and the events of its first pods make it due again."""
    s = schedule()
    s.enqueue("large", 0.0)
    assert s.take(0.0) == "large"
    s.enqueue("large", 1.0)
    assert (s.oldest_wait(128.0), s.due(128.0)) == (0.0, 0)
    s.enqueue("other", 100.0)
    assert (s.oldest_wait(128.0), s.due(128.0)) == (28.0, 1)
    s.done("large", 128.0, again_after=300.0)
    assert (s.oldest_wait(130.0), s.due(130.0), s.next_due()) == (30.0, 2, 100.0)
    assert [s.take(130.0), s.oldest_wait(130.0), s.take(130.0)] == ["other", 2.0, "large"]
    s.done("large", 131.0, again_after=300.0)
    assert s.next_due() == 431.0


def test_enqueue_cuts_a_backoff_short() -> None:
    s = schedule()
    s.enqueue("a", 0.0)
    s.take(0.0)
    s.done("a", 0.0, failed=True)
    s.enqueue("a", 0.1)
    assert s.next_due() == 0.1


@pytest.mark.parametrize("workers", [1, 3])
async def test_workers_share_the_keys_and_an_error_of_one_key_does_not_stop_the_others(workers: int) -> None:
    reconciled: list[str] = []
    concurrency: list[int] = []
    running: set[str] = set()
    finished = asyncio.Event()

    async def reconcile(key: str) -> float | None:
        assert key not in running
        running.add(key)
        concurrency.append(len(running))
        await asyncio.sleep(0)
        running.discard(key)
        reconciled.append(key)
        if set(reconciled) == {"a", "b", "c", "bad"}:
            finished.set()
        if key == "bad":
            raise RuntimeError("broken")
        return None

    queue: WorkQueue[str] = WorkQueue(reconcile)
    for key in ("bad", "a", "b", "c"):
        queue.enqueue(key)
    work = asyncio.create_task(queue.run(workers))
    await asyncio.wait_for(finished.wait(), 5.0)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    assert max(concurrency) <= workers
    assert len(queue) >= 1, "the failed key waits for its retry"


async def test_the_queue_is_idle_once_no_key_is_due() -> None:
    reconciled: list[str] = []

    async def reconcile(key: str) -> float | None:
        reconciled.append(key)
        return 300.0

    queue: WorkQueue[str] = WorkQueue(reconcile)
    for number in range(50):
        queue.enqueue(f"job-{number}")
    work = asyncio.create_task(queue.run(3))
    await asyncio.wait_for(queue.idle(), 5.0)
    await asyncio.sleep(0)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    assert len(reconciled) == 50

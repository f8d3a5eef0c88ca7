"""One tenant must not stop another: namespaces take turns in the work queue and in the rate limit of requests."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticjob_operator.kube.limits import ConcurrencyLimit, RateLimit
from elasticjob_operator.queue.fair_queue import FairQueue
from elasticjob_operator.queue.workqueue import MOST_WORKERS, Schedule, WorkQueue
from support.common.examples import examples

GROUPS = st.sampled_from("abcd")
Key = tuple[str, int]
"""Namespace and number of a job."""


def group_of(key: Key) -> str:
    return key[0]


# ---- the queue -------------------------------------------------------------------------------------------------


def test_groups_take_turns_and_keep_the_order_of_their_own_items() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in ("a1", "a2", "a3", "b1", "c1", "b2"):
        queue.add(item[0], item)
    assert [queue.pop() for _ in range(7)] == ["a1", "b1", "c1", "a2", "b2", "a3", None]


def test_a_group_that_may_not_have_its_turn_keeps_its_place() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in ("a1", "b1", "c1"):
        queue.add(item[0], item)
    assert queue.pop(lambda group: group == "c") == "c1"
    assert queue.pop(lambda group: group == "d") is None
    assert [queue.pop(), queue.pop(), len(queue)] == ["a1", "b1", 0]


@examples(200)
@given(st.lists(st.one_of(GROUPS, st.none()), max_size=80))
def test_no_item_is_lost_doubled_or_overtaken_by_more_than_its_groups_turns(steps: list[str | None]) -> None:
    """A step adds an item to a group, or pops one (None)."""
    queue: FairQueue[Key] = FairQueue()
    waiting: dict[str, list[Key]] = defaultdict(list)
    bounds: dict[Key, int] = {}
    pops = 0
    for number, step in enumerate([*steps, *[None] * len(steps)]):
        if step is not None:
            item = (step, number)
            queue.add(step, item)
            waiting[step].append(item)
            bounds[item] = pops + len(waiting[step]) * 4  # the number of groups
            continue
        found = queue.pop()
        if found is None:
            assert not any(waiting.values())
            continue
        pops += 1
        assert waiting[found[0]].pop(0) == found
        assert pops <= bounds[found]
        assert len(queue) == sum(map(len, waiting.values()))
    assert len(queue) == 0


# ---- which job a worker reconciles next ------------------------------------------------------------------------


def test_the_one_job_of_a_namespace_comes_before_the_second_one_of_another() -> None:
    schedule: Schedule[Key] = Schedule(group_of)
    for number in range(1000):
        schedule.enqueue(("a", number), 0.0)
    schedule.enqueue(("b", 0), 5.0)
    assert [schedule.take(5.0) for _ in range(3)] == [("a", 0), ("b", 0), ("a", 1)]


def test_a_namespace_that_has_no_worker_gets_one_although_all_are_busy() -> None:
    schedule: Schedule[Key] = Schedule(group_of)
    for number in range(4):
        schedule.enqueue(("a", number), 0.0)
    assert [schedule.take(0.0, 2) for _ in range(3)] == [("a", 0), ("a", 1), None]
    for number in range(2):
        schedule.enqueue(("b", number), 1.0)
    assert [schedule.take(1.0, 2) for _ in range(2)] == [("b", 0), None], "one worker more, not two"
    schedule.done(("a", 0), 1.0)
    assert schedule.take(1.0, 2) is None, "two still run"
    schedule.done(("b", 0), 1.0)
    assert schedule.take(1.0, 2) == ("a", 2), "it has waited for its turn"
    assert schedule.take(1.0, 2) == ("b", 1)


def test_not_more_than_a_multiple_of_the_workers_run() -> None:
    schedule: Schedule[Key] = Schedule(group_of)
    for number in range(100):
        schedule.enqueue((f"n{number}", 0), 0.0)
    taken = [key for _ in range(100) if (key := schedule.take(0.0, 2)) is not None]
    assert len(taken) == 2 * MOST_WORKERS


STEPS = st.one_of(
    st.tuples(st.just("enqueue"), st.tuples(GROUPS, st.integers(0, 3)), st.integers(0, 4)),
    st.tuples(st.just("take"), st.none(), st.integers(0, 2)),
    st.tuples(st.just("done"), st.integers(0, 9), st.sampled_from([-1, 0, 3])),
)


@examples(300)
@given(st.lists(STEPS, max_size=60))
def test_each_key_that_is_enqueued_runs_and_none_runs_twice_at_once(steps: list[tuple[str, object, int]]) -> None:
    schedule: Schedule[Key] = Schedule(group_of)
    now, running, wanted = 0.0, list[Key](), set[Key]()
    for name, what, number in steps:
        if name == "enqueue":
            assert isinstance(what, tuple)
            key = (str(what[0]), int(what[1]))
            schedule.enqueue(key, now + number)
            wanted.add(key)
        elif name == "take":
            now += number
            found = schedule.take(now, 2)
            if found is not None:
                assert found not in running
                busy = Counter(map(group_of, running))
                assert len(running) < 2 or not busy[found[0]]
                running.append(found)
                wanted.discard(found)
        elif running:
            assert isinstance(what, int)
            key = running.pop(what % len(running))
            schedule.done(key, now, again_after=number if number >= 0 else None)
            wanted |= {key} if number >= 0 else set()
    for key in running:
        schedule.done(key, now)
    now += 100.0
    while (found := schedule.take(now, 2)) is not None:
        wanted.discard(found)
        schedule.done(found, now)
    assert (wanted, len(schedule)) == (set(), 0)


async def test_a_job_is_reconciled_while_large_ones_of_another_namespace_keep_all_workers() -> None:
    release, reconciled = asyncio.Event(), asyncio.Event()

    async def reconcile(key: Key) -> None:
        if key[0] == "large":
            await release.wait()
        else:
            reconciled.set()

    queue: WorkQueue[Key] = WorkQueue(reconcile, group_of=group_of)
    for number in range(10):
        queue.enqueue(("large", number))
    work = asyncio.create_task(queue.run(2))
    queue.enqueue(("small", 0))
    await asyncio.wait_for(reconciled.wait(), 5.0)
    assert len(queue) == 8, "two of the large ones run"
    release.set()
    await asyncio.wait_for(queue.idle(), 5.0)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


# ---- which request is sent next --------------------------------------------------------------------------------


async def sent(limit: RateLimit, namespaces: str) -> list[str]:
    """Ask for a token for each of these namespaces at once; return them in the order in which they get one."""
    order: list[str] = []

    async def request(namespace: str) -> None:
        await limit.acquire(namespace)
        order.append(namespace)

    await asyncio.gather(*map(request, namespaces))
    return order


async def test_the_request_of_a_namespace_waits_for_one_turn_of_another_with_many() -> None:
    order = await sent(RateLimit(1000.0, 1), "a" * 50 + "bb" + "c")
    assert order[:6] == ["a", "a", "b", "c", "a", "b"], "the first one found a token"
    assert Counter(order) == {"a": 50, "b": 2, "c": 1}


async def test_the_rate_is_kept_while_requests_wait() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    await sent(RateLimit(200.0, 5), "ab" * 15)
    assert loop.time() - began >= 24 / 200.0


async def test_a_request_that_is_cancelled_while_it_waits_takes_no_token() -> None:
    limit = RateLimit(50.0, 1)
    await sent(limit, "aa")
    waiting = [asyncio.ensure_future(limit.acquire("a")) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    waiting[1].cancel()
    began = asyncio.get_running_loop().time()
    await waiting[2]
    assert asyncio.get_running_loop().time() - began < 2 / 50.0 + 0.5
    assert limit.until_next() > 0.0
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]


async def test_requests_to_a_slow_api_server_begin_by_turns_of_their_namespaces() -> None:
    limit, began, answer = ConcurrencyLimit(2), list[str](), asyncio.Semaphore(0)

    async def request(namespace: str) -> None:
        async with limit.hold(namespace):
            began.append(namespace)
            await answer.acquire()

    requests = [asyncio.ensure_future(request(namespace)) for namespace in "aaaaab"]
    await asyncio.sleep(0)
    requests[2].cancel()
    for _ in range(6):
        answer.release()
    await asyncio.gather(*requests, return_exceptions=True)
    assert began == ["a", "a", "b", "a", "a"], "the third one was cancelled"


async def test_a_request_that_is_cancelled_in_its_turn_passes_it_on() -> None:
    limit, done = ConcurrencyLimit(1), asyncio.Event()

    async def request(namespace: str) -> None:
        async with limit.hold(namespace):
            done.set()

    async with limit.hold("a"):
        waiting = [asyncio.ensure_future(request(namespace)) for namespace in "bc"]
        await asyncio.sleep(0)
    waiting[0].cancel()  # it has its turn by now, and has not run since
    await asyncio.wait_for(done.wait(), 5.0)
    await asyncio.gather(*waiting, return_exceptions=True)
    assert waiting[0].cancelled()
    async with asyncio.timeout(5.0), limit.hold("d"):
        pass

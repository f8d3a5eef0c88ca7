"""Leader election: when a candidate may take the Lease, and that two never lead together. The tests set the clocks."""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import Any

import pytest

from elasticjob_operator.kube import LEASES, Conflict, KubeError, Unclear
from elasticjob_operator.lease import (
    DURATION,
    LONGEST_SILENCE,
    RENEW_DEADLINE,
    RENEW_EVERY,
    REQUEST_TIMEOUT,
    RETRY_AFTER,
    Election,
    LeaseLost,
    ObservedLease,
    may_acquire,
    next_record,
)
from support.operator.world import Api


@pytest.mark.parametrize(
    ("name", "record", "waited", "allowed"),
    [
        ("no Lease", {}, 0.0, True),
        ("released", {"holderIdentity": ""}, 0.0, True),
        ("own", {"holderIdentity": "me"}, 0.0, True),
        ("of another holder", {"holderIdentity": "you", "leaseDurationSeconds": 15}, 14.9, False),
        (
            "of another holder, unchanged for its duration",
            {"holderIdentity": "you", "leaseDurationSeconds": 15},
            15.0,
            True,
        ),
        ("of unknown duration", {"holderIdentity": "you"}, DURATION - 1, False),
    ],
)
def test_may_acquire(name: str, record: dict[str, Any], waited: float, allowed: bool) -> None:
    assert may_acquire(ObservedLease(record, 100.0), "me", 100.0 + waited) is allowed


def test_each_change_of_holder_raises_the_generation() -> None:
    first = next_record({}, "a", 0.0)
    renewed = next_record(first, "a", 5.0)
    other = next_record(renewed, "b", 9.0)
    assert [r["leaseTransitions"] for r in (first, renewed, other)] == [1, 1, 2]
    assert renewed["acquireTime"] == first["acquireTime"] != other["acquireTime"]


class Clock:
    """A clock that advances only by `sleep`."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.now = 0.0
        self.on_sleep: Any = None

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.on_sleep is not None:
            await self.on_sleep()


def election(api: Api, me: str, clock: Clock | None = None) -> tuple[Election, Clock]:
    clock = clock or Clock(api)
    return Election(api, "ns", "op", me, clock=lambda: clock.now, wall=lambda: clock.now, sleep=clock.sleep), clock


async def test_the_second_candidate_waits_and_takes_over_a_released_lease() -> None:
    api = Api(0.0)
    second, clock = election(api, "b")
    first, _ = election(api, "a", clock)
    await first.acquire()

    async def renew_then_release() -> None:
        if clock.now > 30:
            await first.release()
        else:
            assert await first.try_acquire()

    clock.on_sleep = renew_then_release
    await second.acquire()
    assert clock.now > 30
    assert (first.generation, second.generation) == (1, 2)


async def test_a_candidate_takes_over_after_a_silent_leaders_lease_expired() -> None:
    api = Api(0.0)
    (first, _), (second, clock) = election(api, "a"), election(api, "b")
    await first.acquire()
    await second.acquire()
    assert DURATION <= clock.now <= DURATION + 4


async def test_a_leader_that_lost_the_lease_raises() -> None:
    api = Api(0.0)
    (first, _), (second, _) = election(api, "a"), election(api, "b")
    await first.acquire()
    await second.acquire()
    with pytest.raises(LeaseLost, match="b leads"):
        await first.renew()


async def test_a_leader_that_cannot_renew_raises_before_a_candidate_may_take_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api = Api(0.0)
    first, clock = election(api, "a")
    await first.acquire()

    async def broken(*_: Any, **__: Any) -> Any:
        raise Unclear("no answer")

    monkeypatch.setattr(api, "update", broken)
    with pytest.raises(LeaseLost, match="could not renew"):
        await first.renew()
    assert clock.now < DURATION


async def test_a_leader_writes_until_another_may_lead() -> None:
    leader, clock = election(Api(0.0), "a")
    clock.now = 50.0
    await leader.acquire()
    found = []
    for clock.now in (50.0, 50.0 + DURATION - 0.1, 50.0 + DURATION):
        found.append(leader.may_write())
    assert found == [True, True, False]


async def test_of_two_simultaneous_candidates_one_leads() -> None:
    api = Api(0.0)
    elections = [election(api, name)[0] for name in "ab"]
    assert [await e.try_acquire() for e in elections] == [True, False]


async def test_on_an_error_the_lease_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api(0.0)

    async def broken(*_: Any, **__: Any) -> Any:
        raise KubeError("down")

    monkeypatch.setattr(api, "get", broken)
    assert await election(api, "a")[0].try_acquire() is False
    assert (LEASES, "op") not in api.objects


@pytest.mark.parametrize(("silent_for", "lost"), [(LONGEST_SILENCE + 3.0, False), (math.inf, True)])
async def test_a_leader_whose_event_loop_hangs_does_not_renew(silent_for: float, lost: bool) -> None:
    """The loop hangs from the 20th second on. A leader that answers again before its deadline goes on."""
    api = Api(0.0)
    leader, clock = election(api, "a")
    leader.silence = lambda: clock.now - 20.0 if 20.0 <= clock.now < 20.0 + silent_for else 0.0

    async def stop() -> None:
        if clock.now > 60:
            raise TimeoutError

    clock.on_sleep = stop
    await leader.acquire()
    with pytest.raises(LeaseLost if lost else TimeoutError, match="has not answered" if lost else None):
        await leader.renew()
    latest = 20.0 + LONGEST_SILENCE + RENEW_DEADLINE
    assert (clock.now <= latest) is lost


async def test_a_candidate_whose_event_loop_hangs_takes_no_lease() -> None:
    api = Api(0.0)
    candidate, clock = election(api, "a")
    candidate.silence = lambda: LONGEST_SILENCE if clock.now < 30.0 else 0.0
    await candidate.acquire()
    assert clock.now >= 30.0


def test_a_candidate_leads_before_the_kubelet_ends_a_process_that_hangs() -> None:
    """The chart's liveness probe: three failures in a row, one every 10 s, each after 5 s."""
    asked_within, noticed_within = RENEW_EVERY, RENEW_EVERY
    assert asked_within + LONGEST_SILENCE + DURATION + noticed_within <= 2 * 10 + 5


# ---- slow and hanging requests ---------------------------------------------------------------------------------


def test_a_hanging_request_leaves_time_for_another_before_the_deadline_and_that_is_before_a_takeover() -> None:
    second_try = RENEW_EVERY + REQUEST_TIMEOUT + RETRY_AFTER
    assert second_try + 1.0 <= RENEW_DEADLINE <= DURATION - 2.0


async def test_the_deadline_counts_from_the_moment_that_the_renewal_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The API server commits at once, and its response takes 3 s. A candidate counts from the commit."""
    api = Api(0.0)
    first, clock = election(api, "a")
    update, commits = api.update, [0.0]

    async def respond_late(*args: Any, **more: Any) -> Any:
        if len(commits) > 3:
            raise Unclear("no answer")
        commits.append(clock.now)
        answer = await update(*args, **more)
        clock.now += 3.0
        return answer

    await first.acquire()
    monkeypatch.setattr(api, "update", respond_late)
    with pytest.raises(LeaseLost, match="could not renew"):
        await first.renew()
    assert len(commits) == 4
    assert clock.now <= commits[-1] + RENEW_DEADLINE


@pytest.mark.parametrize("stubborn", [False, True])
async def test_a_request_that_hangs_does_not_delay_the_end_of_leadership(
    monkeypatch: pytest.MonkeyPatch, stubborn: bool
) -> None:
    """`stubborn`: the request also ignores its cancellation."""
    api = Api(0.0)
    answered = asyncio.Event()
    leader = Election(api, "ns", "op", "a", deadline=0.3)
    await leader.acquire()

    async def hang(*_: Any, **__: Any) -> Any:
        while not answered.is_set():
            with contextlib.suppress(*([asyncio.CancelledError] if stubborn else [])):
                await answered.wait()
        raise Unclear("no answer")

    for call in ("get", "update"):
        monkeypatch.setattr(api, call, hang)
    renewing = asyncio.create_task(leader.renew())
    done, _ = await asyncio.wait({renewing}, timeout=10.0)
    answered.set()
    assert done, "the leader waits for its request"
    with pytest.raises(LeaseLost, match="could not renew"):
        await renewing


async def test_slow_requests_do_not_cost_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request takes almost as long as it may. A candidate that sees each renewal never takes over."""
    api = Api(0.0)
    (leader, clock), (candidate, _) = election(api, "a"), election(api, "b")
    await leader.acquire()
    update, renewals = api.update, [0]

    async def slow(*args: Any, **more: Any) -> Any:
        clock.now += REQUEST_TIMEOUT * 0.9
        candidate.clock = lambda: clock.now
        assert not await candidate.try_acquire()
        renewals[0] += 1
        if renewals[0] > 50:
            raise asyncio.CancelledError
        return await update(*args, **more)

    monkeypatch.setattr(api, "update", slow)
    with pytest.raises(asyncio.CancelledError):
        await leader.renew()
    assert clock.now > 60.0


async def test_a_renewal_that_was_committed_without_an_answer_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api(0.0)
    leader, clock = election(api, "a")
    await leader.acquire()
    update, writes = api.update, [0]

    async def lose_answers(*args: Any, **more: Any) -> Any:
        writes[0] += 1
        answer = await update(*args, **more)
        if writes[0] in (1, 2):
            raise Unclear("no answer")
        if writes[0] == 5:
            raise Conflict("another operator was faster", 409)
        return answer

    async def stop() -> None:
        if clock.now > 20:
            raise TimeoutError

    monkeypatch.setattr(api, "update", lose_answers)
    clock.on_sleep = stop
    with pytest.raises(TimeoutError):
        await leader.renew()
    assert leader.generation == 1


async def test_the_lease_is_released_although_the_last_renewal_got_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api(0.0)
    leader, _ = election(api, "a")
    await leader.acquire()
    update = api.update

    async def lose_answer(*args: Any, **more: Any) -> Any:
        await update(*args, **more)
        raise Unclear("no answer")

    with monkeypatch.context() as broken:
        broken.setattr(api, "update", lose_answer)
        assert not await leader.try_acquire()
    await leader.release()
    assert api.objects[LEASES, "op"]["spec"]["holderIdentity"] == ""

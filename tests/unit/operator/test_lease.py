"""Leader election: when a candidate may take the Lease, and that two never lead together. The tests set the clocks."""

from __future__ import annotations

from typing import Any

import pytest

from elasticjob_operator.kube import LEASES, KubeError, Unclear
from elasticjob_operator.lease import DURATION, Election, LeaseLost, ObservedLease, may_acquire, next_record
from support.operator_world import Api


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
            assert await first._try_acquire()

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


async def test_of_two_simultaneous_candidates_one_leads() -> None:
    api = Api(0.0)
    elections = [election(api, name)[0] for name in "ab"]
    assert [await e._try_acquire() for e in elections] == [True, False]


async def test_on_an_error_the_lease_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api(0.0)

    async def broken(*_: Any, **__: Any) -> Any:
        raise KubeError("down")

    monkeypatch.setattr(api, "get", broken)
    assert await election(api, "a")[0]._try_acquire() is False
    assert (LEASES, "op") not in api.objects

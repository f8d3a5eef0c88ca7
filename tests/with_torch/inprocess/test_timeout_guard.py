"""Process groups whose time-out torch does not act on: which count, and when the agent learns. gloo stands for nccl."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torch")
import torch.distributed as dist

from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.contract.restart_messages import CollectiveFailed, Guarded, WorkerToAgent
from elasticjob.inprocess._restartable import timeout_guard
from elasticjob.inprocess._restartable.timeout_guard import GroupState, TimeoutGuard, describe, find_failure

ROUND = RoundId(1, 0, 1)
HEALTHY = GroupState("default_pg", 600.0, "SUCCESS")
OVERDUE = GroupState("default_pg", 600.0, "TIMEOUT")
FAILED = GroupState("default_pg", 600.0, "COMM_ERROR")
OTHER = GroupState("mesh_tp", 30.0, "SUCCESS")


@pytest.mark.parametrize(
    ("before", "now", "overdue"),
    [
        ([HEALTHY], [HEALTHY], None),
        ([], [OVERDUE], True),
        ([HEALTHY, OTHER], [HEALTHY, GroupState("mesh_tp", 30.0, "TIMEOUT")], True),
        ([HEALTHY], [FAILED], None),  # the agent of a lost peer may report it
        ([FAILED], [FAILED], False),
        ([FAILED], [HEALTHY], None),  # a new group of that name
        ([FAILED], [GroupState("mesh_tp", 30.0, "REMOTE_ERROR")], None),
        ([GroupState("default_pg", 600.0, None)], [GroupState("default_pg", 600.0, None)], None),
    ],
)
def test_a_round_ends_if_torch_would_have_ended_the_process(
    before: list[GroupState], now: list[GroupState], overdue: bool | None
) -> None:
    failure = find_failure(ROUND, before, now)
    assert (failure.overdue if failure else None) == overdue


def test_the_message_names_the_group_and_its_time_out() -> None:
    failure = find_failure(ROUND, [], [HEALTHY, GroupState("mesh_tp", 30.0, "TIMEOUT")])
    assert failure is not None
    assert failure.message == "a collective of process group mesh_tp has exceeded its time-out of 30 s"


def test_the_shortest_time_out_counts_and_whether_torch_tells() -> None:
    assert describe(ROUND, [HEALTHY, OTHER]) == Guarded(ROUND, 30.0, by_collectives=True)
    assert describe(ROUND, [HEALTHY, GroupState("old", 900.0, None)]) == Guarded(ROUND, 600.0, by_collectives=False)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=77))
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_gloo_groups_have_their_own_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    assert timeout_guard.guarded_groups() == []
    monkeypatch.setattr(timeout_guard, "GUARDED", ("gloo",))
    (state,) = timeout_guard.guarded_groups()
    assert (state.name, state.seconds) == ("default_pg", 77.0)


class Sent(queue.Queue[WorkerToAgent]):
    """What the guard sends to its agent."""

    def next(self) -> WorkerToAgent:
        return self.get(timeout=60)


def watch(monkeypatch: pytest.MonkeyPatch, groups: Any, *, interrupted: bool = False) -> tuple[TimeoutGuard, Sent]:
    sent = Sent()
    monkeypatch.setattr(timeout_guard, "INTERVAL", 0.001)
    monkeypatch.setattr(timeout_guard, "guarded_groups", groups)
    return TimeoutGuard(sent.put, lambda: interrupted), sent


def test_an_overdue_collective_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([[], [HEALTHY], [HEALTHY], [OVERDUE]])
    guard, sent = watch(monkeypatch, lambda: next(looks))
    with guard.watch(ROUND, active=True):
        assert sent.next() == Guarded(ROUND, 600.0)
        failed = sent.next()
    assert isinstance(failed, CollectiveFailed)
    assert failed.overdue
    assert sent.empty()


def test_errors_of_a_round_that_has_ended_are_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([[OVERDUE]])
    guard, sent = watch(monkeypatch, lambda: next(looks), interrupted=True)
    with guard.watch(ROUND, active=True):
        assert sent.next() == Guarded(ROUND, 600.0)
    assert sent.empty()


def test_nothing_is_watched_where_torch_acts_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    guard, sent = watch(monkeypatch, lambda: pytest.fail("looked"))
    monkeypatch.setattr("threading.Thread", lambda **_: pytest.fail("started"))
    with guard.watch(ROUND, active=False):
        pass
    assert sent.empty()


def test_a_torch_that_cannot_be_asked_is_no_silent_guard(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = queue.Queue[None]()

    def groups() -> list[GroupState]:
        raise AttributeError("get_error")

    class Errors:
        def write(self, text: str) -> None:
            if "set a hangPolicy" in text:
                failed.put(None)

    guard, sent = watch(monkeypatch, groups)
    monkeypatch.setattr("sys.stderr", Errors())
    with guard.watch(ROUND, active=True):
        failed.get(timeout=60)
        assert sent.next() == Guarded(ROUND, 600.0, by_collectives=False)  # the agent watches the steps

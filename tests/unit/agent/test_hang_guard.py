"""What guards workers against a hang where torch's own time-out is off."""

from __future__ import annotations

import pytest

from elasticjob._runtime.agent.monitoring.progress.hang_guard import HangGuard, guard_of
from elasticjob._runtime.agent.monitoring.progress.hangs import StackDump
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.contract.restart_messages import Guarded

ROUND = RoundId(1, 0, 1)
LONG, SHORT, OLD = Guarded(ROUND, 600.0), Guarded(ROUND, 30.0), Guarded(ROUND, 900.0, by_collectives=False)


@pytest.mark.parametrize(
    ("reports", "hang_policy", "guard"),
    [
        ([], False, None),
        ([LONG], True, None),  # the user has chosen
        ([LONG, SHORT], False, HangGuard(30.0, by_collectives=True)),
        ([LONG, OLD], False, HangGuard(600.0, by_collectives=False)),
    ],
)
def test_torchs_time_out_holds_unless_there_is_a_hang_policy(
    reports: list[Guarded], hang_policy: bool, guard: HangGuard | None
) -> None:
    assert guard_of(reports, hang_policy=hang_policy) == guard


def test_steps_are_watched_only_where_torch_does_not_tell() -> None:
    assert HangGuard(600.0, by_collectives=True).step_timeout == 0
    assert HangGuard(600.0, by_collectives=False).step_timeout == 600


@pytest.mark.parametrize("by_collectives", [True, False])
def test_people_read_the_seconds_and_what_to_set(by_collectives: bool) -> None:
    guard = HangGuard(600.0, by_collectives)
    assert "600 s" in guard.status
    assert "hangPolicy" in guard.status
    first, *_ = StackDump(1, None, 601.0, "").failure("pod", 0.0, guard.cause).message.split("\n")
    assert first.startswith("no progress for 601.0 s after its start: the process does not respond; ")
    assert "600 s" in first
    assert "spec.hangPolicy is not set" in first

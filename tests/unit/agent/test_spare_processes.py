"""When spare processes start, as a table, and what the log says of them."""

from __future__ import annotations

import pytest

from elasticjob._runtime.agent.workers.spares.spare_decisions import (
    RankInRound,
    describe_spare_wait,
    first_note,
    may_start,
)

TRAINS, CALLED, STARTS = RankInRound(True, 100.0), RankInRound(False, 100.0), RankInRound(False, None)


@pytest.mark.parametrize(
    ("ranks", "start_seconds", "now", "starts"),
    [
        ([TRAINS, TRAINS], 40.0, 100.1, True),
        ([TRAINS, CALLED], 40.0, 139.9, False),
        ([TRAINS, CALLED], 40.0, 140.0, True),  # it reports no steps
        ([CALLED], 0.5, 109.9, False),
        ([CALLED], 0.5, 110.0, True),
        ([TRAINS, STARTS], 0.5, 900.0, False),
        ([RankInRound(True, None)], 0.5, 0.0, True),  # a step says that it is in its function
    ],
)
def test_a_worker_trains_once_it_makes_steps_or_has_run_as_long_as_it_took_to_start(
    ranks: list[RankInRound], start_seconds: float, now: float, starts: bool
) -> None:
    assert may_start(ranks, start_seconds, now) is starts


def test_the_log_says_what_they_wait_for() -> None:
    text = describe_spare_wait([0, 3], 40.0)
    assert text.startswith("spare processes of local ranks 0, 3 start once all workers of this pod have made a step")
    assert "for 40 s" in text
    assert (first_note(1.0), first_note(40.0)) == (30.0, 80.0)

"""What a local run says while it waits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticjob._runtime.contract.messages import Outcome, Report, RoundPhase, TrainingProgress
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.local.waits import Wait, WaitLines, current_wait

ROUND = RoundId(1, 0, 2)
STARTS = Report(0, RoundPhase.RUNNING, "the workers of 2 pods start", ROUND, 1, 2, 0.0)
RUNS = replace(STARTS, reason="the workers of 2 pods run", formed_at=7.0)
GATHERS = replace(STARTS, phase=RoundPhase.GATHERING, reason="1 of at least 2 worker pods available", round=None)
OLDER, PRESENT = (TrainingProgress(round_id, 3, None, None) for round_id in (RoundId(1, 0, 1), ROUND))
NO_STEP = (
    "round 1.0.2: the script imports, prepares or trains; it has not called elasticjob.progress with a total or metrics"
)


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (None, Wait("the store starts")),
        (GATHERS, Wait("gathering: 1 of at least 2 worker pods available")),
        (STARTS, Wait("round 1.0.2: the workers of 2 pods start")),
        (RUNS, Wait(NO_STEP, repeats=False)),
        (replace(RUNS, progress=OLDER), Wait(NO_STEP, repeats=False)),
        (replace(RUNS, progress=PRESENT), None),
        (replace(GATHERS, outcome=Outcome.SUCCEEDED), None),
    ],
    ids=["no report", "gathers", "starts", "runs", "step of an older round", "trains", "ended"],
)
def test_what_the_run_waits_for(report: Report | None, expected: Wait | None) -> None:
    assert current_wait(report) == expected


def printed(waits: dict[int, Wait | None], until: int) -> list[tuple[int, str]]:
    """Return the lines with their times, for the wait that begins at each time in `waits`."""
    lines, wait, found = WaitLines(), None, []
    for now in range(until):
        wait = waits.get(now, wait)
        if text := lines.line(wait, now):
            found.append((now, text))
    return found


def test_a_long_wait_has_lines_that_become_rare() -> None:
    assert printed({0: Wait("a"), 100: None}, 300) == [
        (10, "a, for 10 s so far"),
        (20, "a, for 20 s so far"),
        (40, "a, for 40 s so far"),
        (80, "a, for 80 s so far"),
    ]


def test_each_wait_has_its_own_time_and_one_that_may_last_has_one_line() -> None:
    assert printed({0: Wait("a"), 9: Wait("b", repeats=False)}, 300) == [(19, "b, for 10 s so far")]

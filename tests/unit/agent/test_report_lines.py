"""What a local run prints about the reports of its coordinator, and how it says that it ended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticjob._runtime.contract.messages import (
    EndReason,
    Failure,
    FailureClass,
    Outcome,
    Report,
    RoundEnded,
    RoundPhase,
    Straggler,
)
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.local.report_lines import ReportLines, run_result

ROUND = RoundId(1, 0, 1)
STARTS = Report(0, RoundPhase.RUNNING, "the workers of 2 nodes start", ROUND, 1, 2, 0.0, active=2)
RUNS = replace(STARTS, formed_at=5.0)
FAILURE = Failure(FailureClass.USER_ERROR, "toy-0-0", 1.0, 0, 3)


def test_each_change_has_a_line_once() -> None:
    lines = ReportLines()
    assert lines.lines(STARTS, []) == [f"round {ROUND}: the workers of 2 nodes start"]
    assert lines.lines(RUNS, []) == [f"round {ROUND} runs: 2 workers on 2 pods"]
    assert lines.lines(RUNS, []) == []
    slow = Straggler(1, "toy-1-0", 0.05, 0.01, 6.0)
    assert lines.lines(replace(RUNS, straggler=slow), []) == [
        "rank 1 on toy-1-0 holds up every step: 50 ms of its own, 10 ms on other ranks"
    ]
    assert lines.lines(RUNS, []) == ["all ranks keep up again"]


def test_the_end_of_a_round_has_a_line_unless_it_ends_the_job() -> None:
    ended = RoundEnded(ROUND, EndReason.WORKER_FAILED, "", True, 2.0, 2, FAILURE)
    (line,) = ReportLines().lines(RUNS, [ended])[:1]
    assert line.startswith(f"round {ROUND} ended: WorkerFailed: ")
    assert line.endswith(" (counts as a restart)")
    failed = replace(RUNS, outcome=Outcome.FAILED, failure=FAILURE)
    assert all("ended" not in line for line in ReportLines().lines(failed, [ended]))


@pytest.mark.parametrize(
    ("report", "problem", "result"),
    [
        (replace(RUNS, outcome=Outcome.SUCCEEDED), "", (0, "succeeded; 1 restart")),
        (replace(RUNS, outcome=Outcome.FAILED), "", (1, "failed: the workers of 2 nodes start; 1 restart")),
        (None, "the store ended", (1, "failed: the store ended")),
        (RUNS, "", (130, "was interrupted")),
    ],
)
def test_how_a_run_ended(report: Report | None, problem: str, result: tuple[int, str]) -> None:
    assert run_result(report, problem, 1) == result


def test_rounds_and_failures_name_a_stage_after_the_first() -> None:
    lines = ReportLines()
    lines.lines(RUNS, [])
    second = replace(RUNS, stage=2)
    assert lines.lines(second, []) == [f"round {ROUND} comes to stage 2"]
    again = replace(second, round=RoundId(1, 0, 2), formed_at=9.0)
    ended = RoundEnded(ROUND, EndReason.WORKER_FAILED, "", True, 2.0, 2, replace(FAILURE, stage=2))
    assert lines.lines(again, [ended]) == [
        f"round {ROUND} ended: WorkerFailed: rank 0 in stage 2 died: exit 3 (UserError) (counts as a restart)",
        f"round {RoundId(1, 0, 2)} runs in stage 2: 2 workers on 2 pods",
    ]

"""Which of several agents' reports about the training the coordinator keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticjob._runtime.contract.messages import TrainingProgress
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.rendezvous.observations.counting_report import CountingReport, counts

SCRIPT = TrainingProgress(RoundId(1, 0, 1), 5, None, None)
LOG = replace(SCRIPT, from_log=True)
NEXT_ROUND = replace(LOG, round=RoundId(1, 0, 2), step=1)


@pytest.mark.parametrize(
    ("kept", "progress", "agent_id", "expected"),
    [
        (None, LOG, "a", True),
        (SCRIPT, replace(SCRIPT, step=4), "b", True),
        (SCRIPT, replace(LOG, step=6), "a", False),
        (LOG, replace(SCRIPT, step=3), "b", True),
        (SCRIPT, NEXT_ROUND, "b", True),
        (LOG, replace(LOG, step=6), "b", True),
        (LOG, LOG, "b", False),
        (LOG, replace(LOG, step=1), "b", False),
        (LOG, replace(LOG, step=1), "a", True),
    ],
    ids=[
        "the first one", "the script again", "a log after the script", "the script after a log", "the next round",
        "a log that is further", "a log with the same step", "a log that is behind", "the same log begins again",
    ],
)  # fmt: skip
def test_reports(kept: TrainingProgress | None, progress: TrainingProgress, agent_id: str, expected: bool) -> None:
    assert counts(CountingReport(kept, "a") if kept else None, progress, agent_id) is expected

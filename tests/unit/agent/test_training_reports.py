"""When an agent reports the training."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from elasticjob._runtime.agent.monitoring.progress.training_reports import TrainingReports
from elasticjob._runtime.contract.messages import TrainingProgress
from elasticjob._runtime.contract.names import RoundId

FIRST = TrainingProgress(RoundId(1, 0, 1), 1, 10, None)


async def test_a_change_is_sent_at_intervals_and_the_last_one_at_the_end() -> None:
    now: list[TrainingProgress | None] = [FIRST]
    sent: asyncio.Queue[TrainingProgress] = asyncio.Queue()
    reports = TrainingReports(lambda: now[0], sent.put_nowait, interval=0.01)
    reports.start()
    assert await asyncio.wait_for(sent.get(), 10) == FIRST
    now[0] = later = replace(FIRST, step=2)
    assert await asyncio.wait_for(sent.get(), 10) == later
    now[0] = last = replace(FIRST, step=3)
    reports.stop()
    assert sent.get_nowait() == last
    reports.stop()
    assert sent.empty(), "the same again is not sent"


async def test_nothing_is_sent_for_a_script_that_reports_nothing() -> None:
    sent: list[TrainingProgress] = []
    reports = TrainingReports(lambda: None, sent.append)
    reports.start()
    reports.send_now()
    reports.stop()
    assert sent == []

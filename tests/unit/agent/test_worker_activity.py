"""Steps in the output of workers, where no worker reports its own, show a hang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from elasticjob._runtime.agent.monitoring.progress.worker_progress import ProgressReport
from elasticjob._runtime.agent.reporting.log_watch import LogWatch
from elasticjob._runtime.agent.reporting.worker_output import OutputLine
from elasticjob._runtime.agent.workers.worker_activity import WorkerActivity
from elasticjob._runtime.contract.log_rules.rules import LogRule
from elasticjob._runtime.contract.messages import StartRound
from elasticjob._runtime.contract.names import RoundId

ROUND = RoundId(1, 0, 1)
WORKERS = [SimpleNamespace(local_rank=rank, rank=rank, trained=False, stack_dump_file="/none") for rank in (0, 1)]


def monitor(*heartbeats: ProgressReport, running: bool = True) -> WorkerActivity:
    """Return the monitor of a round whose output shows step 7 at 12 s."""
    watch = LogWatch("bert-0-0", lambda: 12.0)
    workers = {2**22 + 1 + worker.rank: worker for worker in WORKERS} if running else {}
    table: Any = SimpleNamespace(workers=lambda *states: workers)
    progress: Any = SimpleNamespace(heartbeats=lambda: heartbeats, pid=lambda rank: None)
    times: Any = SimpleNamespace(longest_start=None, started_at=2.0)
    found = WorkerActivity("bert-0-0", table, progress, times, watch)
    start = StartRound(ROUND, 0, 1, 0, 2, 0, 2, "", 0, 0, 3, log_rules=(LogRule("step", r"step (?P<step>\d+)"),))
    found.begin_round(start)
    watch.feed(ROUND, 0, [OutputLine(b"step 7")])
    return found


def test_the_time_of_the_last_step_in_the_output() -> None:
    assert monitor().last_steps() == (12.0,)
    assert monitor(running=False).last_steps() == ()


def test_what_a_worker_reports_itself_comes_first() -> None:
    assert monitor(ProgressReport(1, 4, 9.0)).last_steps() == (9.0,)


async def test_a_step_in_the_output_says_nothing_of_which_rank_is_behind() -> None:
    failure = await monitor().dump_stacks()
    assert failure is not None
    assert (failure.step, failure.rank) == (None, 0)
    assert "s after step 7: the process does not respond" in failure.message

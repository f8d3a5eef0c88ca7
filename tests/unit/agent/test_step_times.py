"""Step times, computed from the workers' heartbeats at the start and the end of a window."""

from __future__ import annotations

import asyncio

import pytest

from elasticjob._runtime.agent.monitoring.progress.step_times import StepTimeMonitor, common_steps, step_times
from elasticjob._runtime.agent.monitoring.progress.worker_progress import ProgressReport

BEFORE = (ProgressReport(0, 100, 50.0, 3.0), ProgressReport(1, 100, 50.0, 9.0))


def test_a_step_and_each_workers_own_part_of_it() -> None:
    after = (ProgressReport(0, 108, 51.0, 3.5), ProgressReport(1, 108, 52.0, 10.0))
    assert common_steps(BEFORE, after) == 8
    assert step_times(BEFORE, after) == (0.25, (0.0625, 0.125))


def test_no_step_times_unless_every_worker_measures_its_own() -> None:
    assert step_times(BEFORE, (ProgressReport(0, 110, 51.0, 3.2), ProgressReport(1, 110, 51.1, 9.0))) is None


@pytest.mark.parametrize(
    ("before", "after", "steps"),
    [
        ((), BEFORE, -1),
        (BEFORE, BEFORE, 0),
        (BEFORE, (ProgressReport(0, 107, 51.0, 4.0), ProgressReport(1, 106, 51.0, 9.8)), 6),
        (BEFORE, (ProgressReport(0, 107, 51.0, 4.0), ProgressReport(1, 5, 51.0, 9.8)), -95),
    ],
    ids=["a worker's first step", "no step", "the slowest counts", "a restarted step count"],
)
def test_steps_that_every_worker_has_made(
    before: tuple[ProgressReport, ...], after: tuple[ProgressReport, ...], steps: int
) -> None:
    assert common_steps(before, after) == steps


class Script:
    """The monitor reads one of `heartbeats` after the other; after the last it is stopped."""

    def __init__(self, *heartbeats: tuple[ProgressReport, ...]) -> None:
        self.heartbeats = [*heartbeats]
        self.reported: list[tuple[float, tuple[float, ...]]] = []
        self.over = asyncio.Event()
        self.monitor = StepTimeMonitor(self.read, lambda *times: self.reported.append(times), 0.001)

    def read(self) -> tuple[ProgressReport, ...]:
        if not self.heartbeats:
            self.over.set()
            return ()
        return self.heartbeats.pop(0)

    async def play(self) -> list[tuple[float, tuple[float, ...]]]:
        self.monitor.start(1)
        self.monitor.start(1)  # as for a second worker: only one window runs at a time
        await asyncio.wait_for(self.over.wait(), 20)
        self.monitor.stop()
        return self.reported


def report(step: int, own: float) -> tuple[ProgressReport, ...]:
    return (ProgressReport(0, step, float(step), own),)


async def test_the_first_steps_are_not_counted_and_a_window_lasts_until_there_are_enough() -> None:
    few = report(5, 11.0)
    reported = await Script((), report(1, 10.0), report(1, 10.0), few, report(9, 14.0), report(25, 16.0)).play()
    assert reported == [(1.0, (0.5,)), (1.0, (0.125,))]


async def test_a_restarted_step_count_begins_a_new_window() -> None:
    assert await Script(report(100, 10.0), report(3, 11.0), report(19, 13.0)).play() == [(1.0, (0.125,))]


async def test_a_node_with_a_worker_that_does_not_report_sends_nothing() -> None:
    script = Script(report(1, 1.0), (*report(50, 2.0), *report(60, 3.0)), report(99, 0.0))
    assert await script.play() == []


async def test_a_stopped_step_time_monitor_reads_no_heartbeats() -> None:
    script = Script(report(1, 1.0), report(90, 3.0))
    script.monitor.start(1)
    script.monitor.stop()
    await asyncio.get_running_loop().run_in_executor(None, sum, ())
    assert len(script.heartbeats) == 2

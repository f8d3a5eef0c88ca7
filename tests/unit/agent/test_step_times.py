"""How long steps take, from two looks at what the workers have written."""

from __future__ import annotations

import asyncio

import pytest

from elasticjob.agent.monitoring.step_times import StepTimeMonitor, common_steps, step_times
from elasticjob.agent.monitoring.worker_progress import ProgressReport

BEFORE = (ProgressReport(0, 100, 50.0, 3.0), ProgressReport(1, 100, 50.0, 9.0))


def test_a_step_and_each_workers_own_part_of_it() -> None:
    after = (ProgressReport(0, 108, 51.0, 3.5), ProgressReport(1, 108, 52.0, 10.0))
    assert common_steps(BEFORE, after) == 8
    assert step_times(BEFORE, after) == (0.25, (0.0625, 0.125))


def test_where_a_workers_own_part_is_not_known_nothing_is() -> None:
    assert step_times(BEFORE, (ProgressReport(0, 110, 51.0, 3.2), ProgressReport(1, 110, 51.1, 9.0))) is None


@pytest.mark.parametrize(
    ("before", "after", "steps"),
    [
        ((), BEFORE, -1),
        (BEFORE, BEFORE, 0),
        (BEFORE, (ProgressReport(0, 107, 51.0, 4.0), ProgressReport(1, 106, 51.0, 9.8)), 6),
        (BEFORE, (ProgressReport(0, 107, 51.0, 4.0), ProgressReport(1, 5, 51.0, 9.8)), -95),
    ],
    ids=["somebody has only begun", "no step", "the slowest counts", "counted afresh"],
)
def test_steps_that_all_have_made(
    before: tuple[ProgressReport, ...], after: tuple[ProgressReport, ...], steps: int
) -> None:
    assert common_steps(before, after) == steps


class Script:
    """Each look is answered by the next of `looks`; after the last the watch is stopped."""

    def __init__(self, *looks: tuple[ProgressReport, ...]) -> None:
        self.looks = [*looks]
        self.told: list[tuple[float, tuple[float, ...]]] = []
        self.over = asyncio.Event()
        self.pace = StepTimeMonitor(self.look, lambda *times: self.told.append(times), 0.001)

    def look(self) -> tuple[ProgressReport, ...]:
        if not self.looks:
            self.over.set()
            return ()
        return self.looks.pop(0)

    async def play(self) -> list[tuple[float, tuple[float, ...]]]:
        self.pace.start(1)
        self.pace.start(1)  # as for another worker: one window at a time
        await asyncio.wait_for(self.over.wait(), 20)
        self.pace.stop()
        return self.told


def one(step: int, own: float) -> tuple[ProgressReport, ...]:
    return (ProgressReport(0, step, float(step), own),)


async def test_the_first_steps_are_not_counted_and_a_window_lasts_until_there_are_enough() -> None:
    few = one(5, 11.0)
    told = await Script((), one(1, 10.0), one(1, 10.0), few, one(9, 14.0), one(25, 16.0)).play()
    assert told == [(1.0, (0.5,)), (1.0, (0.125,))]


async def test_steps_that_are_counted_afresh_begin_a_new_window() -> None:
    assert await Script(one(100, 10.0), one(3, 11.0), one(19, 13.0)).play() == [(1.0, (0.125,))]


async def test_a_node_of_which_a_worker_says_nothing_tells_nothing() -> None:
    script = Script(one(1, 1.0), (*one(50, 2.0), *one(60, 3.0)), one(99, 0.0))
    assert await script.play() == []


async def test_nobody_looks_after_a_stop() -> None:
    script = Script(one(1, 1.0), one(90, 3.0))
    script.pace.start(1)
    script.pace.stop()
    await asyncio.get_running_loop().run_in_executor(None, sum, ())
    assert len(script.looks) == 2

"""Rows that kill the store and start it again while a job trains."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

from benchmarks.ours import Ours
from benchmarks.recovery import START, measures
from benchmarks.row import BEST, OURS, SHIPPED, Row, Sample
from benchmarks.side import Side, Size
from benchmarks.stock import DEFAULTS, TUNED, Torchrun

WATCH = 10.0
"""Seconds that the row watches after the kill."""


def store_killed(side: Side) -> Sample:
    """The longest pause between two steps after the store was killed; no value if training ended."""
    side.start(4)
    if not side.runs(4, START):
        return Sample(None, f"did not train within {START:g} s")
    old = side.output.workers()
    moment = side.kill_store()
    side.output.wait(lambda: bool(side.output.steps(after=moment + WATCH)), WATCH + 5, side.dead)
    times = [s.time for s in side.output.steps(after=moment - 2) if s.rank == 0 and s.worker in old]
    ended = times[-1] - moment
    if side.dead() or ended < WATCH:
        return Sample(None, f"the job died after {ended:.1f} s", {"continued for": ended})
    pauses = sorted(b - a for a, b in pairwise(times))
    return Sample(pauses[-1], parts={"median step": pauses[len(pauses) // 2]})


def _sides() -> dict[str, Callable[[Path], Side]]:
    return {
        OURS: Ours,
        SHIPPED: lambda folder: Torchrun(folder, Size(), DEFAULTS, own_store=True),
        BEST: lambda folder: Torchrun(folder, Size(), TUNED, own_store=True),
    }


def store_killed_then_worker(folder: Path) -> Sample:
    """Kill the store twice, then a worker. The value is the time from the worker's death to the next step."""
    with Ours(folder) as side:
        side.start(4)
        if not side.runs(4, START):
            return Sample(None, f"did not train within {START:g} s")
        for _ in range(2):
            count = len(side.reports)
            side.kill_store()
            if not side.output.wait(partial(has_restored, side, count), 20, side.dead):
                return Sample(None, "the new store did not restore the round within 20 s")
        old = side.output.workers()
        moment = side.kill_worker(1)
        if not side.output.wait(lambda: bool(side.output.steps(excluding=old, world=4)), 30, side.dead):
            return Sample(None, "did not recover within 30 s")
        return Sample(side.output.steps(excluding=old, world=4)[0].time - moment)


def has_restored(side: Ours, count: int) -> bool:
    """Return whether a report after the first `count` shows a running round."""
    return any(report.round is not None and report.formed_at for _, report in side.reports[count:])


ROWS = [
    Row(
        "store-killed",
        f"store killed and started again: longest pause between steps in the next {WATCH:g} s",
        "s",
        0.3,
        measures(store_killed, _sides()),
        {OURS: 5, SHIPPED: 3, BEST: 3},
        150,
        note="Here torchrun's store is a process of its own. It starts again on the same port.",
    ),
    Row(
        "store-killed-twice",
        "store killed twice, then a worker: until the first step",
        "s",
        0.3,
        {OURS: store_killed_then_worker},
        {OURS: 3},
        40,
    ),
]

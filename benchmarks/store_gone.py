"""The store is killed and started again while a job trains."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

from benchmarks.ours import Ours
from benchmarks.recovery import START, measures
from benchmarks.row import BEST, OURS, SHIPPED, Row, Sample
from benchmarks.side import Side, Size
from benchmarks.stock import BEST as TUNED
from benchmarks.stock import SHIPPED as PLAIN
from benchmarks.stock import Torchrun

WATCH = 10.0


def store_killed(side: Side) -> Sample:
    """The longest pause between two steps in the seconds after; None where training ended."""
    side.start(4)
    if not side.runs(4, START):
        return Sample(None, f"did not train within {START:g} s")
    old = side.output.pids()
    moment = side.kill_store()
    side.output.wait(lambda: bool(side.output.steps(after=moment + WATCH)), WATCH + 5, side.dead)
    times = [s.time for s in side.output.steps(after=moment - 2) if s.rank == 0 and s.pid in old]
    ended = times[-1] - moment
    if side.dead() or ended < WATCH:
        return Sample(None, f"the job died after {ended:.1f} s", {"trained on for": ended})
    pauses = sorted(b - a for a, b in pairwise(times))
    return Sample(pauses[-1], parts={"median step": pauses[len(pauses) // 2]})


def _sides() -> dict[str, Callable[[Path], Side]]:
    return {
        OURS: Ours,
        SHIPPED: lambda folder: Torchrun(folder, Size(), PLAIN, apart=True),
        BEST: lambda folder: Torchrun(folder, Size(), TUNED, apart=True),
    }


def store_killed_then_worker(folder: Path) -> Sample:
    """The store dies twice, then a worker: the time from that to the first step again."""
    with Ours(folder) as side:
        side.start(4)
        if not side.runs(4, START):
            return Sample(None, f"did not train within {START:g} s")
        for _ in range(2):
            seen = len(side.reports)
            side.kill_store()
            if not side.output.wait(partial(restored, side, seen), 20, side.dead):
                return Sample(None, "the new store did not restore the round within 20 s")
        old = side.output.pids()
        moment = side.kill_worker(1)
        if not side.output.wait(lambda: bool(side.output.steps(besides=old, world=4)), 30, side.dead):
            return Sample(None, "never came back (watched for 30 s)")
        return Sample(side.output.steps(besides=old, world=4)[0].time - moment)


def restored(side: Ours, seen: int) -> bool:
    """Whether a report after the first `seen` tells of a round that runs."""
    return any(report.round is not None and report.formed_at for _, report in side.reports[seen:])


ROWS = [
    Row(
        "store-killed",
        f"store killed and started again: longest pause between steps in the next {WATCH:g} s",
        "s",
        0.3,
        measures(store_killed, _sides()),
        {OURS: 5, SHIPPED: 3, BEST: 3},
        150,
        note="Torchrun has its store in a process of its own here, started again on the same port.",
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

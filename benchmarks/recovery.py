"""Faults, and how long until the first completed step of the new world."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.ours import Ours
from benchmarks.output import Said
from benchmarks.row import BEST, OURS, SHIPPED, Row, Sample
from benchmarks.side import TRAIN, Side, Size
from benchmarks.stock import BEST as TUNED
from benchmarks.stock import SHIPPED as PLAIN
from benchmarks.stock import Torchrun
from elasticjob.contract.names import Backend

START = 120.0
"""Seconds that a job may take to train at all."""
DEADLINE = 10.0
"""Seconds without a step that count as a hang."""
SETTLED = 3.0
"""Seconds that a job has trained when something happens to it: few break in the moment in which they start."""
Fault = Callable[[Side], float]
"""Does it; the moment (Unix seconds)."""


def sides(size: Size = Size()) -> dict[str, Callable[[Path], Side]]:  # noqa: B008
    return {
        OURS: lambda folder: Ours(folder, size),
        SHIPPED: lambda folder: Torchrun(folder, size, PLAIN),
        BEST: lambda folder: Torchrun(folder, size, TUNED),
    }


def recovery(side: Side, fault: Fault, *, before: int, after: int, cap: float, from_last_step: bool = False) -> Sample:
    """Train at `before` workers, do it, wait at most `cap` seconds for steps of new workers at `after`.

    `from_last_step`: the value and its phases count from the old world's last step instead of the fault.
    """
    side.start(before)
    if not side.runs(before, START):
        return Sample(None, f"did not train within {START:g} s")
    time.sleep(SETTLED)
    old = side.output.pids()
    moment = fault(side)

    def new() -> list[Said]:
        return side.output.steps(besides=old, world=after, after=moment)

    if not side.output.wait(lambda: bool(new()), cap, side.dead):
        ended = "the job died" if side.dead() else "never came back"
        return Sample(None, f"{ended} (watched for {cap:g} s)")
    first = new()[0]
    last = max(s.time for s in side.output.steps() if s.pid in old)
    begin = last if from_last_step else moment
    split = phases(side, begin, old, first)
    beside = {"until full size": first.time - moment} if from_last_step else {"standstill": first.time - last}
    return Sample(first.time - begin, parts=split | beside)


def phases(side: Side, moment: float, old: frozenset[int], first: Said) -> dict[str, float]:
    """Seconds in each phase, one after the other: an earlier one that seems to end later ends with it."""
    said = [s for s in side.output.said if s.pid not in old and s.world == first.world and s.time > moment]
    marks = side.marks(moment)
    for phase, what in (("start", "begun"), ("import", "imported")):
        if times := [s.time for s in said if s.what == what and s.time <= first.time]:
            marks[phase] = max(times)
    marks["first step"] = first.time
    split, at = {}, moment
    for phase in ("detect", "stop", "rendezvous", "start", "import", "first step"):
        if phase in marks:
            split[phase] = max(0.0, marks[phase] - at)
            at = max(at, marks[phase])
    return split


def worker_killed(side: Side) -> Sample:
    return recovery(side, lambda s: s.kill_worker(1), before=4, after=4, cap=45)


def worker_raises(side: Side) -> Sample:
    """An exception, from the moment before it is raised."""

    def fault(s: Side) -> float:
        (s.folder / "raise-1").touch()
        if not s.output.wait(lambda: any(said.what == "raising" for said in s.output.said), 30):
            raise RuntimeError("rank 1 did not raise")
        return next(said.time for said in s.output.said if said.what == "raising")

    return recovery(side, fault, before=4, after=4, cap=45)


def node_lost(side: Side) -> Sample:
    return recovery(side, lambda s: s.lose(3), before=4, after=3, cap=75)


def node_told(side: Side) -> Sample:
    return recovery(side, lambda s: s.tell(3), before=4, after=3, cap=75)


def node_joins(side: Side) -> Sample:
    """How long the others stand still; `until full size` is from the new node's start."""
    return recovery(side, lambda s: s.add(3), before=3, after=4, cap=60, from_last_step=True)


def collective_stuck(side: Side) -> Sample:
    """Rank 3 makes no step, so that all others wait in a collective; then rank 1 dies. Rank 3 never moves again."""

    def fault(s: Side) -> float:
        stop_for_ever(s, 3)
        return s.kill_worker(1)

    return recovery(side, fault, before=4, after=4, cap=30)


def rank_hangs(side: Side) -> Sample:
    """Rank 2 makes no step any more; from the last step to the first of the new world, less the deadline."""
    sample = recovery(side, lambda s: stop_for_ever(s, 2), before=4, after=4, cap=40, from_last_step=True)
    if sample.value is None:
        return sample
    return Sample(sample.value - DEADLINE, parts={"from the last step": sample.value})


def stop_for_ever(side: Side, rank: int) -> float:
    """The rank stops after its step, and all others in their next collective; the moment."""
    stuck, moment = side.folder / f"stuck-{rank}", time.time()
    stuck.touch()
    if not side.output.wait(lambda: any(s.what == "stopped" for s in side.output.said), 30):
        raise RuntimeError(f"rank {rank} did not stop")
    side.output.quiet(0.5)
    stuck.rename(side.folder / f"was-stuck-{rank}")  # the next one of this rank is well
    return moment


def measures(
    how: Callable[[Side], Sample], made: Mapping[str, Callable[[Path], Side]]
) -> dict[str, Callable[[Path], Sample]]:
    def measure(make: Callable[[Path], Side]) -> Callable[[Path], Sample]:
        def once(folder: Path) -> Sample:
            with make(folder) as side:
                return how(side)

        return once

    return {name: measure(make) for name, make in made.items()}


def reports_steps(folder: Path) -> Side:
    """Ours, with a script that calls `elasticjob.progress(step)`."""
    return Ours(folder, command=[sys.executable, TRAIN, str(folder), "progress"])


def own_torchrun(folder: Path) -> Side:
    """Ours, with a pod whose command must run its own torchrun (`rendezvous.backend: c10d`)."""
    command = [str(Path(sys.executable).with_name("torchrun")), TRAIN, str(folder)]
    return Ours(folder, command=command, backend=Backend.C10D)


def _row(
    name: str,
    title: str,
    want: float,
    how: Callable[[Side], Sample],
    seconds: float,
    ours: Callable[[Path], Side] | None = None,
    stock: bool = True,
) -> Row:
    """`ours`: our side where it is not the plain one. `stock`: whether torchrun is measured."""
    made = {name: make for name, make in sides().items() if stock or name == OURS} | ({OURS: ours} if ours else {})
    return Row(name, title, "s", want, measures(how, made), {OURS: 5, BEST: 3, SHIPPED: 3}, seconds)


ROWS = [
    _row("worker-killed", "worker killed, all nodes stay", 0.3, worker_killed, 220),
    _row("worker-raises", "worker raises an exception, all nodes stay", 0.35, worker_raises, 220),
    _row("node-lost", "node lost at once (agent and worker SIGKILLed), 4 → 3", 1.0, node_lost, 240),
    _row("node-told", "node told to go (SIGTERM), 4 → 3", 0.5, node_told, 200),
    _row("node-joins", "node joins, 3 → 4: the others stand still", 0.3, node_joins, 150),
    _row("collective-stuck", "worker killed, the others wait in a collective", 0.35, collective_stuck, 45, None, False),
    _row("told-progress", "node told to go, the script reports its steps", 0.5, node_told, 40, reports_steps, False),
    _row("joins-progress", "node joins, the script reports its steps", 0.3, node_joins, 60, reports_steps, False),
    _row("own-torchrun", "worker of a pod's own torchrun killed (c10d)", 6.0, worker_killed, 60, own_torchrun, False),
    Row(
        "rank-hangs",
        f"one rank hangs: beyond the deadline of {DEADLINE:g} s",
        "s",
        1.0,
        measures(rank_hangs, {**sides(), OURS: lambda folder: Ours(folder, progress_timeout=DEADLINE)}),
        {OURS: 3, SHIPPED: 1, BEST: 1},
        150,
    ),
]

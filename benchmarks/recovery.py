"""Rows that inject a fault and measure the time until the first completed step of the new world."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks import peers
from benchmarks.ours import Ours
from benchmarks.output import ScriptEvent
from benchmarks.row import BEST, OURS, PAUSE, SHIPPED, Row, Sample
from benchmarks.side import TRAIN, TRAIN_IN_PROCESS, Side, Size
from benchmarks.stock import DEFAULTS, TUNED, Torchrun
from elasticjob._runtime.contract.names import Backend

START = 120.0
"""Seconds within which a job must train."""
DEADLINE = 10.0
"""Seconds without a step that count as a hang."""
SETTLED = 3.0
"""Seconds of training before the fault: most faults do not hit a job right after its start."""
ANY_WORLD = 0
ALL_RANKS = 10.0
"""Seconds after the first step of the new world within which all its ranks make one."""
NEW_PROCESSES = "new processes"
"""Part of a sample: ranks of the new world whose process was not in the old one. Absent if not all make a step."""
JOIN = "join"
"""Part of a sample: seconds of the pause in which the new process joins."""
SLOW_START = 3
"""Seconds that a process takes to start, in the rows of slow starts."""
Fault = Callable[[Side], float]
"""Injects a fault and returns its time (Unix seconds)."""


def sides(size: Size = Size()) -> dict[str, Callable[[Path], Side]]:  # noqa: B008
    """Return the constructor of each side by name."""
    return {
        OURS: lambda folder: Ours(folder, size),
        SHIPPED: lambda folder: Torchrun(folder, size, DEFAULTS),
        BEST: lambda folder: Torchrun(folder, size, TUNED),
    }


def recovery(side: Side, fault: Fault, *, before: int, after: int, cap: float, from_last_step: bool = False) -> Sample:
    """Train with `before` workers, inject the fault, and wait for a step of new workers in a world of `after`.

    `after`: ANY_WORLD accepts each size, and the note has it. `cap`: seconds to wait. `from_last_step`: the value and
    its phases start at the old world's last step instead of the fault.
    """
    side.start(before)
    if not side.runs(before, START):
        return Sample(None, f"did not train within {START:g} s")
    time.sleep(SETTLED)
    old, seen = side.output.workers(), len(side.output.events)
    moment = fault(side)

    def new() -> list[ScriptEvent]:  # runs at each line of output, on the processors of the recovery
        return side.output.steps(excluding=old, world=after, after=moment, since=seen)

    if not side.output.wait(lambda: bool(new()), cap, side.dead):
        outcome = "the job died" if side.dead() else "no recovery"
        return Sample(None, f"{outcome} (watched for {cap:g} s)")
    first = new()[0]
    last = max(s.time for s in side.output.steps() if s.worker in old)
    begin = last if from_last_step else moment
    split = phases(side, begin, old, first)
    extra = {"until full size": first.time - moment} if from_last_step else {PAUSE: first.time - last}
    if side.output.wait(lambda: len({s.rank for s in new()}) == first.world, ALL_RANKS, side.dead):
        extra[NEW_PROCESSES] = len({s.pid for s in new()} - {pid for pid, _ in old})
    return Sample(first.time - begin, f"with {first.world} ranks" if after == ANY_WORLD else "", split | extra)


def phases(side: Side, moment: float, old: frozenset[tuple[int, int]], first: ScriptEvent) -> dict[str, float]:
    """Return the seconds of each phase. A phase that ends before the previous one counts as zero."""
    events = [e for e in side.output.events if e.worker not in old and e.world == first.world and e.time > moment]
    marks = side.marks(moment)
    for phase, kind in (("start", "begun"), ("import", "imported")):
        if times := [e.time for e in events if e.kind == kind and e.time <= first.time]:
            marks[phase] = max(times)
    marks["first step"] = first.time
    split, at = {}, moment
    for phase in ("detect", "stop", "rendezvous", "start", "import", "first step"):
        if phase in marks:
            split[phase] = max(0.0, marks[phase] - at)
            at = max(at, marks[phase])
    return split


def worker_killed(side: Side, after: int = 4) -> Sample:
    return recovery(side, lambda s: s.kill_worker(1), before=4, after=after, cap=45)


def slow_start_killed(side: Side) -> Sample:
    """A worker is killed whose successor takes long to start: the others go on in a world of 3, and it joins them.

    The value is the pause of the others until they train in the smaller world; JOIN is the pause of the join.
    """
    sample = worker_killed(side, after=3)
    if sample.value is None:
        return sample
    steps = side.output.steps
    if not side.output.wait(lambda: bool(steps(world=4, after=steps(world=3)[-1].time)), START, side.dead):
        return Sample(None, "no join")
    smaller = [s.time for s in steps(world=3)]
    joined = min(s.time for s in steps(world=4, after=max(smaller)))
    return replace(sample, parts={**sample.parts, JOIN: joined - max(smaller), "full size after": joined - smaller[0]})


def large_worker_killed(side: Side) -> Sample:
    """The worker that is killed holds 4 GiB. Its successor does not, and no other worker."""
    (side.folder / "memory-1").write_text(str(4 << 30))
    return worker_killed(side)


def worker_raises(side: Side, after: int = 4) -> Sample:
    """A worker raises an exception. The time starts just before it."""

    def fault(s: Side) -> float:
        (s.folder / "raise-1").touch()
        if not s.output.wait(lambda: any(e.kind == "raising" for e in s.output.events), 30):
            raise RuntimeError("rank 1 did not raise")
        return next(e.time for e in s.output.events if e.kind == "raising")

    return recovery(side, fault, before=4, after=after, cap=45)


def node_lost(side: Side, after: int = 3) -> Sample:
    return recovery(side, lambda s: s.kill_node(3), before=4, after=after, cap=75)


def node_drained(side: Side) -> Sample:
    return recovery(side, lambda s: s.drain(3), before=4, after=3, cap=75)


def node_joins(side: Side) -> Sample:
    """The pause of the other nodes. `until full size` starts with the new node."""
    return recovery(side, lambda s: s.add(3), before=3, after=4, cap=60, from_last_step=True)


def node_replaced(side: Side) -> Sample:
    """Node 3 is drained, and a standby node takes its place. The pause of the other nodes."""

    def fault(s: Side) -> float:
        assert isinstance(s, Ours)
        s.add(4)
        s.wait_until_ready(5)
        return s.drain(3)

    return recovery(side, fault, before=4, after=4, cap=60, from_last_step=True)


def collective_stuck(side: Side, after: int = 4) -> Sample:
    """Rank 3 stops for ever, so that all others wait in a collective; then rank 1 dies."""

    def fault(s: Side) -> float:
        stop_rank(s, 3)
        return s.kill_worker(1)

    return recovery(side, fault, before=4, after=after, cap=30)


def rank_hangs(side: Side, hang: Fault = lambda s: stop_rank(s, 2)) -> Sample:
    """Rank 2 stops for ever. The time from the last step to the first of the new world, less the deadline."""
    sample = recovery(side, hang, before=4, after=4, cap=40, from_last_step=True)
    if sample.value is None:
        return sample
    counted = {name: count for name, count in sample.parts.items() if name == NEW_PROCESSES}
    return Sample(sample.value - DEADLINE, parts={"from the last step": sample.value, **counted})


def process_stopped(side: Side) -> Sample:
    """As `rank_hangs`, but no thread of the rank's process runs."""

    def hang(s: Side) -> float:
        moment = time.time()
        os.kill(s.output.pid_of(2), signal.SIGSTOP)
        return moment

    return rank_hangs(side, hang)


def stop_rank(side: Side, rank: int) -> float:
    """Make a rank stop after its step, wait until all others wait in a collective, and return the time."""
    stuck, moment = side.folder / f"stuck-{rank}", time.time()
    stuck.touch()
    if not side.output.wait(lambda: any(e.kind == "stopped" for e in side.output.events), 30):
        raise RuntimeError(f"rank {rank} did not stop")
    side.output.wait_for_silence(0.5)
    stuck.rename(side.folder / f"was-stuck-{rank}")  # the next worker of this rank must not stop
    return moment


def measures(
    how: Callable[[Side], Sample], made: Mapping[str, Callable[[Path], Side]]
) -> dict[str, Callable[[Path], Sample]]:
    """Return, for each constructor in `made`, a function that builds the side and measures it with `how`."""

    def measure(make: Callable[[Path], Side]) -> Callable[[Path], Sample]:
        def once(folder: Path) -> Sample:
            with make(folder) as side:
                return how(side)

        return once

    return {name: measure(make) for name, make in made.items()}


def reports_steps(folder: Path) -> Side:
    """Return our side with a script that calls `elasticjob.progress(step)`."""
    return Ours(folder, command=[sys.executable, TRAIN, str(folder), "progress"])


def in_process(folder: Path) -> Side:
    """Return our side with a script whose training function is called again in the same process."""
    return Ours(folder, command=[sys.executable, TRAIN_IN_PROCESS, str(folder)])


def in_process_with_standby(folder: Path) -> Side:
    """Return `in_process` with one node more than the round has."""
    return Ours(folder, command=[sys.executable, TRAIN_IN_PROCESS, str(folder)], spares=1)


def in_process_with_1gb(folder: Path) -> Side:
    """Return `in_process` with a State of 1 GB."""
    return Ours(folder, command=[sys.executable, TRAIN_IN_PROCESS, str(folder), "1000000000"])


def in_process_with_1gb_frozen(folder: Path) -> Side:
    """Return `in_process` with a State of 1 GB of frozen parameters, which it leaves to the script."""
    return Ours(folder, command=[sys.executable, TRAIN_IN_PROCESS, str(folder), "1000000000", "0", "1"])


def in_process_with_spares(folder: Path) -> Side:
    """Return `in_process_with_deadline` with a spare process for each rank."""
    command = [sys.executable, TRAIN_IN_PROCESS, str(folder), "0", "1"]
    return Ours(folder, command=command, progress_timeout=DEADLINE)


def in_process_slow_start(folder: Path) -> Side:
    """Return `in_process` with processes that take SLOW_START seconds to their function."""
    return Ours(folder, command=[sys.executable, TRAIN_IN_PROCESS, str(folder), "0", "0", "0", str(SLOW_START)])


def in_process_with_deadline(folder: Path) -> Side:
    """Return `in_process` with a `hangPolicy`."""
    return Ours(folder, command=[sys.executable, TRAIN_IN_PROCESS, str(folder)], progress_timeout=DEADLINE)


def nothing_lost(how: Callable[[Side], Sample], replaced: int) -> Callable[[Side], Sample]:
    """Return a measure that has no value if rank 0 made a step twice, or more ranks than that got a new process."""

    def measure(side: Side) -> Sample:
        sample = how(side)
        steps = [s.step for s in side.output.steps() if s.rank == 0]
        repeated, new = len(steps) - len(set(steps)), sample.parts.get(NEW_PROCESSES, math.inf)
        if sample.value is not None and (repeated or new > replaced):
            return Sample(None, f"{repeated} steps repeated, {new:g} new processes")
        return sample

    return measure


def own_torchrun(folder: Path) -> Side:
    """Return our side with a command that runs its own torchrun (`rendezvous.backend: c10d`)."""
    command = [str(Path(sys.executable).with_name("torchrun")), TRAIN, str(folder)]
    return Ours(folder, command=command, backend=Backend.C10D)


def _row(
    name: str,
    title: str,
    target: float,
    how: Callable[[Side], Sample],
    seconds: float,
    ours: Callable[[Path], Side] | None = None,
    stock: bool = True,
) -> Row:
    """`ours`: our side, if it is not the default one. `stock`: whether torchrun is measured too."""
    made = {name: make for name, make in sides().items() if stock or name == OURS} | ({OURS: ours} if ours else {})
    return Row(name, title, "s", target, measures(how, made), {OURS: 5, BEST: 3, SHIPPED: 3}, seconds)


def _row_in_process(
    name: str,
    title: str,
    target: float,
    how: Callable[[Side], Sample],
    seconds: float,
    ours: Callable[[Path], Side] = in_process,
    *,
    replaced: int = 0,
) -> Row:
    """`replaced`: ranks that have to get a new process."""
    return _row(name, f"in process: {title}", target, nothing_lost(how, replaced), seconds, ours, False)


def _row_beside_peers(
    name: str, title: str, target: float, how: Callable[..., Sample], note: str, *, replaced: int = 0
) -> Row:
    """Return a row of our side and of the other libraries that are installed. `how` takes the side and `after`.

    `note`: about the other libraries. `replaced`: as for `_row_in_process`.
    """

    def measure(side: Side) -> Sample:
        sample = how(side, after=ANY_WORLD)
        return replace(sample, parts={n: v for n, v in sample.parts.items() if n == PAUSE})  # they log no phases

    row, made = _row_in_process(name, title, target, how, 50, replaced=replaced), peers.installed()
    return replace(
        row,
        sides={**row.sides, **measures(measure, made)},
        repeat={**row.repeat, **dict.fromkeys(made, 3)},
        seconds=row.seconds + 60 * len(made),
        note=note if made else "",
        left_out=peers.left_out(),
    )


_SAME_SETTINGS = "Other libraries: as in `killed-in-process`."
ROWS = [
    _row("worker-killed", "worker killed, all nodes stay", 0.3, worker_killed, 220),
    _row("worker-raises", "worker raises an exception, all nodes stay", 0.35, worker_raises, 220),
    _row("node-lost", "node killed (SIGKILL to agent and worker), 4 → 3", 1.0, node_lost, 240),
    _row("node-told", "node drained (SIGTERM), 4 → 3", 0.5, node_drained, 200),
    _row("node-joins", "node joins, 3 → 4: pause of the others", 0.3, node_joins, 150),
    _row("collective-stuck", "worker killed, the others wait in a collective", 0.35, collective_stuck, 45, None, False),
    _row(
        "told-progress",
        "node drained, the script reports its steps",
        0.5,
        node_drained,
        40,
        reports_steps,
        False,
    ),
    _row("joins-progress", "node joins, the script reports its steps", 0.3, node_joins, 60, reports_steps, False),
    _row("killed-4gb", "worker with 4 GiB killed, all nodes stay", 0.25, large_worker_killed, 80, None, False),
    _row("own-torchrun", "worker of a pod's own torchrun killed (c10d)", 6.0, worker_killed, 60, own_torchrun, False),
    _row_beside_peers(
        "killed-in-process", "worker killed, all nodes stay", 0.06, worker_killed, peers.note(), replaced=1
    ),
    _row_in_process(
        "killed-slow-start",
        f"worker killed, processes take {SLOW_START} s to start: pause of the others",
        0.15,
        slow_start_killed,
        150,
        in_process_slow_start,
        replaced=1,
    ),
    _row_in_process("killed-4gb-in-process", "worker with 4 GiB killed", 0.1, large_worker_killed, 80, replaced=1),
    _row_in_process(
        "killed-with-spare",
        "worker killed, with spare processes",
        0.06,
        worker_killed,
        60,
        in_process_with_spares,
        replaced=1,
    ),
    _row_beside_peers("raises-in-process", "worker raises an exception", 0.06, worker_raises, _SAME_SETTINGS),
    _row_beside_peers(
        "stuck-in-process",
        "worker killed, the others wait in a collective",
        0.06,
        collective_stuck,
        f"{_SAME_SETTINGS} Their group timeout of 1 s begins about 0.5 s before the worker is killed, and is what ends "
        "the wait; the rank that stopped for ever does not come back, with NVIDIA's because it is killed.",
        replaced=1,
    ),
    _row_beside_peers("lost-in-process", "node killed, 4 → 3", 0.4, node_lost, _SAME_SETTINGS),
    _row_in_process("joins-in-process", "node joins, 3 → 4: pause of the others", 0.1, node_joins, 60, replaced=1),
    _row_in_process(
        "replaced-in-process",
        "node drained, a standby node takes its place: pause of the others",
        0.1,
        node_replaced,
        70,
        in_process_with_standby,
        replaced=1,
    ),
    _row_in_process(
        "joins-1gb-in-process",
        "node joins a job with a State of 1 GB, 3 → 4: pause of the others",
        0.1,
        node_joins,
        150,
        in_process_with_1gb,
        replaced=1,
    ),
    _row_in_process(
        "joins-1gb-frozen",
        "node joins a job with 1 GB of frozen parameters, 3 → 4: pause of the others",
        0.1,
        node_joins,
        150,
        in_process_with_1gb_frozen,
        replaced=1,
    ),
    _row_in_process(
        "hangs-in-process",
        f"one rank hangs: beyond the deadline of {DEADLINE:g} s",
        0.05,
        rank_hangs,
        100,
        in_process_with_deadline,
    ),
    _row_in_process(
        "stopped-in-process",
        f"one process is stopped (SIGSTOP): beyond the deadline of {DEADLINE:g} s",
        0.05,
        process_stopped,
        100,
        in_process_with_deadline,
        replaced=1,
    ),
    _row_in_process(
        "stopped-with-spare",
        f"one process is stopped, with spare processes: beyond the deadline of {DEADLINE:g} s",
        0.05,
        process_stopped,
        100,
        in_process_with_spares,
        replaced=1,
    ),
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

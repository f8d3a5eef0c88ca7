"""Several faults, one after the other, in one job: the start of a job on a GPU takes longer than what is measured."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.pauses import Recovery, recovery_of
from benchmarks.ours import Ours
from benchmarks.row import Sample
from benchmarks.side import Side, Size, kill
from benchmarks.stock import TUNED, Torchrun

RANKS = 4
START = 90.0
"""Seconds within which a job must train."""
SETTLED = 2.0
"""Seconds of training before a fault."""
STEPS = 10
"""Steps that a job has made once it trains."""
SPARE = "waits at its function, as the spare"


@dataclass(frozen=True)
class Scale:
    """How large everything is. `small`: a rehearsal on CPUs."""

    small: bool
    faults: int
    """Of each kind."""
    kills: int
    """Of the check of exact weights."""
    state_bytes: int
    step_seconds: float

    @property
    def options(self) -> list[str]:
        """Return the options of scripts that have a small model."""
        return ["small"] if self.small else []


ON_GPU = Scale(small=False, faults=3, kills=10, state_bytes=2 << 30, step_seconds=0.1)
ON_CPU = Scale(small=True, faults=1, kills=1, state_bytes=32 << 20, step_seconds=0.02)


def module(name: str, *arguments: str) -> list[str]:
    """Return the command of a script of this package."""
    return [sys.executable, str(Path(__file__).with_name(f"{name}.py")), *arguments]


def run_script(folder: Path, name: str, end: str, nodes: int, arguments: Sequence[str], within: float) -> list[str]:
    """Run a script on so many nodes until one has printed `end`, and return all lines.

    RuntimeError with its last output if it does not within so many seconds.
    """
    with Ours(folder, Size(nodes, nodes), command=module(name, *arguments)) as side:
        side.start(nodes)
        if not side.output.wait(lambda: any(end in line.text for line in side.output.lines), within, side.dead):
            raise RuntimeError(f"{name} did not end within {within:g} s; its last output:\n{side.output.tail(60)}")
        return [line.text for line in side.output.lines]


@contextmanager
def training(side: Side) -> Iterator[Side]:
    """Start a job of RANKS nodes and yield it once it trains. RuntimeError with its last output if it does not."""
    with side:
        side.start(RANKS)
        if not side.runs(RANKS, START, STEPS):
            raise RuntimeError(f"did not train within {START:g} s; its last output:\n{side.output.tail(40)}")
        print(f"{side.name}: trains", flush=True)
        yield side


def ours(folder: Path, *options: str) -> Ours:
    """Return our side: a node that is lost is not replaced, and three ranks may go on without the fourth."""
    return Ours(folder, Size(RANKS - 1, RANKS), command=module("train_model", str(folder), *options))


def torchrun(folder: Path, *options: str) -> Torchrun:
    command = module("train_model", str(folder), "plain", *options)
    return Torchrun(folder, Size(RANKS - 1, RANKS), TUNED, script=command[1:])


def inject(side: Side, fault: Callable[[Side], float], cap: float) -> Recovery:
    """Inject a fault once the job has trained for a time; return how it came back, or raise RuntimeError."""
    time.sleep(SETTLED)
    seen = max(0, len(side.output.events) - 2000)
    moment = fault(side)
    found: list[Recovery] = []

    def recovered() -> bool:
        recovery = recovery_of(side.output.events[seen:], moment, RANKS)
        found.extend([recovery] if recovery else [])
        return bool(found)

    if not side.output.wait(recovered, cap, side.dead):
        raise RuntimeError(f"no recovery within {cap:g} s; the last output:\n{side.output.tail(60)}")
    print(f"{side.name}: {found[0]}", flush=True)
    return found[0]


def killed(rank: int) -> Callable[[Side], float]:
    return lambda side: kill(side.output.pid_of(rank))


def raises(rank: int) -> Callable[[Side], float]:
    """Let a rank raise an exception; the time is just before it."""

    def fault(side: Side) -> float:
        before = sum(event.kind == "raising" for event in side.output.events)
        (side.folder / f"raise-{rank}").touch()
        if not side.output.wait(lambda: sum(e.kind == "raising" for e in side.output.events) > before, 30):
            raise RuntimeError(f"rank {rank} did not raise; the last output:\n{side.output.tail(40)}")
        return next(event.time for event in reversed(side.output.events) if event.kind == "raising")

    return fault


def wait_for_spares(side: Side, already: int, within: float) -> None:
    """Wait until each rank has a spare process, of which `already` have been used up; RuntimeError if one does not."""

    def ready() -> int:
        return sum(SPARE in line.text for line in side.output.lines) - already

    if not side.output.wait(lambda: ready() >= RANKS, within, side.dead):
        raise RuntimeError(
            f"{ready()} of {RANKS} spare processes were ready within {within:g} s; the last output:\n"
            f"{side.output.tail(60)}"
        )
    print(f"{side.name}: each rank has a spare process", flush=True)


def pauses(recoveries: Sequence[Recovery]) -> tuple[list[Sample], list[Sample]]:
    """Return the pauses of the ranks that stayed: after the fault, and when the new process has joined.

    There are none of the second kind where all ranks have waited for the new process.
    """
    first = [
        Sample(
            each.pauses[0] if each.pauses else None,
            "the others waited for the new process" if len(each.pauses) == 1 else "",
            {"until full size, s": each.first_step_of_all},
        )
        for each in recoveries
    ]
    return first, [Sample(max(each.pauses[1:])) for each in recoveries if len(each.pauses) > 1]


def use_paths() -> None:
    """Let the processes of a job find this package and elasticjob."""
    root = Path(__file__).parents[2]
    own = [str(root), str(root / "agent")]
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    os.environ["PYTHONPATH"] = os.pathsep.join([*own, *(path for path in given if path not in own)])

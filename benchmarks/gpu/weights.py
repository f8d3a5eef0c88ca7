"""Kill processes of a job whose weights are known for each step, and count recoveries with other weights."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.one_job import START, Scale, module
from benchmarks.ours import Ours
from benchmarks.row import Sample
from benchmarks.side import Size, kill

RANKS = 3
WITHIN = 60.0
"""Seconds within which a job must come back."""
_CHECK = re.compile(
    r"CHECK rank=(\d+) world=(\d+) pid=(\d+) round=(\S+) step=(\d+) had=(\d+) error=(\S+) weights=(\S+)"
)
_RUNS = re.compile(r"RUNS rank=(\d+) world=(\d+) pid=(\d+) round=(\S+)")


@dataclass(frozen=True)
class Check:
    """What one rank has found at the start of a round."""

    rank: int
    world: int
    pid: int
    round: str
    step: int
    had: int
    """The step of this process before it had the state of the round."""
    error: float
    """The largest difference of a weight from what it is at `step`."""
    weights: str
    """Their sum."""


def checks_in(lines: Iterable[str]) -> list[Check]:
    found = (match for line in lines if (match := _CHECK.search(line)))
    return [Check(int(m[1]), int(m[2]), int(m[3]), m[4], int(m[5]), int(m[6]), float(m[7]), m[8]) for m in found]


def problems(checks: Iterable[Check]) -> dict[str, str]:
    """Return what is wrong in each round, by its name: wrong weights, ranks that differ, steps that are lost."""
    rounds: dict[str, list[Check]] = {}
    for check in checks:
        rounds.setdefault(check.round, []).append(check)
    return {name: text for name, found in rounds.items() if (text := _problem(found))}


def _problem(found: list[Check]) -> str:
    steps, wrong = {check.step for check in found}, max(check.error for check in found)
    if not wrong <= 0:  # also if it is no number
        return f"weights differ by {wrong:g} from those of step {max(steps)}"
    if len(steps) > 1 or len({check.weights for check in found}) > 1:
        return f"ranks differ: steps {sorted(steps)}, sums {sorted({check.weights for check in found})}"
    return ""


def running_round(lines: Iterable[str]) -> dict[int, int]:
    """Return the process id of each rank if all ranks of a round of full size run, of the newest one; else nothing."""
    rounds: dict[str, dict[int, int]] = {}
    for line in lines:
        if match := _RUNS.search(line):
            rounds.setdefault(match[4], {})[int(match[1])] = int(match[3])
    newest = list(rounds.values())[-1] if rounds else {}
    return newest if len(newest) == RANKS else {}


def measure(folder: Path, scale: Scale, mode: str, fewest: int) -> Sample:
    """Kill `scale.kills` times; return the number of recoveries whose weights are wrong.

    `fewest`: ranks that may go on without the others. RuntimeError with the last output if the job does not come back.
    """
    elements = 1 << 10 if scale.small else 4 << 20
    with Ours(folder, Size(fewest, RANKS), command=module("exact_sums", mode, str(elements))) as side:
        side.start(RANKS)
        used: set[int] = set()
        for number in range(scale.kills + 1):
            pids: dict[int, int] = {}

            def runs(used: set[int] = used, pids: dict[int, int] = pids) -> bool:
                found = running_round(line.text for line in side.output.lines)
                pids.update(found if used.isdisjoint(found.values()) else {})
                return bool(pids)

            if not side.output.wait(runs, WITHIN if number else START, side.dead):
                raise RuntimeError(f"did not come back after {number} kills; the last output:\n{side.output.tail(60)}")
            if number < scale.kills:
                print(f"{mode}: {pids} run; kill {number + 1} of {scale.kills}", flush=True)
                time.sleep(0.2 + 0.11 * number)
                victim = pids[number % RANKS]
                kill(victim)
                used.add(victim)
        checks = checks_in(line.text for line in side.output.lines)
    wrong = problems(checks)
    for name, text in wrong.items():
        print(f"round {name}: {text}", flush=True)
    rounds = len({check.round for check in checks})
    parts = {"kills": float(scale.kills), "rounds checked": float(rounds)}
    return Sample(float(len(wrong)), "; ".join(wrong.values())[:300], parts)

"""What a fault cost the ranks of a job, from the steps that they print. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.output import ScriptEvent


@dataclass(frozen=True)
class Recovery:
    """How a job came back to full size after a fault. All values are seconds."""

    first_step_of_all: float
    """From the fault until each rank had made a step in a round of full size."""
    pauses: tuple[float, ...]
    """Of the processes that stayed: the longest one at each round that has begun since. Empty if none stayed."""


def recovery_of(events: Sequence[ScriptEvent], moment: float, world: int) -> Recovery | None:
    """Return what a fault at `moment` cost; None while not all ranks of a round of `world` have made a step.

    `moment`: Unix seconds. Rounds that begin later than the first one of full size do not count.
    """
    steps = sorted((event for event in events if event.step), key=lambda event: event.time)
    before = {step.worker for step in steps if step.time <= moment}
    first: dict[int, ScriptEvent] = {}
    for step in steps:
        if step.worker not in before and step.world == world:
            first.setdefault(step.rank, step)
    if len(first) < world:
        return None
    stayed = {step.pid for step in first.values()} & {pid for pid, _ in before}
    by_process = [_pauses(steps, pid, before, world) for pid in stayed]
    count = max(map(len, by_process), default=0)
    longest = tuple(max(pauses[i] for pauses in by_process if len(pauses) > i) for i in range(count))
    return Recovery(max(step.time for step in first.values()) - moment, longest)


def _pauses(steps: Sequence[ScriptEvent], pid: int, before: set[tuple[int, int]], world: int) -> list[float]:
    """Return the times between the last step of a call and the first one of the next, up to that of full size."""
    own = [step for step in steps if step.pid == pid]
    found = []
    for last, first in itertools.pairwise(own):
        if first.call != last.call and first.worker not in before:
            found.append(first.time - last.time)
            if first.world == world:
                break
    return found

"""Compute goodput and recovery figures from the steps and faults of a soak. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median


@dataclass(frozen=True)
class Step:
    """One completed step, when the first rank reported it. `time`: Unix seconds."""

    time: float
    step: int
    world: int


@dataclass(frozen=True)
class Fault:
    """A fault. `time`: Unix seconds. `world`: the size that the job must reach again; 0: any size."""

    time: float
    kind: str
    details: str
    world: int = 0


@dataclass(frozen=True)
class Recovery:
    """The figures of one fault, in seconds. None if the event did not happen before the next fault."""

    fault: Fault
    pause: float | None
    """The longest pause between two steps."""
    full_size: float | None
    """From the fault to the first step at full size."""


def summary(steps: Sequence[Step], faults: Sequence[Fault]) -> dict[str, object]:
    """Return goodput, the number of steps, and for each kind of fault its recoveries and its pauses."""
    ordered = sorted(steps, key=lambda s: s.time)
    found = recoveries(ordered, faults)
    kinds = list(dict.fromkeys(f.kind for f in faults))
    return {
        "goodput": goodput(ordered, faults),
        "steps": max((s.step for s in ordered), default=0),
        "median_step": _step_time(ordered),
        "faults": [_kind_summary(kind, [r for r in found if r.fault.kind == kind]) for kind in kinds],
        "recoveries": [asdict(r) for r in found],
    }


def goodput(steps: Sequence[Step], faults: Sequence[Fault]) -> float:
    """Return the part of the elapsed time that the faults did not cost.

    A fault costs the longest time from one step to the next new one, less an undisturbed step: its pause, and the steps
    that are done again. So does each change of the world, for example when a replacement joins. Steps that are slow
    because the machine is busy cost nothing.
    """
    new = _new_steps(steps)
    if len(new) < 2:
        return 0.0
    gaps = list(pairwise(new))
    costly = {gap for gap in gaps if gap[0].world != gap[1].world}
    for fault, end in _windows(faults):
        within = [gap for gap in gaps if fault.time < gap[1].time < end]
        costly |= set(sorted(within, key=_seconds)[-1:])
    lost = sum(max(0.0, _seconds(gap) - _step_time(steps)) for gap in costly)
    return 1.0 - lost / (new[-1].time - new[0].time)


def _new_steps(steps: Sequence[Step]) -> list[Step]:
    """Return the steps that were not done before, each as its first rank reported it."""
    new: list[Step] = []
    for s in steps:
        if not new or s.step > new[-1].step:
            new.append(s)
    return new


def _seconds(gap: tuple[Step, Step]) -> float:
    return gap[1].time - gap[0].time


def _windows(faults: Sequence[Fault]) -> list[tuple[Fault, float]]:
    """Return each fault and when the next one happens."""
    ends = [*(f.time for f in faults[1:]), math.inf]
    return list(zip(faults, ends, strict=False))


def _step_time(steps: Sequence[Step]) -> float:
    """Return the undisturbed time of a step: the median pause between consecutive steps."""
    pauses = [b.time - a.time for a, b in pairwise(steps) if b.step == a.step + 1]
    return median(pauses) if pauses else 0.0


def recoveries(steps: Sequence[Step], faults: Sequence[Fault]) -> list[Recovery]:
    """Return the figures of each fault. They end with the next fault."""
    return [_recovery(steps, fault, end) for fault, end in _windows(faults)]


def _recovery(steps: Sequence[Step], fault: Fault, end: float) -> Recovery:
    before = [s.time for s in steps if s.time <= fault.time][-1:]
    within = [s for s in steps if fault.time < s.time < end]
    pauses = [b - a for a, b in pairwise(before + [s.time for s in within])]
    full = next((s.time for s in within if fault.world in (0, s.world) and _world_lasts(s, within)), None)
    return Recovery(fault, max(pauses) if pauses else None, None if full is None else full - fault.time)


def _world_lasts(step: Step, within: Sequence[Step]) -> bool:
    """Return whether the world of this step lasts. Right after a fault the old world can still complete a step."""
    return all(s.world == step.world for s in within if s.time >= step.time)


def _kind_summary(kind: str, found: Sequence[Recovery]) -> dict[str, object]:
    pauses = sorted(r.pause for r in found if r.pause is not None)
    return {
        "fault": kind,
        "times": len(found),
        "recovered": sum(r.pause is not None and r.full_size is not None for r in found),
        "p50": quantile(pauses, 0.5),
        "p99": quantile(pauses, 0.99),
    }


def quantile(ordered: Sequence[float], q: float) -> float | None:
    """Return the smallest of the ordered values that is not less than a share `q` of them; None without any."""
    return ordered[min(len(ordered) - 1, math.ceil(q * len(ordered)) - 1)] if ordered else None

"""What a soak's steps and faults amount to. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median


@dataclass(frozen=True)
class Step:
    """The first time that any rank said it had done this step. `time`: Unix seconds."""

    time: float
    step: int
    world: int


@dataclass(frozen=True)
class Deed:
    """A fault. `world`: the size the job must come back to, 0 where it need not shrink."""

    time: float
    fault: str
    what: str
    world: int = 0


@dataclass(frozen=True)
class After:
    """What followed a fault, in seconds; None where it did not happen before the next one."""

    deed: Deed
    standstill: float | None
    """The longest pause between two steps."""
    full_size: float | None
    """Until the first step at the wanted size."""


def summary(steps: Sequence[Step], deeds: Sequence[Deed]) -> dict[str, object]:
    """Goodput, and for each kind of fault how often it was survived and how long training stood still."""
    ordered = sorted(steps, key=lambda s: s.time)
    followed = after(ordered, deeds)
    kinds = list(dict.fromkeys(d.fault for d in deeds))
    return {
        "goodput": goodput(ordered),
        "steps": max((s.step for s in ordered), default=0),
        "median_step": _pause(ordered),
        "faults": [_kind(kind, [a for a in followed if a.deed.fault == kind]) for kind in kinds],
        "deeds": [asdict(a) for a in followed],
    }


def goodput(steps: Sequence[Step]) -> float:
    """Steps done, each once, at the undisturbed pace, over the time that passed."""
    if len(steps) < 2:
        return 0.0
    done = max(s.step for s in steps) - min(s.step for s in steps)
    return min(1.0, done * _pause(steps) / (steps[-1].time - steps[0].time))


def _pause(steps: Sequence[Step]) -> float:
    """The undisturbed time of a step: the median between steps that follow each other."""
    pauses = [b.time - a.time for a, b in pairwise(steps) if b.step == a.step + 1]
    return median(pauses) if pauses else 0.0


def after(steps: Sequence[Step], deeds: Sequence[Deed]) -> list[After]:
    """What followed each fault until the next."""
    ends = [d.time for d in deeds[1:]] + [math.inf]
    return [_after(steps, deed, end) for deed, end in zip(deeds, ends, strict=True)]


def _after(steps: Sequence[Step], deed: Deed, end: float) -> After:
    before = [s.time for s in steps if s.time <= deed.time][-1:]
    within = [s for s in steps if deed.time < s.time < end]
    pauses = [b - a for a, b in pairwise(before + [s.time for s in within])]
    full = next((s.time for s in within if deed.world in (0, s.world) and _settled(s, within)), None)
    return After(deed, max(pauses) if pauses else None, None if full is None else full - deed.time)


def _settled(step: Step, within: Sequence[Step]) -> bool:
    """Whether the world of this step lasts: right after the fault the old one still steps."""
    return all(s.world == step.world for s in within if s.time >= step.time)


def _kind(fault: str, followed: Sequence[After]) -> dict[str, object]:
    pauses = sorted(a.standstill for a in followed if a.standstill is not None)
    return {
        "fault": fault,
        "times": len(followed),
        "recovered": sum(a.standstill is not None and a.full_size is not None for a in followed),
        "p50": _quantile(pauses, 0.5),
        "p99": _quantile(pauses, 0.99),
    }


def _quantile(ordered: Sequence[float], q: float) -> float | None:
    return ordered[min(len(ordered) - 1, math.ceil(q * len(ordered)) - 1)] if ordered else None

"""What a row is, and what one sample of it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

OURS = "ours"
SHIPPED = "torchrun as shipped"
BEST = "torchrun, best settings"


@dataclass(frozen=True)
class Sample:
    """One measurement. `value` is None where the thing never happened: `note` says within which time."""

    value: float | None
    note: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Phases that add up to the value, or figures beside it."""


Measure = Callable[[Path], Sample]
"""Takes an empty folder."""


@dataclass(frozen=True)
class Row:
    """One line of numbers.md. `sides`: who is measured how; `repeat`: how often, unless told otherwise."""

    name: str
    title: str
    unit: str
    want: float | None
    """What ours must reach; None where the row is for the record."""
    sides: Mapping[str, Measure]
    repeat: Mapping[str, int]
    seconds: float
    """About how long the row takes on two cores."""
    more_is_better: bool = False
    note: str = ""

    def times(self, side: str) -> int:
        return self.repeat.get(side, 1)


def middle(samples: Sequence[Sample]) -> float | None:
    """The median; a sample that never came counts as larger than all others."""
    values = sorted(float("inf") if s.value is None else s.value for s in samples)
    found = median(values) if values else float("inf")
    return None if found == float("inf") else found


def parts(samples: Sequence[Sample]) -> dict[str, float]:
    """The median of each part over the samples that have it."""
    names = dict.fromkeys(name for s in samples for name in s.parts)
    return {name: median(s.parts[name] for s in samples if name in s.parts) for name in names}

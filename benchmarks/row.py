"""The rows of the benchmark table and their samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

OURS = "ours"
SHIPPED = "torchrun as shipped"
BEST = "torchrun, best settings"
PAUSE = "standstill"
"""Part of a sample: seconds from the last step of the old world to the first step of the new one.

The files in benchmarks/results use this name.
"""


@dataclass(frozen=True)
class Sample:
    """One measurement. `value` is None if the event did not happen; `note` then has the time watched."""

    value: float | None
    note: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Phases that add up to the value, or additional figures."""


Measure = Callable[[Path], Sample]
"""Takes one sample. The argument is an empty folder."""


@dataclass(frozen=True)
class Row:
    """One row of docs/contribute/benchmarks.md. `sides`: how each side is measured; `repeat`: samples of each side."""

    name: str
    title: str
    unit: str
    want: float | None
    """The target of our side. None: no target."""
    sides: Mapping[str, Measure]
    repeat: Mapping[str, int]
    seconds: float
    """Approximate duration of the row on two cores."""
    more_is_better: bool = False
    note: str = ""
    left_out: str = ""
    """Sides that cannot be measured on this machine, and what to do about it."""

    def times(self, side: str) -> int:
        return self.repeat.get(side, 1)


def middle(samples: Sequence[Sample]) -> float | None:
    """Return the median. A sample without a value counts as larger than all others."""
    values = sorted(float("inf") if s.value is None else s.value for s in samples)
    found = median(values) if values else float("inf")
    return None if found == float("inf") else found


def parts(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the median of each part over the samples that have it."""
    names = dict.fromkeys(name for s in samples for name in s.parts)
    return {name: median(s.parts[name] for s in samples if name in s.parts) for name in names}

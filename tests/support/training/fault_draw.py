"""Draw faults for `faulty_training`: what happens to which rank, and when."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

NODES = 4
"""Nodes of the job, with one worker each."""

REPLACES = ("exit", "SIGKILL", "SIGSEGV", "SIGSTOP", "interpreter held", "killed for memory", "node lost", "node cut")
"""Faults after which the rank has another process."""
KEEPS = ("exception", "memory error", "deadlock in a collective")
"""Faults after which all processes go on, in another round."""
UNNOTICED = ("slow rank", "store lost")
"""Faults that end no round."""
KINDS = (*REPLACES, *KEEPS, *UNNOTICED)
INJECTED_BY_TEST = ("node lost", "node cut", "store lost")
"""Faults of more than the rank's own process."""

_IN_STEP = ("forward", "backward", "optimizer", "step")
_IN_RECOVERY = ("called", "formed", "synced")


@dataclass(frozen=True)
class RankFault:
    """One fault, which the rank injects when it comes to the point."""

    kind: str
    rank: int
    point: str
    """Where in the script: before the group forms (`called`), before the first step (`formed`, `synced`), or in a step
    (`forward`, `backward`, `optimizer`) or after it (`step`)."""
    recovery: bool = False
    """Whether it waits for the recovery from the fault before it."""

    def __str__(self) -> str:
        return f"{self.kind} (rank {self.rank}, {self.point})"

    def planned(self, step: int) -> dict[str, Any]:
        """Return this fault as the script reads it; `step`: the step before which it does not happen."""
        return {**asdict(self), "step": 0 if self.recovery else step}


@dataclass(frozen=True)
class Incident:
    """Faults that happen at once, or one in the recovery from another."""

    faults: tuple[RankFault, ...]
    replaced: tuple[int, ...] = ()
    """Numbers of faults after which the rank has another process although their kind alone would not do that."""
    same_step: bool = False
    """Whether the ranks wait for each other, so that no fault comes after the recovery from another one."""

    def __str__(self) -> str:
        return "".join(
            (", in its recovery " if fault.recovery else " and at once ") * (index > 0) + str(fault)
            for index, fault in enumerate(self.faults)
        )

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(fault.kind for fault in self.faults)


def draw_incidents(rng: random.Random, kinds: Sequence[str]) -> Iterator[Incident]:
    """Yield incidents without end. Each kind is the first fault of an incident equally often."""
    while True:
        for kind in rng.sample(kinds, len(kinds)):
            shape = rng.choices(("one", "two at once", "in recovery", "in that recovery"), (12, 4, 3, 2))[0]
            ranks = rng.sample(range(NODES), 3)
            faults = [RankFault(kind, ranks[0], rng.choice(_IN_STEP))]
            if shape == "two at once":
                faults.append(RankFault(rng.choice(kinds), ranks[1], rng.choice(_IN_STEP)))
            elif shape != "one" and kind not in UNNOTICED:
                faults += _in_recovery(rng, kinds, ranks[1:], deep=shape == "in that recovery")
            yield Incident(tuple(faults))


def _in_recovery(rng: random.Random, kinds: Sequence[str], ranks: Sequence[int], *, deep: bool) -> list[RankFault]:
    """Return a fault in the recovery from another one, and with `deep` one in the recovery from that."""
    ending = [kind for kind in kinds if kind not in UNNOTICED]
    chosen = ([rng.choice(ending)] if deep else []) + [rng.choice(kinds)]
    return [RankFault(kind, rank, _point(rng, kind), recovery=True) for kind, rank in zip(chosen, ranks, strict=False)]


def _point(rng: random.Random, kind: str) -> str:
    return rng.choice(_IN_RECOVERY[1:] if kind == "deadlock in a collective" else _IN_RECOVERY)

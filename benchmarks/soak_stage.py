"""Where a soak runs, and the length of what it trains."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from benchmarks.goodput import Fault, Step

STEP_DELAY = 0.1
"""Seconds that the example sleeps in each step."""
STEP = 0.13
"""Approximate seconds of a step. They determine the number of epochs."""
STEPS_PER_EPOCH = 15


def digits_arguments(steps: int) -> tuple[str, ...]:
    """Return the arguments of the digits example for about so many steps."""
    epochs = max(2, round(steps / STEPS_PER_EPOCH))
    return "--epochs", str(epochs), "--step-delay", str(STEP_DELAY)


class Stage(Protocol):
    """The place of a soak: the cluster or this machine."""

    name: str
    kinds: Sequence[str]

    def start(self, steps: int) -> None:
        """Start the example, which trains for about so many steps of STEP seconds, and wait for its first steps."""

    def inject(self, kind: str, rng: random.Random) -> Fault:
        """Inject one fault and return it."""

    def steps(self) -> list[Step]:
        """Return all steps so far."""

    def has_ended(self) -> bool:
        """Return whether the job has ended."""

    def finish(self, timeout: float) -> str:
        """Wait for the job's end and return `Complete`, or its other state."""

    def close(self) -> None:
        """Stop the job and undo the faults."""

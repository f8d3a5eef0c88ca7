"""Accelerate in a function that is called again in each round. Imports accelerate."""

from __future__ import annotations

from accelerate.state import AcceleratorState, GradientState


def begin_accelerate_round() -> None:
    """Let the next `Accelerator()` of this process take rank and world size of the current round.

    Accelerate keeps them for the life of a process. Call this at the start of the restartable function, before
    `Accelerator()`.

    Example:
        >>> @elasticjob.restartable
        ... def train():
        ...     begin_accelerate_round()
        ...     return "accelerator = Accelerator(), and train"
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()

"""Checks of the numbers that a State or a ShardedState gets."""

from __future__ import annotations

import math

from elasticjob.training.snapshot_values.state_values import refusal


def checked_minutes(minutes: float | None, path: object) -> float | None:
    """Return `save_minutes` as a number; ValueError if it is not above 0, or if there is no `path` to save to."""
    if minutes is None:
        return None
    if not isinstance(minutes, (int, float)) or not 0 < minutes < math.inf:
        raise ValueError(f"State(save_minutes={minutes!r}): write minutes above 0, or leave it out")
    if path is None:
        raise ValueError("State(save_minutes=...) needs the file to which to save: State(path=..., save_minutes=...)")
    return float(minutes)


def checked_step(step: int) -> int:
    """Return the step; TypeError or ValueError if it is no integer of 0 or more."""
    if problem := "" if type(step) is int else refusal(step):
        raise TypeError(f"State: step: {problem}")
    if step < 0:
        raise ValueError(f"State: step: {step} is negative")
    return step

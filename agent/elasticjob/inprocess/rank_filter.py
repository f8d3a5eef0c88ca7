"""Hook that decides which ranks call the function. The others are spares."""

from __future__ import annotations

from abc import ABC, abstractmethod

from elasticjob.inprocess.state import State


class RankFilter(ABC):
    """Called on each rank after the rank assignment, with all ranks active that the assignment left active.

    Every rank must come to the same active world size, and active ranks must be consecutive from 0.
    """

    @abstractmethod
    def __call__(self, state: State) -> State:
        """Return the state with this rank active or not: see `State.activate`."""


class MaxActiveWorldSize(RankFilter):
    """Activates at most `max_active_world_size` ranks."""

    def __init__(self, max_active_world_size: int | None = None) -> None:
        """None: no limit."""
        if max_active_world_size is not None:
            _check_positive("max_active_world_size", max_active_world_size)
        self._max = max_active_world_size

    def __call__(self, state: State) -> State:
        active = _active(state)
        return state.activate(active if self._max is None else min(active, self._max))


class ActiveWorldSizeDivisibleBy(RankFilter):
    """Activates as many ranks as `divisor` divides, so that each tensor or pipeline parallel group is complete."""

    def __init__(self, divisor: int = 1) -> None:
        _check_positive("divisor", divisor)
        self._divisor = divisor

    def __call__(self, state: State) -> State:
        active = _active(state)
        return state.activate(active - active % self._divisor)


class WorldSizeDivisibleBy(ActiveWorldSizeDivisibleBy):
    """`ActiveWorldSizeDivisibleBy` under its former name in NVIDIA's wrapper."""


def _active(state: State) -> int:
    return state.world_size if state.active_world_size is None else state.active_world_size


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")

"""Hook at the start of each iteration."""

from __future__ import annotations

from abc import ABC, abstractmethod

from elasticjob.inprocess.exception import RestartAbort
from elasticjob.inprocess.state import State


class Initialize(ABC):
    """Called on each rank before its health check and the function. An `Exception` restarts all ranks."""

    @abstractmethod
    def __call__(self, state: State) -> State | None:
        """Prepare the rank; return a changed state, or None to leave it."""


class RetryController(Initialize):
    """Ends the job after `max_iterations` calls of the function, or when too few ranks are left."""

    def __init__(
        self, max_iterations: int | None = None, min_world_size: int = 1, min_active_world_size: int = 1
    ) -> None:
        """`max_iterations` includes the first call. None: no limit."""
        if max_iterations is not None and max_iterations < 1:
            raise ValueError(f"max_iterations must be at least 1 or None, not {max_iterations}")
        self._max_iterations = max_iterations
        self._min_world_size = min_world_size
        self._min_active_world_size = min_active_world_size

    def __call__(self, state: State) -> None:
        if self._max_iterations is not None and state.iteration >= self._max_iterations:
            raise RestartAbort(f"{state.iteration} calls of the function failed: max_iterations={self._max_iterations}")
        if state.world_size < self._min_world_size:
            raise RestartAbort(f"{state.world_size} ranks are left: min_world_size={self._min_world_size}")
        if (state.active_world_size or 0) < self._min_active_world_size:
            raise RestartAbort(
                f"{state.active_world_size} ranks would be active: min_active_world_size={self._min_active_world_size}"
            )

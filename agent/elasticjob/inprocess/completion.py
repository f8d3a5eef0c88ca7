"""Hook after the function has returned."""

from __future__ import annotations

from abc import ABC, abstractmethod

from elasticjob.inprocess.state import State


class Completion(ABC):
    """Called on each rank once its function has returned, spares included, before it waits for the other ranks.

    An `Exception` restarts all ranks, as one of the function does.
    """

    @abstractmethod
    def __call__(self, state: State) -> object:
        """Finish this rank's part."""

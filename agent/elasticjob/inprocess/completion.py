"""Hook at the successful end of a wrapped function."""

from __future__ import annotations

from abc import ABC, abstractmethod

from elasticjob.inprocess.state import State


class Completion(ABC):
    """Called once on each rank, spares included, when all ranks have completed: no restart can follow.

    An `Exception` is logged; the wrapped function returns its value all the same.
    """

    @abstractmethod
    def __call__(self, state: State) -> object:
        """Finish this rank's part."""

"""Hook of a rank that leaves."""

from __future__ import annotations

from abc import ABC, abstractmethod

from elasticjob.inprocess.state import State


class Terminate(ABC):
    """Called on a rank that leaves with an exception, after it has reported that to the others."""

    @abstractmethod
    def __call__(self, state: State) -> object:
        """Clean up. An exception is logged; the one that ends the rank is raised all the same."""

"""Hook that breaks the running collectives, so that an interrupted function returns."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from elasticjob.inprocess.state import State

if TYPE_CHECKING:
    from elasticjob.inprocess._groups.process_groups import ProcessGroups

log = logging.getLogger(__name__)


class Abort(ABC):
    """Makes calls fail in which the main thread may wait: collectives of lost ranks above all."""

    @abstractmethod
    def __call__(self, state: State) -> object:
        """Break what the main thread may wait for. An exception is logged.

        It is called in the monitor thread, and in the main thread of a rank that leaves with an exception.
        """

    @contextmanager
    def around_function(self) -> Iterator[None]:
        """A context around each call of the function, in the main thread."""
        yield

    def after_function(self) -> None:
        """Release in the main thread what was broken, before the finalize. An exception ends the rank."""
        return


class AbortTorchDistributed(Abort):
    """Breaks the collectives of all process groups, and destroys the groups.

    A rank whose communicators or device are not done within `timeout` after that leaves with an exception, and the
    others go on without it.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=30)) -> None:
        self._timeout = timeout
        self._groups: ProcessGroups | None = None

    def __call__(self, state: State) -> None:
        if self._groups is not None:
            self._groups.break_collectives()

    @contextmanager
    def around_function(self) -> Iterator[None]:
        from elasticjob.inprocess._groups.process_groups import ProcessGroups

        self._groups = ProcessGroups()
        with self._groups.watch():
            yield

    def after_function(self) -> None:
        groups, self._groups = self._groups, None
        if groups is not None:
            groups.leave(timeout=self._timeout.total_seconds())

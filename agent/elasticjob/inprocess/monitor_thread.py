"""The thread that follows one iteration in the store and interrupts the main thread when it ends early."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta

from elasticjob.inprocess._stores.store_mixin import IterationOutcome, StoreMixin
from elasticjob.inprocess._threads.interruption import Interrupter
from elasticjob.inprocess._threads.own_thread import MonitorOfWorker
from elasticjob.inprocess.attribution import Interruption, InterruptionRecord

log = logging.getLogger(__name__)


class MonitorThread:
    """Waits for the outcome of one iteration, and checks about each `interval` whether this rank makes progress."""

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        barrier_timeout: timedelta,
        store: StoreMixin,
        interrupter: Interrupter,
        interval: timedelta,
        find_fault: Callable[[], Interruption | None],
        abort: Callable[[], None],
    ) -> None:
        """`store`: that of the iteration, over a connection of this thread's own.

        `find_fault` returns what is wrong with this rank. `abort` breaks what the main thread may wait for.
        """
        self._rank = rank
        self._world_size = world_size
        self._barrier_timeout = barrier_timeout
        self._store = store
        self._interrupter = interrupter
        self._interval = interval
        self._find_fault = find_fault
        self._abort = abort
        self.failure: Exception | None = None
        """Why the store can no longer be followed."""
        self._thread = MonitorOfWorker(self._run, "elasticjob-monitor")

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        """Wait for the thread's end. The iteration has an outcome, and the main thread is not in the function."""
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            outcome = self._wait_for_outcome()
        except Exception as error:  # the store is unavailable
            log.error("rank %d: the wrapper's store is unavailable: %s", self._rank, error)
            self.failure = error
            outcome = IterationOutcome.INTERRUPTED
        if outcome is IterationOutcome.INTERRUPTED:
            self._interrupter.interrupt(self._abort, await_peers=self._await_peers)
            if self.failure is None:
                self._end_results()  # the main thread may have been on its way out

    def _await_peers(self) -> bool:
        """Wait until no rank counts a step: an abort may end a collective of another rank with part of its result."""
        if self.failure is not None:
            return True
        try:
            self._store.results_barrier(self._rank, self._world_size, self._barrier_timeout)
        except Exception as error:  # a rank that does not come here does not come to the next iteration either
            log.error("rank %d: not all ranks have ended their results: %s", self._rank, error)
        return True

    def _end_results(self) -> None:
        try:
            self._store.end_results(self._rank)
        except Exception as error:
            log.error("rank %d: the wrapper's store is unavailable: %s", self._rank, error)
            self.failure = error

    def _wait_for_outcome(self) -> IterationOutcome:
        while (outcome := self._store.wait_for_outcome(self._interval)) is None:
            fault = self._find_fault()
            if fault is not None:  # recording it gives the iteration its outcome
                log.warning("rank %d: %s", self._rank, fault.value)
                self._store.record_interrupted(InterruptionRecord(self._rank, fault))
        return outcome

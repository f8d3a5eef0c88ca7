"""Copy the state of a process whose main thread does not leave its function, before its agent kills it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from elasticjob._runtime.contract.names import Env

_SHARE = 0.3
"""Share of the grace after which the copy begins. A function that can be left has been left by then, and most of the
grace is there for the copy."""
_SHORTEST_GRACE = 1.0
"""Seconds that the agent waits at least before it kills a process."""
_LONGEST_WAIT = 2.0
"""Seconds after which the copy begins if the grace is long."""


def seconds_before_copy(environ: Mapping[str, str]) -> float:
    """Return how long the main thread may need to leave its function before the state is copied."""
    grace = _SHORTEST_GRACE
    with suppress(ValueError):
        grace = max(grace, float(environ.get(Env.STOP_GRACE_SECONDS, "")))
    return min(_SHARE * grace, _LONGEST_WAIT)


class StateCopier:
    """Copies the state once for each interruption, in a thread of its own: a copy may wait for the device."""

    def __init__(
        self,
        copy: Callable[[], object],
        *,
        changes: Callable[[], bool],
        aborts: Callable[[], bool],
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`copy` copies the state. `changes`: whether the main thread is in the middle of an optimizer's step; there is
        nothing to copy then. `aborts`: whether an abort is in progress, after which the main thread may leave; the copy
        begins after twice the `seconds` then.
        """
        self._copy_state = copy
        self._changes = changes
        self._aborts = aborts
        self._seconds = seconds
        self._clock = clock
        self._since = 0.0
        self._done = True
        """Whether no copy may begin: it has begun, or the main thread has left its function."""
        self._copying = threading.Lock()

    def begin(self) -> None:
        """Note that the main thread is about to be interrupted."""
        self._since, self._done = self._clock(), False

    def begin_if_due(self) -> bool:
        """Begin the copy if the main thread needs too long; return whether it began."""
        waited = self._clock() - self._since
        if waited < self._seconds * (2 if self._aborts() else 1) or self._changes():
            return False
        if not self._copying.acquire(blocking=False):
            return False
        begins, self._done = not self._done, True
        if begins:
            text = (
                f"elasticjob: process {os.getpid()} has not left its function {waited:.1f} s after its round ended: "
                "its state is copied to the memory of the pod, because the process may be killed\n"
            )
            os.write(2, text.encode())
            threading.Thread(target=self._copy, daemon=True, name="elasticjob-state").start()
        else:
            self._copying.release()
        return begins

    def wait(self) -> None:
        """In the main thread, when it has left its function: wait for the end of a copy; none begins from now on."""
        with self._copying:
            self._done = True

    def _copy(self) -> None:
        try:
            self._copy_state()
        finally:
            self._copying.release()

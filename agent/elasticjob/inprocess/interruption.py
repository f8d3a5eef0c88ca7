"""Raise an exception in the main thread from another thread, and keep it out of sections that must not be interrupted.

A signal does it: its Python handler runs in the main thread and raises there. Unlike an exception that is set on the
thread from outside, a signal also ends waits for locks, sleeps and reads.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPT_SIGNAL = signal.SIGRTMAX - 3
"""A real-time signal: programs and schedulers use SIGUSR1 and SIGUSR2, and threading libraries the lowest ones."""
_FIRST_REPEAT, _LONGEST_REPEAT = 0.01, 0.5
"""Seconds until the exception is raised again: the function may have caught it, or a callback have lost it."""
_DEFER_TIMEOUT = 0.5
"""Seconds that a deferred exception may wait. An optimizer's step takes less; a program that never ends its section
gets the exception in it."""


class RankShouldRestart(BaseException):
    """Raised in the wrapped function when its round has ended. No `Exception`, so that few functions catch it."""


class Interrupter:
    """Interrupts the main thread, in which it must be created."""

    def __init__(self, deferred: Callable[[], bool] = lambda: False) -> None:
        """`deferred`: returns whether the main thread is in a short section that should end first; called in it."""
        self._deferred = deferred
        self._deferred_until = 0.0
        """When an exception is raised all the same; monotonic time."""
        self._armed = False
        self._interrupted = threading.Event()
        self._left = threading.Event()
        self._atomic = threading.RLock()
        self._main = threading.main_thread().ident or 0
        self._previous = signal.signal(INTERRUPT_SIGNAL, self._raise)

    @property
    def pending(self) -> bool:
        """Whether there was an interruption since the last `reset`."""
        return self._interrupted.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait and return whether there is an interruption within `seconds`, or was one since the last `reset`."""
        return self._interrupted.wait(seconds)

    def reset(self) -> None:
        """In any thread: forget the last interruption. The main thread must not be in `armed`."""
        self._interrupted.clear()

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Allow interruptions of what the main thread does in this context, and raise one that is pending."""
        self._left.clear()
        self._armed = True
        try:
            if self.pending:
                raise RankShouldRestart
            yield
        finally:
            self._armed = False
            self._left.set()

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """In the main thread: keep interruptions, and the break of collectives, out of this context. Reentrant.

        While an interruption is in progress, this waits for its exception instead.
        """
        with self._atomic:
            yield

    def interrupt(self, break_collectives: Callable[[], None], still_inside: Callable[[], None] = lambda: None) -> None:
        """In another thread: break the collectives and raise `RankShouldRestart` in the main thread until it has left.

        This waits for the end of an atomic section first. A main thread that is not in `armed` is interrupted there.
        `still_inside` is called after each attempt by which it did not leave, unless it has deferred the exception.
        """
        with self._atomic:
            self._interrupted.set()
            if not self._armed:
                return
            break_collectives()
            repeat, self._deferred_until = _FIRST_REPEAT, time.monotonic() + _DEFER_TIMEOUT
            while not self._left.is_set():
                signal.pthread_kill(self._main, INTERRUPT_SIGNAL)
                if not self._left.wait(repeat) and not self._is_deferred():
                    still_inside()
                repeat = min(2 * repeat, _LONGEST_REPEAT)

    def close(self) -> None:
        """Give the signal its previous meaning back."""
        signal.signal(INTERRUPT_SIGNAL, self._previous or signal.SIG_DFL)

    def _is_deferred(self) -> bool:
        return time.monotonic() < self._deferred_until and self._deferred()

    def _raise(self, _number: int, frame: FrameType | None) -> None:
        # In the end of `armed` an exception would leave it armed. The signal comes again if it was not the end.
        at_end = frame is not None and frame.f_code in _CODE_OF_ARMED
        if self._armed and self.pending and not at_end and not self._is_deferred():
            raise RankShouldRestart


_CODE_OF_ARMED = (
    Interrupter.armed.__wrapped__.__code__,  # type: ignore[attr-defined]
    contextlib._GeneratorContextManager.__exit__.__code__,
)

"""Raise an exception in the main thread from another thread, and keep it out of sections that must not be interrupted.

A signal does it: its Python handler runs in the main thread and raises there. Unlike an exception that is set on the
thread from outside, a signal also ends waits for locks, sleeps and reads.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from elasticjob.training import devices
from elasticjob.training.update_guard import RankShouldRestart, UpdateGuard, guard

__all__ = ["INTERRUPT_SIGNAL", "Interrupter", "RankShouldRestart"]

INTERRUPT_SIGNAL = signal.SIGRTMAX - 3
"""A real-time signal: programs and schedulers use SIGUSR1 and SIGUSR2, and threading libraries the lowest ones."""
_FIRST_REPEAT, _LONGEST_REPEAT = 0.01, 0.5
"""Seconds until the exception is raised again: the function may have caught it, or a callback have lost it."""
_UPDATE_TIMEOUT = 0.5
"""Seconds that an update which has begun may take to its end. An optimizer's step takes less; a script that waits for a
lost rank before it assigns `step` gets the exception in the update, which then does not count."""
_DEVICE_TIMEOUT = 0.5
"""Seconds that the device may take for the last counted update, which waits for no other rank: kernels that were queued
behind it do not matter. A device that needs longer does not work, and the update does not count."""


class Interrupter:
    """Interrupts the main thread, in which it must be created."""

    def __init__(self, guard: UpdateGuard = guard) -> None:
        """`guard`: it decides until when an update of the model counts. There is another one in tests only."""
        self._guard = guard
        self._armed = False
        self.interruption_event = threading.Event()
        self._left = threading.Event()
        self._atomic = threading.RLock()
        self._main = threading.main_thread().ident or 0
        self._previous = signal.signal(INTERRUPT_SIGNAL, self.handle_signal)
        guard.protect(True)

    @property
    def pending(self) -> bool:
        """Whether there was an interruption since the last `reset`."""
        return self.interruption_event.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait and return whether there is an interruption within `seconds`, or was one since the last `reset`."""
        return self.interruption_event.wait(seconds)

    def reset(self) -> None:
        """In any thread: forget the last interruption. The main thread must not be in `armed`."""
        self.interruption_event.clear()
        self._guard.reset()

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
            self._guard.leave_all()
            self._left.set()

    def end_results(self) -> None:
        """In the main thread, once it has left `armed` and before it breaks its collectives: nothing counts any more.

        An interruption that is in progress has come to its end when this returns.
        """
        with self._atomic:
            self._guard.break_results(_DEVICE_TIMEOUT)

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """In the main thread: keep interruptions, and the break of collectives, out of this context. Reentrant.

        While an interruption is in progress, this waits for its exception instead.
        """
        with self._atomic:
            yield

    def interrupt(
        self,
        break_collectives: Callable[[], None],
        still_inside: Callable[[], None] = lambda: None,
        await_peers: Callable[[], bool] = lambda: True,
    ) -> None:
        """In another thread: break the collectives and raise `RankShouldRestart` in the main thread until it has left.

        This waits for the end of an atomic section first. A main thread that is not in `armed` is interrupted there.
        `still_inside` is called after each attempt by which it did not leave. `await_peers` is called before the break
        on a device that works behind the host: it returns once no other rank counts a step either, or False if nothing
        is to be broken, because the main thread needs no interruption any more.
        """
        with self._atomic:
            self.interruption_event.set()
            if not self._armed:
                return
            if not self._break(break_collectives, await_peers):
                return
            repeat = _FIRST_REPEAT
            while not self._left.wait(repeat):
                still_inside()
                self._signal()
                repeat = min(2 * repeat, _LONGEST_REPEAT)

    def close(self) -> None:
        """Give the signal its previous meaning back."""
        with self._atomic:  # the function may have returned while it was interrupted
            self._guard.reset()
            self._guard.protect(False)
        signal.signal(INTERRUPT_SIGNAL, self._previous or signal.SIG_DFL)

    def _break(self, break_collectives: Callable[[], None], await_peers: Callable[[], bool]) -> bool:
        """Let an update end that has begun, break the collectives, and send the first signal."""
        is_asynchronous = devices.is_asynchronous()
        self._guard.request()
        if not is_asynchronous:
            break_collectives()  # they fail with an error, also one that the update waits for
        self._guard.await_update(_UPDATE_TIMEOUT)
        self._guard.break_results(_DEVICE_TIMEOUT)
        if is_asynchronous and not await_peers():
            return False
        self._signal()
        if is_asynchronous:  # they may end as if they had succeeded: a wait for the device gets the exception
            break_collectives()
        return True

    def _signal(self) -> None:
        signal.pthread_kill(self._main, INTERRUPT_SIGNAL)

    def handle_signal(self, _number: int, frame: FrameType | None) -> None:
        # In the end of `armed` an exception would leave it armed. The signal comes again if it was not the end.
        if not self._armed or not self.pending or self._guard.may_finish:
            return
        at_end = frame is not None and frame.f_code in _CODE_OF_ARMED
        if not at_end and not self._guard.must_not_raise:
            raise RankShouldRestart
        signal.raise_signal(INTERRUPT_SIGNAL)  # it comes back a few instructions later


_CODE_OF_ARMED = (
    Interrupter.armed.__wrapped__.__code__,  # type: ignore[attr-defined]
    contextlib._GeneratorContextManager.__exit__.__code__,
)

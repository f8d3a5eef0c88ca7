"""The order between the updates of a model and the break of collectives, so that no broken result is used.

On a GPU the host runs ahead: kernels of an optimizer wait in the queue behind an all-reduce that has not ended. When
the round ends, its collectives are broken, and NCCL then lets the kernel that waits return as if it had succeeded, with
part of the sum. The optimizer's kernels behind it would apply that, in steps that the host has counted already.

Two rules prevent it. The main thread waits for the device before an update begins (`begin`), so an optimizer's kernel
never stands behind a collective; and it begins no update once an interruption was requested. An update that has begun
may end before the collectives are broken. Its kernels need no other rank, and an event behind them tells whether the
device has completed them by then (`break_results`).

    monitor thread:   request -> await_update -> break_results -> break the collectives -> ... -> reset
    main thread:      begin (waits for the device) -> the optimizer's step -> complete

`enter` and `leave` mark other short stretches of the main thread that an interruption would leave half done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from elasticjob.training import devices

POLL_INTERVAL = 0.0005
"""Seconds between two queries of an event: torch can wait for one, but not with a limit."""


class RankShouldRestart(BaseException):
    """Raised in the wrapped function when its round has ended. No `Exception`, so that few functions catch it."""


class Phase(Enum):
    """What an interruption has done so far."""

    RUNNING = "running"
    ENDING = "ending"
    """It was requested: no update begins, and one that has begun may end."""
    BROKEN = "broken"
    """Collectives may have ended with part of their result. Nothing that was computed since then is used."""


class UpdateGuard:
    """The guard of one process. Only the main thread makes updates."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())  # a signal handler of the script may save a State
        self._changing = 0
        self._phase = Phase.RUNNING
        self._updating = False
        self._sections = 0
        self.protects = False
        self.completed_event: devices.Event | None = None
        """Recorded behind the last completed update; None where work is done when its call returns."""
        self._whole = True
        self.rounds = 0
        """How often `reset` was called: a number for each round of this process."""

    @property
    def inside(self) -> bool:
        """Whether the main thread is in an update or a section."""
        return self._updating or self._sections > 0

    @property
    def may_finish(self) -> bool:
        """Whether an interruption was requested while the main thread is in an update that it may end."""
        return self._phase is Phase.ENDING and self.inside

    @property
    def must_not_raise(self) -> bool:
        """Whether a signal handler must not raise now: the main thread may hold the lock, and would not release it."""
        return self._changing > 0

    @property
    def last_update_is_whole(self) -> bool:
        """Whether the device had done the last completed update when the collectives were broken, if they were."""
        return self._whole

    # ---- main thread

    def begin(self) -> None:
        """Begin an update of the model, or go on with the one that has begun. RankShouldRestart: the round has ended.

        It waits until the device has done what is queued: gradients that are reduced by then are those of all ranks.
        """
        if self._updating:
            return
        if self.protects:
            devices.wait_for_queued_work()
        with self.in_main_thread():
            self._refuse_after_request()
            self._updating = True

    def wait(self) -> None:
        """Wait until the device has done what is queued. RankShouldRestart: the result may be a broken one."""
        if self.protects:
            devices.wait_for_queued_work()
        self.check()

    def complete(self) -> None:
        """End the update, if one has begun: the step is counted. RankShouldRestart: the round has ended."""
        event = devices.record_event() if self.protects else None
        with self.in_main_thread():
            self._updating = False
            self._changed.notify_all()
            if self._phase is Phase.BROKEN:
                self._whole = False
            else:
                self.completed_event, self._whole = event, True
            self._refuse_after_request()

    def abandon(self) -> None:
        """End the update without counting it: another object is responsible from now on."""
        with self.in_main_thread():
            self._updating = False
            self._changed.notify_all()

    def check(self) -> None:
        """Call it after a wait for the device, before its results are used. RankShouldRestart: they may be broken."""
        with self.in_main_thread():
            self._refuse_after_request()

    def enter(self) -> None:
        """Begin a section; sections may be nested. It delays an interruption for a short time."""
        self._sections += 1

    def leave(self) -> None:
        """End the innermost section; without a section nothing happens."""
        if self._sections:
            with self.in_main_thread():
                self._sections -= 1
                self._changed.notify_all()

    @contextmanager
    def section(self) -> Iterator[None]:
        """A context that is a section."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def leave_all(self) -> None:
        """End the update and all sections: the main thread was interrupted, and their code does not continue."""
        with self.in_main_thread():
            self._updating, self._sections = False, 0
            self._changed.notify_all()

    @contextmanager
    def in_main_thread(self) -> Iterator[None]:
        """Hold the lock. A signal between its acquisition and the context would otherwise leave it held for ever."""
        self._changing += 1
        try:
            with self._changed:
                yield
        finally:
            self._changing -= 1

    def _refuse_after_request(self) -> None:
        if self._phase is not Phase.RUNNING:
            raise RankShouldRestart

    # ---- the thread that interrupts

    def protect(self, protects: bool) -> None:
        """Say whether collectives of this process may be broken while it goes on. Without that, `begin` waits not."""
        self.protects = protects

    def request(self) -> None:
        """Let no update begin from now on."""
        with self._changed:
            self._phase = Phase.ENDING

    def await_update(self, seconds: float) -> bool:
        """Wait until the main thread is in no update or section; return False if it is in one after `seconds`.

        A script may wait for another rank in it.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not self.inside, seconds)

    def break_results(self, seconds: float) -> None:
        """Let nothing count that the device completes from now on. Call it directly before the break of collectives.

        A second call does nothing. `seconds`: how long the device may need for the last completed update, in which it
        waits for no other rank.
        """
        with self._changed:
            if self._phase is Phase.BROKEN:
                return
            self._phase, event = Phase.BROKEN, self.completed_event
        deadline = time.monotonic() + seconds
        while not (done := _is_done(event)) and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL)
        if not done:
            with self._changed:
                self._whole = False

    def reset(self) -> None:
        """Forget the interruption: the next round begins."""
        with self._changed:
            self._phase, self.completed_event = Phase.RUNNING, None
            self.rounds += 1


def _is_done(event: devices.Event | None) -> bool:
    """Return whether the device has come to the event; False if it cannot tell.

    A query fails after an error of the device, and while the main thread captures a graph.
    """
    try:
        return event is None or event.query()
    except Exception:
        return False


guard = UpdateGuard()
"""That of this process."""

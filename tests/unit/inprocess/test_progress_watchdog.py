"""What counts as progress of the main thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from elasticjob.inprocess.progress_watchdog import ProgressWatchdog


@contextmanager
def running(report: Callable[[], None] = lambda: None) -> Iterator[ProgressWatchdog]:
    watchdog = ProgressWatchdog(report, timedelta(milliseconds=2))
    watchdog.start()
    try:
        yield watchdog
    finally:
        watchdog.shutdown()


def compute_until(condition: Callable[[], bool]) -> bool:
    """Run Python code until the condition holds; return whether it does within 20 s."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if condition():
            return True
    return False


def test_python_code_is_progress_and_is_reported() -> None:
    reported = threading.Semaphore(0)
    with running(reported.release) as watchdog:
        start = time.monotonic()
        assert compute_until(lambda: reported.acquire(blocking=False))
        assert compute_until(lambda: time.monotonic() - watchdog.age() > start)


def test_a_main_thread_that_waits_outside_of_python_makes_no_progress() -> None:
    with running() as watchdog:
        lock = threading.Lock()
        lock.acquire()
        ages: list[float] = []

        def note_age() -> None:
            ages.append(watchdog.age())
            lock.release()

        threading.Timer(0.2, note_age).start()
        lock.acquire()
        assert ages[0] > 0.1


def test_after_a_ping_only_pings_are_progress_until_the_reset() -> None:
    with running() as watchdog:
        watchdog.ping()
        assert watchdog.is_manual
        assert compute_until(lambda: watchdog.age() > 0.1)
        watchdog.ping()
        assert watchdog.age() < 0.1
        assert compute_until(lambda: watchdog.age() > 0.1)
        watchdog.reset()
        assert not watchdog.is_manual
        start = time.monotonic()
        assert compute_until(lambda: time.monotonic() - watchdog.age() > start)


def test_a_pending_call_that_runs_after_a_ping_is_no_progress() -> None:
    watchdog = ProgressWatchdog(lambda: None, timedelta(seconds=1))
    watchdog.ping()
    last = watchdog.last_progress
    watchdog.run_pending_call(None)
    assert watchdog.last_progress == last


def test_a_ping_in_an_automatic_tick_counts() -> None:
    reports: list[int] = []
    with running(lambda: reports.append(1)) as watchdog:
        watchdog.ping()
        assert compute_until(lambda: len(reports) == 1)
        watchdog.ping()
        assert compute_until(lambda: len(reports) == 2)


def test_its_end_leaves_no_thread_and_no_pending_call() -> None:
    before = threading.active_count()
    with running() as watchdog:
        pass
    assert threading.active_count() == before
    assert not watchdog.pending

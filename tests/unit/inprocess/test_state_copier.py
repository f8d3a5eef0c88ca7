"""When the state of a process is copied whose main thread does not leave its function; time is an argument."""

from __future__ import annotations

import threading

import pytest

from elasticjob._runtime.contract.names import Env
from elasticjob.inprocess._restartable.state_copier import StateCopier, seconds_before_copy

TIMEOUT = 60.0


class Process:
    """A process that is interrupted, with a clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0
        self.changes = self.aborts = False
        self.may_end = threading.Event()
        self.began = threading.Event()
        self.copies = 0
        self.copier = StateCopier(
            self._copy,
            changes=lambda: self.changes,
            aborts=lambda: self.aborts,
            seconds=0.3,
            clock=lambda: self.now,
        )
        self.copier.begin()

    def _copy(self) -> None:
        self.copies += 1
        self.began.set()
        assert self.may_end.wait(TIMEOUT)


@pytest.fixture
def process() -> Process:
    return Process()


@pytest.mark.parametrize(
    ("after", "changes", "aborts", "begins"),
    [
        (0.2, False, False, False),
        (0.31, False, False, True),
        (0.9, True, False, False),  # in an optimizer's step: there is no complete state
        (0.5, False, True, False),  # an abort is in progress: the main thread may leave after it
        (0.61, False, True, True),
    ],
)
def test_when_the_copy_begins(process: Process, after: float, changes: bool, aborts: bool, begins: bool) -> None:
    process.now, process.changes, process.aborts = 100.0 + after, changes, aborts
    assert process.copier.begin_if_due() is begins
    process.may_end.set()
    process.copier.wait()
    assert process.copies == begins


def test_the_main_thread_waits_for_the_copy_and_none_begins_afterwards(process: Process) -> None:
    process.now += 1
    assert process.copier.begin_if_due()
    assert process.began.wait(TIMEOUT)
    main = threading.Thread(target=process.copier.wait)
    main.start()
    assert not process.copier.begin_if_due()
    assert main.is_alive()
    process.may_end.set()
    main.join(TIMEOUT)
    assert not main.is_alive()
    assert not process.copier.begin_if_due()
    assert process.copies == 1


def test_no_copy_begins_once_the_main_thread_has_left(process: Process) -> None:
    """It goes on with the next round; the next interruption may need a copy again."""
    process.copier.wait()
    process.now += 1
    assert not process.copier.begin_if_due()
    process.copier.begin()
    process.now += 1
    assert process.copier.begin_if_due()
    process.may_end.set()
    process.copier.wait()


@pytest.mark.parametrize(
    ("grace", "seconds"), [(None, 0.3), ("0", 0.3), ("1", 0.3), ("4", 1.2), ("30", 2.0), ("soon", 0.3)]
)
def test_a_part_of_the_grace_is_for_the_function(grace: str | None, seconds: float) -> None:
    """The agent waits for 1 s at least."""
    environ = {} if grace is None else {str(Env.STOP_GRACE_SECONDS): grace}
    assert seconds_before_copy(environ) == pytest.approx(seconds)

"""Interrupt the main thread from another one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from elasticjob.inprocess._threads.interruption import Interrupter, RankShouldRestart
from elasticjob.training.update_guard import UpdateGuard


@pytest.fixture
def guard() -> UpdateGuard:
    return UpdateGuard()


@pytest.fixture
def interrupter(guard: UpdateGuard) -> Iterator[Interrupter]:
    made = Interrupter(guard)
    yield made
    made.close()


class InThread:
    """Interrupts the main thread once it has got `go`."""

    def __init__(self, interrupter: Interrupter, break_collectives: Callable[[], None] = lambda: None) -> None:
        self.go = threading.Event()
        self.done = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(interrupter, break_collectives), daemon=True)
        self._thread.start()

    def _run(self, interrupter: Interrupter, break_collectives: Callable[[], None]) -> None:
        self.go.wait(30)
        interrupter.interrupt(break_collectives)
        self.done.set()


def run(interrupter: Interrupter, function: Callable[[], object]) -> None:
    """Run the function; it must be interrupted."""
    with pytest.raises(RankShouldRestart), interrupter.armed():
        function()


def test_a_wait_that_never_ends_is_interrupted(interrupter: Interrupter) -> None:
    other = InThread(interrupter)

    def function() -> None:
        other.go.set()
        threading.Event().wait()

    run(interrupter, function)
    assert interrupter.pending
    assert other.done.wait(30), "the other thread goes on once the function has been left"


def test_a_function_that_catches_the_exception_is_interrupted_again(interrupter: Interrupter) -> None:
    other, caught = InThread(interrupter), 0

    def function() -> None:
        nonlocal caught
        other.go.set()
        while True:
            try:
                threading.Event().wait()
            except RankShouldRestart:
                caught += 1
                if caught == 3:
                    raise

    run(interrupter, function)


def test_an_interruption_before_the_function_runs_is_not_lost(interrupter: Interrupter) -> None:
    interrupter.interrupt(lambda: None)

    def function() -> None:
        pytest.fail("the function must not run")

    run(interrupter, function)
    interrupter.reset()
    with interrupter.armed():
        assert not interrupter.pending


def test_the_collectives_are_broken_before_the_exception_comes(interrupter: Interrupter) -> None:
    broken: list[int] = []
    other = InThread(interrupter, lambda: broken.append(1))

    def function() -> None:
        other.go.set()
        threading.Event().wait()

    run(interrupter, function)
    assert broken == [1]


def test_neither_break_nor_exception_enters_an_atomic_section(interrupter: Interrupter) -> None:
    broken: list[int] = []
    other, finished = InThread(interrupter, lambda: broken.append(1)), False

    def function() -> None:
        nonlocal finished
        with interrupter.atomic(), interrupter.atomic():
            other.go.set()
            assert not other.done.wait(0.1)
            finished = not broken
        threading.Event().wait()

    run(interrupter, function)
    assert finished
    assert broken == [1]


def test_an_atomic_section_is_not_entered_during_an_interruption(interrupter: Interrupter) -> None:
    breaking, entered = threading.Event(), False

    def break_collectives() -> None:
        breaking.set()

    other = InThread(interrupter, break_collectives)

    def function() -> None:
        nonlocal entered
        other.go.set()
        try:
            breaking.wait()
        finally:
            with interrupter.atomic():
                entered = True

    run(interrupter, function)
    assert not entered


def test_a_deferred_exception_comes_when_the_section_has_ended(interrupter: Interrupter, guard: UpdateGuard) -> None:
    other, left = InThread(interrupter), False

    def function() -> None:
        nonlocal left
        guard.enter()
        other.go.set()
        assert not other.done.wait(0.1)
        left = True
        guard.leave()
        threading.Event().wait()

    run(interrupter, function)
    assert left


def test_a_section_that_does_not_end_is_interrupted(interrupter: Interrupter, guard: UpdateGuard) -> None:
    other = InThread(interrupter)

    def function() -> None:
        guard.enter()
        other.go.set()
        threading.Event().wait()

    run(interrupter, function)


def test_nothing_is_interrupted_after_the_function(interrupter: Interrupter) -> None:
    with interrupter.armed():
        pass
    interrupter.interrupt(lambda: pytest.fail("the collectives are another round's"))
    assert interrupter.pending


def test_a_function_that_returns_while_it_is_interrupted_leaves_nothing_behind(guard: UpdateGuard) -> None:
    """The script may save its State after that."""
    made = Interrupter(guard)
    guard.request()
    guard.break_results(0.0)
    made.close()
    guard.check()

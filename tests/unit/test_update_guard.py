"""What counts when an interruption meets an update of the model, on a device that works behind the host."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from elasticjob.training import devices
from elasticjob.training.update_guard import RankShouldRestart, UpdateGuard

NO_TIME, LONG = 0.0, 30.0


class Event:
    """An event that the device comes to once the test says so."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


class Device:
    """Notes what the guard does with the device."""

    def __init__(self) -> None:
        self.waits = 0
        self.at_wait: Callable[[], None] = lambda: None
        self.events: list[Event] = []

    def wait(self) -> None:
        self.waits += 1
        self.at_wait()

    def record(self) -> Event:
        self.events.append(Event())
        return self.events[-1]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(devices, "wait_for_queued_work", made.wait)
    monkeypatch.setattr(devices, "record_event", made.record)
    return made


@pytest.fixture
def guard(device: Device) -> UpdateGuard:
    made = UpdateGuard()
    made.protect(True)
    return made


def interrupt(guard: UpdateGuard, seconds: float = NO_TIME) -> None:
    """What the thread that interrupts does before it breaks the collectives."""
    guard.request()
    guard.await_update(seconds)
    guard.break_results(seconds)


def test_an_update_begins_once_the_device_has_done_what_is_queued(guard: UpdateGuard, device: Device) -> None:
    guard.begin()
    guard.begin()  # the step of a second optimizer
    assert device.waits == 1
    assert guard.inside
    guard.complete()
    assert not guard.inside
    guard.begin()
    assert device.waits == 2


def test_a_process_whose_collectives_are_never_broken_does_not_wait(device: Device) -> None:
    guard = UpdateGuard()
    guard.begin()
    guard.complete()
    assert (device.waits, device.events) == (0, [])


def test_no_update_begins_behind_a_collective_that_was_broken_while_the_host_waited(
    guard: UpdateGuard, device: Device
) -> None:
    device.at_wait = lambda: interrupt(guard)
    with pytest.raises(RankShouldRestart):
        guard.begin()
    assert not guard.inside


def test_a_step_counts_if_the_device_had_completed_it(guard: UpdateGuard, device: Device) -> None:
    guard.begin()
    guard.complete()
    device.events[0].done = True
    interrupt(guard)
    assert guard.last_update_is_whole


def test_a_step_does_not_count_if_the_device_had_not_completed_it(guard: UpdateGuard, device: Device) -> None:
    guard.begin()
    guard.complete()
    interrupt(guard)
    device.events[0].done = True  # behind a collective of the script that was broken
    assert not guard.last_update_is_whole
    guard.reset()
    assert not guard.last_update_is_whole, "the next round must know"
    guard.begin()
    guard.complete()
    assert guard.last_update_is_whole, "another state is in place"


def test_the_device_gets_time_for_the_last_update(guard: UpdateGuard, device: Device) -> None:
    guard.begin()
    guard.complete()
    thread = threading.Thread(target=interrupt, args=(guard, LONG))
    thread.start()
    device.events[0].done = True
    thread.join()
    assert guard.last_update_is_whole


def test_an_update_that_has_begun_may_end_before_the_break(guard: UpdateGuard, device: Device) -> None:
    guard.begin()
    guard.request()
    assert guard.may_finish
    with pytest.raises(RankShouldRestart):
        guard.complete()
    assert guard.await_update(NO_TIME)
    device.events[0].done = True
    guard.break_results(NO_TIME)
    assert guard.last_update_is_whole


def test_an_update_that_ends_after_the_break_does_not_count(guard: UpdateGuard) -> None:
    guard.begin()
    guard.request()
    assert not guard.await_update(NO_TIME)
    guard.break_results(NO_TIME)
    assert not guard.may_finish, "the exception is not deferred any more"
    with pytest.raises(RankShouldRestart):
        guard.complete()
    assert not guard.last_update_is_whole


def test_nothing_is_used_that_the_device_has_done_after_a_request(guard: UpdateGuard) -> None:
    guard.check()
    guard.request()
    with pytest.raises(RankShouldRestart):
        guard.check()
    with pytest.raises(RankShouldRestart):
        guard.wait()


def test_a_step_does_not_count_if_the_device_cannot_tell(guard: UpdateGuard, device: Device) -> None:
    """An error of the device sticks, and a query is not allowed while the main thread captures a graph."""

    def fail() -> bool:
        raise RuntimeError("CUDA error")

    guard.begin()
    guard.complete()
    device.events[0].query = fail  # type: ignore[method-assign]
    interrupt(guard)
    assert not guard.last_update_is_whole


def test_a_signal_handler_of_the_script_may_use_the_guard(guard: UpdateGuard) -> None:
    """It may save the State while the main thread is in the guard."""
    with guard.in_main_thread():
        with guard.section():
            guard.check()
        assert guard.must_not_raise
    assert not guard.must_not_raise


def test_a_second_break_changes_nothing(guard: UpdateGuard, device: Device) -> None:
    guard.begin()
    guard.complete()
    device.events[0].done = True
    interrupt(guard)
    device.events[0].done = False
    guard.break_results(NO_TIME)
    assert guard.last_update_is_whole


def test_sections_are_nested(guard: UpdateGuard) -> None:
    guard.enter()
    guard.enter()
    guard.leave()
    assert guard.inside
    guard.leave()
    assert not guard.inside


def test_a_leave_after_the_end_of_all_does_not_count(guard: UpdateGuard) -> None:
    guard.enter()
    guard.leave_all()
    guard.leave()
    guard.enter()
    assert guard.inside


def test_a_wait_for_the_update_ends_with_it(guard: UpdateGuard) -> None:
    guard.begin()
    guard.request()
    ended: list[bool] = []
    thread = threading.Thread(target=lambda: ended.append(guard.await_update(LONG)))
    thread.start()
    guard.leave_all()
    thread.join()
    assert ended == [True]

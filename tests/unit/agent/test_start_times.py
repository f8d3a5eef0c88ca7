"""What starts and rounds take on a node, as it reports them."""

from __future__ import annotations

from collections.abc import Callable

from elasticjob._runtime.agent.monitoring.progress.start_times import StartTimes


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def times() -> tuple[StartTimes, Clock]:
    clock = Clock()
    return StartTimes(clock), clock


def at(*moments: float | None) -> Callable[[int], float | None]:
    return lambda local_rank: moments[local_rank]


def test_a_start_takes_until_its_last_process_calls_the_function() -> None:
    measured, clock = times()
    assert (measured.start_seconds, measured.form_seconds) == (None, None)
    measured.begin_round()
    measured.begin_start([0, 1])
    for local_rank, clock.now in ((0, 102.0), (1, 103.0), (1, 109.0)):
        measured.called(local_rank)
    assert measured.start_seconds == 3.0
    measured.ended(at(103.5, 103.2))
    assert measured.form_seconds == 0.2, "the rank that came last waited for none"


def test_a_process_that_stays_says_nothing_about_a_start_and_the_last_round_counts() -> None:
    measured, clock = times()
    measured.begin_round()
    measured.begin_start([0])
    clock.now = 102.0
    measured.called(0)
    measured.ended(at(102.3))
    clock.now = 200.0
    measured.begin_round()
    measured.begin_start([])
    clock.now = 207.0
    measured.called(0)
    measured.ended(at(207.1))
    assert (measured.start_seconds, measured.form_seconds) == (2.0, 0.1)
    measured.begin_round()
    measured.called(0)
    measured.ended(at(None))
    assert measured.form_seconds == 0.1, "no rank has come so far"


def test_a_script_that_does_not_reach_its_function_ahead_of_a_round_is_known() -> None:
    for reached in (True, False):
        measured, _ = times()
        assert measured.may_start_ahead
        if reached:
            measured.prestart_reached_function()
        measured.prestart_ended()
        assert measured.may_start_ahead is reached

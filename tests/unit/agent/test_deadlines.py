"""When the workers of a round must have ended: by the round, by the pod's grace period, or because the Node ends."""

from __future__ import annotations

import math

from elasticjob._runtime.agent.execution.deadlines import WorkerDeadlines


class Times:
    """A clock that the test sets, and what the workers know of their end."""

    def __init__(self) -> None:
        self.now = 100.0
        self.known = math.inf
        self.deadlines = WorkerDeadlines(lambda: self.now, self._publish)

    def _publish(self, at: float) -> None:
        self.known = at


def test_workers_know_the_earliest_of_their_ends() -> None:
    times = Times()
    times.deadlines.end_within(20.0)
    assert times.known == 120.0
    times.deadlines.end_within(30.0)
    assert times.known == 120.0, "a later end does not replace it"
    times.deadlines.node_ends_within(5.0)
    assert times.known == 105.0
    times.deadlines.node_ends_within(None)
    assert times.known == 120.0


def test_a_new_round_forgets_the_end_of_the_last_one_but_not_the_pods() -> None:
    times = Times()
    times.deadlines.end_within(20.0)
    times.deadlines.begin_round()
    assert times.known == math.inf
    times.deadlines.pod_ends_within(50.0)
    times.deadlines.begin_round()
    assert times.known == 150.0


def test_a_grace_period_ends_with_the_pods_but_is_never_shorter_than_asked_for() -> None:
    times = Times()
    assert times.deadlines.within_pod_grace(30.0, 1.0) == 30.0
    times.deadlines.pod_ends_within(10.0)
    times.deadlines.pod_ends_within(None)
    assert times.deadlines.within_pod_grace(30.0, 1.0) == 10.0
    times.now = 109.5
    assert times.deadlines.within_pod_grace(30.0, 1.0) == 1.0

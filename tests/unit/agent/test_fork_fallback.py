"""When forks are given up because workers fail as soon as they start."""

from __future__ import annotations

import pytest

from elasticjob._runtime.agent.start_workers.fork_fallback import AT_ONCE, ForkFallback, fails_at_once
from elasticjob._runtime.contract.messages import Failure, FailureClass


@pytest.mark.parametrize(
    ("starts", "use_exec"),
    [
        ("f", False),
        ("ff", True),
        ("frf", False),
        ("frff", True),
        ("ffR", True),
        ("ffRR", True),
        ("ffF", False),
        ("ffFffff", False),
        ("FFFF", False),
    ],
)
def test_two_forks_in_a_row_that_fail_at_once_make_the_next_start_use_exec(starts: str, use_exec: bool) -> None:
    """Each letter is one start: f failed at once, r ran; capitals are starts by exec."""
    fallback = ForkFallback()
    for start in starts:
        fallback = fallback.record_start(forked=start.islower(), failed_at_once=start in "fF")
    assert fallback.use_exec is use_exec


def failure(kind: FailureClass) -> Failure:
    return Failure(kind, "job-0-0", 0.0, rank=0)


@pytest.mark.parametrize(
    ("ended", "seconds", "made_step", "expected"),
    [
        (failure(FailureClass.USER_ERROR), 1.0, False, True),
        (failure(FailureClass.USER_ERROR), AT_ONCE + 1, False, False),
        (failure(FailureClass.USER_ERROR), 1.0, True, False),
        (failure(FailureClass.KILLED), 1.0, False, None),
        (failure(FailureClass.OOM_KILLED), 1.0, False, None),
        (failure(FailureClass.COLLECTIVE_FAILED), 1.0, False, None),
        (None, 1.0, False, False),
    ],
)
def test_which_ends_are_failures_at_once(
    ended: Failure | None, seconds: float, made_step: bool, expected: bool | None
) -> None:
    assert fails_at_once(ended, seconds, made_step=made_step) is expected

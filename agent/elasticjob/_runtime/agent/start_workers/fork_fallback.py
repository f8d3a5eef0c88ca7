"""Whether forks are to blame for workers that fail as soon as they start. Pure.

The self-test cannot find everything that a fork breaks, such as a library that keeps a GPU's state in a way of its own.
Without this, such a pod would use up the job's restarts. So after two forks in a row that failed at once the next start
is cold. If that fails at once as well, the program is to blame: workers are forks again, for good.
"""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob._runtime.contract.messages import Failure, FailureClass

AT_ONCE = 60.0
"""Seconds from the start: a program may import for long before it touches a GPU."""
FAILED_FORKS = 2
"""Starts in a row; one alone may be chance."""
FAILED_AT_ONCE = f"{FAILED_FORKS} starts in a row failed at once in forked workers"
COLD_REASON = f"{FAILED_AT_ONCE}; a start by exec shows whether the fork or the program is to blame"


@dataclass(frozen=True)
class ForkTrust:
    """What the starts of workers have shown of forks in this pod."""

    failed: int = 0
    """How many starts with forks in a row have failed at once."""
    cold: bool = False
    """Whether workers start by exec because of that."""
    acquitted: bool = False
    """Whether the same program has failed at once by exec too."""

    def record_start(self, *, forked: bool, failed_at_once: bool) -> ForkTrust:
        """Return the trust after one more start of which the outcome is known."""
        if self.acquitted or (self.cold and not failed_at_once):
            return self
        if not forked:
            return ForkTrust(acquitted=True) if self.cold else self
        failed = self.failed + 1 if failed_at_once else 0
        return ForkTrust(failed, cold=failed >= FAILED_FORKS)


def fails_at_once(failure: Failure | None, seconds: float, *, made_step: bool) -> bool | None:
    """Return whether a worker failed at once; None if its end says nothing of its start.

    `seconds`: the time since it started. A signal from outside, a failed peer and memory that ran out say nothing.
    """
    if failure is not None and failure.kind is not FailureClass.USER_ERROR:
        return None
    return failure is not None and seconds < AT_ONCE and not made_step

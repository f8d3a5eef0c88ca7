"""When workers that fail as soon as they start are started by exec instead of as forks. Pure.

The self-test cannot find everything that a fork breaks, such as a library that keeps a GPU's state in a way of its own.
Without this, such a pod would use up the job's restarts. So after two starts in a row whose forks crashed right away,
the next start uses exec. If that crashes right away too, the program is at fault, and workers are forks again for good.
"""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob._runtime.contract.messages import Failure, FailureClass

AT_ONCE = 60.0
"""Seconds from the start: a program may import for long before it touches a GPU."""
FAILED_FORKS = 2
"""Starts in a row; one alone may be chance."""
FAILED_AT_ONCE = f"{FAILED_FORKS} starts in a row failed at once in forked workers"
USE_EXEC_REASON = f"{FAILED_AT_ONCE}; a start by exec shows whether the fork or the program is to blame"


@dataclass(frozen=True)
class ForkFallback:
    """What the starts of workers have shown about forks in this pod."""

    failed: int = 0
    """How many starts with forks in a row have failed at once."""
    use_exec: bool = False
    """Whether workers start by exec because of that."""
    program_at_fault: bool = False
    """Whether the same program has failed at once by exec too."""

    def record_start(self, *, forked: bool, failed_at_once: bool) -> ForkFallback:
        """Return what is known after one more start whose outcome is known."""
        if self.program_at_fault or (self.use_exec and not failed_at_once):
            return self
        if not forked:
            return ForkFallback(program_at_fault=True) if self.use_exec else self
        failed = self.failed + 1 if failed_at_once else 0
        return ForkFallback(failed, use_exec=failed >= FAILED_FORKS)


def fails_at_once(failure: Failure | None, seconds: float, *, made_step: bool) -> bool | None:
    """Return whether a worker crashed right after starting; None: unrelated end (killed, out of memory, peer failure).

    `seconds`: the time since it started.
    """
    if failure is not None and failure.kind is not FailureClass.USER_ERROR:
        return None
    return failure is not None and seconds < AT_ONCE and not made_step

"""What ends a hang if the job has no hangPolicy and torch's own time-out is off, and the texts about it. Pure.

torch would end a process whose collective exceeds the time-out. In a process whose function can be called again,
`elasticjob.inprocess._restartable.timeout_guard` prevents that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from elasticjob._runtime.contract.restart_messages import Guarded

_CHOOSE = "set hangPolicy to choose the time without a step that ends it"


def without_steps(pod: str, seconds: float) -> str:
    """Return `status.hangGuard` of a job whose hangPolicy has nothing to watch. True for a late first step as well."""
    return (
        f"no worker in {pod} has reported a step in {seconds:g} s of the round, and hangPolicy watches a worker only "
        f"from its first step on. If the first step takes this long, wait for it. If the script reports no steps, call "
        f"elasticjob.progress(step), use the callback of your framework, or set logRules for the lines that it prints"
    )


@dataclass(frozen=True)
class HangGuard:
    """The guard of a pod's workers. Its time-out is the one of torch's process groups."""

    seconds: float
    by_collectives: bool
    """Whether the workers find overdue collectives themselves. If not, only missing steps show a hang."""

    @property
    def step_timeout(self) -> float:
        """Seconds without a step that are a hang; 0 if steps need not be watched."""
        return 0.0 if self.by_collectives else self.seconds

    @property
    def status(self) -> str:
        """`status.hangGuard`."""
        if self.by_collectives:
            return f"a collective that exceeds torch's time-out ({self.seconds:g} s) ends the round; {_CHOOSE}"
        return (
            f"no step for {self.seconds:g} s, torch's time-out of collectives, ends the round; with this version of "
            f"torch a script that reports no steps (elasticjob.progress, State) has no guard; {_CHOOSE}"
        )

    @property
    def cause(self) -> str:
        """Why the round ended, for the text of the failure."""
        what = "a collective has exceeded its time-out" if self.by_collectives else "no step"
        return f"{what} ({self.seconds:g} s, torch's, because spec.hangPolicy is not set)"


def guard_of(reports: Iterable[Guarded], *, hang_policy: bool) -> HangGuard | None:
    """Return the guard of a pod; None if it has none. `reports`: the last report of each of its workers.

    A hangPolicy is the user's choice, and replaces the guard.
    """
    found = list(reports)
    if hang_policy or not found:
        return None
    return HangGuard(min(r.seconds for r in found), all(r.by_collectives for r in found))

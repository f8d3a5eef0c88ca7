"""What a rule returns, and how its reason is worded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from elasticjob._runtime.contract.text import with_noun
from elasticjob._runtime.rendezvous.event_batch import Settled
from elasticjob._runtime.rendezvous.state import CoordinatorState, SendToAgent


@dataclass(frozen=True)
class RoundDecision:
    """The next state, the messages to send, and a reason for the log (empty when nothing changed)."""

    state: CoordinatorState
    effects: tuple[SendToAgent, ...] = ()
    reason: str = ""
    settled: Settled | None = None
    """For the next decision, if no rule had to run for this one."""

    def then(self, other: RoundDecision) -> RoundDecision:
        """Return this decision followed by one that was made on its state."""
        reason = "; ".join(r for r in (self.reason, other.reason) if r)
        return RoundDecision(other.state, self.effects + other.effects, reason)


Rule: TypeAlias = Callable[[CoordinatorState, float], "RoundDecision | None"]
"""Takes the state and the coordinator's monotonic time in seconds; returns None where the rule does not apply."""


def count_missing(missing: int, size: int) -> str:
    """Return "1 of 2 worker pods is missing", "2 of 4 worker pods are missing" and so on."""
    return f"{missing} of {with_noun(size, 'worker pod')} {'is' if missing == 1 else 'are'} missing"


def pod_names(pods: Iterable[str]) -> str:
    """Return the first three names, and how many more there are."""
    return _shorten(list(pods), 3, ", ")


def join_reasons(reasons: Sequence[str]) -> str:
    """Return the first ten reasons, and how many more there are."""
    return _shorten(reasons, 10, "; ")


def _shorten(items: Sequence[str], limit: int, separator: str) -> str:
    rest = f" and {len(items) - limit} more" if len(items) > limit else ""
    return separator.join(items[:limit]) + rest

"""What became of an event: a new state, what to tell whom, and a reason for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from elasticjob.rendezvous.state import CoordinatorState, SendToNode


@dataclass(frozen=True)
class RoundDecision:
    """What became of an event. `reason` is for people; empty when nothing changed."""

    state: CoordinatorState
    effects: tuple[SendToNode, ...] = ()
    reason: str = ""

    def then(self, other: RoundDecision) -> RoundDecision:
        """This decision followed by one made on its state."""
        reason = "; ".join(r for r in (self.reason, other.reason) if r)
        return RoundDecision(other.state, self.effects + other.effects, reason)


Rule: TypeAlias = Callable[[CoordinatorState, float], "RoundDecision | None"]
"""None where it does not apply. The float is the coordinator's monotonic clock, in seconds."""


def pod_names(pods: Iterable[str]) -> str:
    """Pod names for people: a few, then a count."""
    return _few(list(pods), 3, ", ")


def join_reasons(reasons: Sequence[str]) -> str:
    """Reasons for what happened at the same time: some, then a count."""
    return _few(reasons, 10, "; ")


def _few(listed: Sequence[str], most: int, separator: str) -> str:
    return separator.join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")

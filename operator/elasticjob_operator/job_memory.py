"""What the operator remembers of a job between two looks. All of it may be lost: it only saves work, noise and time."""

from __future__ import annotations

from dataclasses import dataclass, field

from elasticjob_operator.model.observed import Children, Refusal, RefusalReason

FIRST_RETRY = 1.0
LONGEST_RETRY = 20.0


@dataclass
class JobMemory:
    """Of one job, by uid."""

    uid: str
    children: Children | None = None
    children_at: float = 0.0
    """When they were looked at, Unix seconds."""
    minor_since: float | None = None
    """Since when a minor change of status waits to be written."""
    refusals: dict[str, Refusal] = field(default_factory=dict)
    _attempts: dict[str, int] = field(default_factory=dict)

    def record_refusal(self, child: str, reason: RefusalReason, message: str, now: float) -> None:
        """A child was certainly not made; it is tried again with growing delay."""
        count = self._attempts[child] = self._attempts.get(child, 0) + 1
        retry_at = now + min(LONGEST_RETRY, FIRST_RETRY * 2 ** (count - 1))
        self.refusals[child] = Refusal(reason, message, retry_at)

    def record_skipped(self, child: str, message: str, now: float) -> None:
        """A child was not tried, because something it needs was refused."""
        self.refusals.setdefault(child, Refusal(RefusalReason.POD_CREATION_FAILED, message, now + FIRST_RETRY))

    older_store_at: float | None = None
    """When a store that has a successor was last seen; or, until there is one, when this process first looked."""

    def record_created(self, child: str) -> None:
        """A child may exist now: from here on, its absence means that it is gone."""
        self.refusals.pop(child, None)
        self._attempts.pop(child, None)

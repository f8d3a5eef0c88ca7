"""State kept between reconciles of one job. A restarted operator starts without it: it only saves requests and time."""

from __future__ import annotations

from dataclasses import dataclass, field

from elasticjob_operator.model.observed import Children, Refusal, RefusalReason

FIRST_RETRY = 1.0
"""Seconds until the first retry of a refused creation; each further refusal doubles it."""
LONGEST_RETRY = 20.0


@dataclass
class JobMemory:
    """State kept between reconciles of one job, keyed by UID. Times are Unix seconds."""

    uid: str
    children: Children | None = None
    """Services and Secret as last read; None: read them at the next reconcile."""
    children_at: float = 0.0
    """When `children` was read."""
    minor_since: float | None = None
    """Since when a minor status change waits to be written; None: none waits."""
    refusals: dict[str, Refusal] = field(default_factory=dict)
    """Refused creations by child: the name of a pod, else `Kind/name`."""
    older_store_at: float | None = None
    """When the operator last saw a store that has a successor; before it sees one, when it first observed the job."""
    _attempts: dict[str, int] = field(default_factory=dict)

    def record_refusal(self, child: str, reason: RefusalReason, message: str, now: float) -> None:
        """Record that the API server refused to create a child; the delay before the next try doubles each time."""
        count = self._attempts[child] = self._attempts.get(child, 0) + 1
        retry_at = now + min(LONGEST_RETRY, FIRST_RETRY * 2 ** (count - 1))
        self.refusals[child] = Refusal(reason, message, retry_at)

    def record_skipped(self, child: str, message: str, now: float) -> None:
        """Record that a child was not tried, because the creation of one of its prerequisites failed."""
        self.refusals.setdefault(child, Refusal(RefusalReason.POD_CREATION_FAILED, message, now + FIRST_RETRY))

    def record_created(self, child: str) -> None:
        """Record that a child may exist: from now on the plan counts a missing one as lost."""
        self.refusals.pop(child, None)
        self._attempts.pop(child, None)

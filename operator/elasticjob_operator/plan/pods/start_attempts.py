"""Attempts to start the worker pods: how many failed in a row, when the next one is due, and when the job gives up.

An attempt fails if a pod of it ends before its agent has started workers, or if the kubelet evicts the pod for its own
use. Pods that fail together are one attempt: each pod carries the number of failed attempts at its creation, so the
count does not depend on the order in which the operator sees their ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from elasticjob_operator.backoff import doubling_delay
from elasticjob_operator.model.cluster.pods import Pod
from elasticjob_operator.plan.context import ReconcileContext
from elasticjob_operator.plan.pods.pod_decisions import did_not_start, is_own_failure

FIRST_START_RETRY = 10.0
"""Seconds until the next attempt after the first one that failed; each further failure doubles it."""
LONGEST_START_RETRY = 300.0


@dataclass(frozen=True)
class StartAttempts:
    """The counters of the next status."""

    failed: int
    """Attempts that failed in the job's life."""
    in_row: int
    """Attempts that failed since the last round started."""
    failed_at: float
    """When the last one failed, Unix seconds of the operator that saw it; 0 if none did."""
    new: Pod | None = None
    """A pod whose start failed; None unless it is the first one of its attempt."""

    @property
    def retry_at(self) -> float:
        """When pods that did not start are replaced, Unix seconds."""
        return self.failed_at + doubling_delay(FIRST_START_RETRY, LONGEST_START_RETRY, max(1, self.in_row))


def unchanged_starts(ctx: ReconcileContext) -> StartAttempts:
    """Return the counters of the last status."""
    seen = ctx.observed.start_failure_seen
    failed_at = ctx.status.last_start_failure if seen is None else seen
    return StartAttempts(ctx.status.failed_starts, ctx.status.start_failures, failed_at)


def plan_starts(ctx: ReconcileContext, *, new_round: bool) -> StartAttempts:
    """Return the counters after the ends of all pods; `new_round`: a round has started since the last status."""
    before = unchanged_starts(ctx)
    in_row = 0 if new_round else before.in_row
    new = [p for p in ctx.current_pods if _failed_before_a_round(p) and p.failed_starts >= before.failed]
    if not new:
        return StartAttempts(before.failed, in_row, before.failed_at)
    # Status keeps whole seconds.
    return StartAttempts(
        before.failed + 1, 0 if new_round else in_row + 1, math.floor(ctx.now), next(filter(did_not_start, new), None)
    )


def _failed_before_a_round(pod: Pod) -> bool:
    return did_not_start(pod) or (is_own_failure(pod) and pod.end is not None and pod.end.round is None)


def gives_up(ctx: ReconcileContext, starts: StartAttempts) -> Pod | None:
    """Return a pod whose start failed if too many attempts failed in a row, and the job is below its minimum without
    such pods; else None."""
    failed = [p for p in ctx.current_pods if did_not_start(p)]
    available = len(ctx.indices) - len(failed)
    if starts.in_row < ctx.spec.max_start_failures or available >= ctx.spec.min_replicas:
        return None
    return next(iter(failed), None)

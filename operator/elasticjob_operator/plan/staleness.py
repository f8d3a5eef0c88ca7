"""Which plans may be carried out by what the watches delivered, without reading the job and its pods first.

The watches may be late. A plan that only creates what status names, and counts what it sees, does no harm then: names
are unique, and a status write fails if the job has changed. A plan that charges, replaces, confirms or deletes
something by a late view would. An operator's own writes are never missing in its view.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elasticjob_operator.actions import (
    Action,
    AnswerEviction,
    CreateNodesService,
    CreateSecret,
    CreateStandbyStore,
    CreateStore,
    CreateStoreService,
    CreateWorker,
    WritePolicy,
)
from elasticjob_operator.model.cluster.raw import Raw, integer, objects, text
from elasticjob_operator.model.job.status import parse_status
from elasticjob_operator.model.observed import Observed
from elasticjob_operator.plan.reconcile import Plan

_CREATIONS = (CreateSecret, CreateNodesService, CreateStoreService, CreateStore, CreateStandbyStore, CreateWorker)
_DECISIONS = (
    "avoidedNodes",
    "backOff",
    "chargedOutages",
    "chargedRound",
    "cordonSpares",
    "executionAttempts",
    "failedStarts",
    "keyId",
    "lastFailure",
    "restarts",
    "restartsCountTowardsMax",
    "scaledDown",
    "suspectNodes",
    "uncountedOutages",
    "vacantIndices",
)
"""Status fields that record decisions; changing one from a stale cache could do harm."""


def needs_fresh_read(decided: Plan, observed: Observed) -> bool:
    """Return whether the job and its objects must be read from the API server before this plan is carried out.

    `observed` is what was planned by.
    """
    job = observed.job
    changed = decided.actions or job.generation != integer(job.status.raw, "observedGeneration")
    if changed and not (observed.children.known and observed.policies.known):
        return True
    if not all(map(_creates, decided.actions)):
        return True
    view = decided.operator_view
    if view is not None and (view.confirmed_request or (view.finish and not job.status.outcome_declared)):
        return True
    return decided.status is not None and _decides(job.status.raw, decided.status)


def _creates(action: Action) -> bool:
    """Return whether the action creates something, or reports only that the operator is at work."""
    if isinstance(action, AnswerEviction):
        return not action.completed
    return isinstance(action, _CREATIONS) or (isinstance(action, WritePolicy) and not action.policy.uid)


def _decides(before: Raw, after: Mapping[str, Any]) -> bool:
    if not before:
        return False  # the first status of a job: it has nothing yet that could be charged or replaced
    if any(before.get(name) != after.get(name) for name in _DECISIONS):
        return True
    old, new = parse_status(before), parse_status(after)
    moved = old.store_incarnation is not None and new.store_incarnation != old.store_incarnation
    replaced = new.incarnations[: len(old.incarnations)] != old.incarnations
    return moved or replaced or new.standby_store != old.standby_store is not None or _ends(after) != _ends(before)


def _ends(status: Mapping[str, Any]) -> list[str]:
    """Return which conditions of the job's end are True."""
    ends = ("SuccessCriteriaMet", "FailureTarget", "Complete", "Failed", "Suspended")
    conditions = objects(status, "conditions")
    return [text(c, "type") for c in conditions if text(c, "type") in ends and text(c, "status") == "True"]

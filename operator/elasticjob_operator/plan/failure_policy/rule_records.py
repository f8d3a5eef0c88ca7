"""Rules of failurePolicy.rules that match a failure: how status and Events show them, and which nodes they avoid."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, assert_never

from elasticjob._runtime.contract.failures.failure_rules import (
    FailureAction,
    FailureRule,
    describe_rule,
    first_match,
    shell_exit_code,
)
from elasticjob_operator.actions import EventRecord
from elasticjob_operator.model.cluster.pods import Pod
from elasticjob_operator.model.job.status import RULE_MATCHED, AvoidedNode
from elasticjob_operator.plan.context import ReconcileContext
from elasticjob_operator.plan.failure_policy.failures import describe_record


@dataclass(frozen=True)
class MatchedRule:
    """The name and the action of a rule that matched a failure."""

    name: str
    action: FailureAction


def matching_rule(rules: Iterable[FailureRule], pod: Pod, record: dict[str, Any]) -> MatchedRule | None:
    """Return the first rule that matches the end of a pod with this record; None if none does.

    A pod that Kubernetes ended has no exit code in its record: that of its agent says nothing about the program.
    """
    code = shell_exit_code(record.get("exitCode"), record.get("signal", ""))
    reasons = {record["class"], *([pod.end.reason] if pod.end else [])}
    rule = first_match(rules, code, reasons, pod.conditions)
    return None if rule is None else MatchedRule(rule.name, rule.action)


def with_rule(record: dict[str, Any], rule: MatchedRule) -> dict[str, Any]:
    """Return the record with the rule that decided on the failure."""
    return record | {"rule": rule.name, "action": rule.action.value}


def avoided_node(ctx: ReconcileContext, record: dict[str, Any], rule: MatchedRule) -> tuple[AvoidedNode, ...]:
    """Return the node of the pod that failed, if the rule wants new pods to avoid it; its name may be unknown."""
    if rule.action is not FailureAction.REPLACE_POD_AND_AVOID_NODE or not record.get("node"):
        return ()
    why = f"failurePolicy rule {rule.name} matched: {describe_record(record)}"
    # Status keeps whole seconds.
    return (AvoidedNode(record["node"], math.ceil(ctx.now), why, RULE_MATCHED, ctx.spec.avoid_node),)


def matched_event(outage: str, record: dict[str, Any], rule: MatchedRule) -> EventRecord:
    """Return the Event of a rule that matched a failure of this outage."""
    cause = describe_record(record)
    code = f"exit code {record.get('exitCode')}"
    code = f" ({code})" if "exitCode" in record and code not in cause else ""
    message = f"{describe_rule(rule.name)} matched: {cause}{code}; {_describe_consequence(rule.action)}"
    key = f"{rule.name}/{outage}/{record.get('pod', '')}"
    return EventRecord(RULE_MATCHED, message, key=key, warning=True)


def _describe_consequence(action: FailureAction) -> str:
    counted = "the workers restart, which counts towards maxRestarts"
    match action:
        case FailureAction.FAIL_JOB:
            return "the job fails"
        case FailureAction.RESTART_GROUP:
            return counted
        case FailureAction.REPLACE_POD:
            return f"a new pod replaces it and {counted}"
        case FailureAction.REPLACE_POD_AND_AVOID_NODE:
            return f"a new pod on another node replaces it and {counted}"
        case FailureAction.RESTART_GROUP_UNCOUNTED:
            return "the workers restart, which does not count towards maxRestarts"
        case FailureAction.IGNORE:
            return "the workers restart, which is not counted"
        case _:
            assert_never(action)

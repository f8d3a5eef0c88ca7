"""What the spec of a job of `rounds_world` says beyond its size and its budget, and what its rules must lead to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elasticjob._runtime.contract.failures.failure_rules import FailureAction
from elasticjob._runtime.contract.messages import RestartStrategy, SuccessPolicy

USER_ERROR = 2
"""The exit code of a worker at the move `exit`. At `fail` a signal ends it, and at `crash` its pod: exit code 137."""


@dataclass(frozen=True)
class RuleSet:
    """Rules as in a manifest, and what follows from each kind of failure: written by hand, not found by matching."""

    rules: Sequence[Mapping[str, Any]] = ()
    expected: Mapping[str, FailureAction] = field(default_factory=dict)
    """By move: `exit`, `fail`, `crash` or `collective`. No rule matches a kind that is missing."""


def _codes(name: str, action: FailureAction, operator: str, code: int) -> Mapping[str, Any]:
    return {"name": name, "action": action.value, "onExitCodes": {"operator": operator, "values": [code]}}


def _reason(name: str, action: FailureAction, reason: str) -> Mapping[str, Any]:
    return {"name": name, "action": action.value, "onReasons": [reason]}


RULE_SETS = {
    "": RuleSet(),
    "fail-job": RuleSet(
        (
            _codes("user-error", FailureAction.FAIL_JOB, "In", USER_ERROR),
            _codes("other", FailureAction.RESTART_GROUP_UNCOUNTED, "NotIn", 1),
        ),
        {
            "exit": FailureAction.FAIL_JOB,
            "fail": FailureAction.RESTART_GROUP_UNCOUNTED,
            "crash": FailureAction.RESTART_GROUP_UNCOUNTED,
        },
    ),
    "ignore": RuleSet(
        (
            _reason("killed", FailureAction.IGNORE, "Killed"),
            _codes("signal", FailureAction.FAIL_JOB, "In", 137),
        ),
        {"fail": FailureAction.IGNORE, "crash": FailureAction.FAIL_JOB},
    ),
    "count": RuleSet(
        (
            _codes("user-error", FailureAction.RESTART_GROUP, "In", USER_ERROR),
            _codes("signal", FailureAction.IGNORE, "In", 137),
            _reason("any-other", FailureAction.FAIL_JOB, "UserError"),
        ),
        {
            "exit": FailureAction.RESTART_GROUP,
            "fail": FailureAction.IGNORE,
            "crash": FailureAction.IGNORE,
        },
    ),
}
"""By name: the order of the rules matters in each."""


@dataclass(frozen=True)
class JobOptions:
    """Fields of the spec; the defaults are those of the CRD."""

    increment: int = 1
    window: int = 0
    """Seconds of the restart window; 0: all restarts count."""
    rules: str = ""
    """The name of a set of rules."""
    recreate: bool = False
    any_success: bool = False

    def apply(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Return the spec with these fields."""
        policy = spec["elasticPolicy"] | {"replicaIncrementStep": self.increment}
        rules = list(RULE_SETS[self.rules].rules)
        failures = spec["failurePolicy"] | {"restartWindowSeconds": self.window, "rules": rules}
        strategy = RestartStrategy.RECREATE if self.recreate else RestartStrategy.IN_PLACE
        success = SuccessPolicy.ANY if self.any_success else SuccessPolicy.ALL
        own = {"restartStrategy": strategy.value, "successPolicy": success.value}
        return spec | own | {"elasticPolicy": policy, "failurePolicy": failures}

    def action(self, move: str) -> FailureAction | None:
        """Return what must follow from a failure of this kind; None: what follows without rules."""
        return RULE_SETS[self.rules].expected.get(move)

    def counts(self, move: str) -> bool:
        """Return whether a failure of this kind counts towards maxRestarts."""
        return self.action(move) in (None, FailureAction.RESTART_GROUP)


PLAIN = JobOptions()
"""A job whose spec says nothing more."""

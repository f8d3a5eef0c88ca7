"""`spec.failurePolicy.rules`: what a job does about a failure that a rule matches. Pure.

The coordinator applies the rules to failures that agents report, the operator to pods that end.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class FailureAction(str, Enum):
    """What follows from a failure that a rule matches (`action`)."""

    FAIL_JOB = "FailJob"
    """The job fails at once, whatever is left of maxRestarts."""
    RESTART_GROUP = "RestartGroup"
    """All workers restart, and the restart counts towards maxRestarts: as without a rule."""
    REPLACE_POD = "ReplacePod"
    """As RESTART_GROUP, and a new pod replaces the one that failed, or whose worker did."""
    REPLACE_POD_AND_AVOID_NODE = "ReplacePodAndAvoidNode"
    """As REPLACE_POD, and new pods avoid the Node of that pod for avoidNodeSeconds."""
    RESTART_GROUP_UNCOUNTED = "RestartGroupAndIgnoreMaxRestarts"
    """All workers restart; `status.restarts` includes the restart, maxRestarts does not count it."""
    IGNORE = "Ignore"
    """All workers restart, and no counter includes the restart: as after a lost worker pod."""


UNCOUNTED_ACTIONS = frozenset({FailureAction.RESTART_GROUP_UNCOUNTED, FailureAction.IGNORE})
"""Actions after which maxRestarts does not limit how often the workers restart."""
REPLACING_ACTIONS = frozenset({FailureAction.REPLACE_POD, FailureAction.REPLACE_POD_AND_AVOID_NODE})
"""Actions after which the agent of the failed worker leaves the job, because its pod is replaced."""


LOG_RULES = "logRules/"
"""Beginning of the name of a log rule, where names of both kinds of rules may stand."""


def describe_rule(name: str) -> str:
    """Return which rule a name in a `RoundEnded` or in status means: one of failurePolicy, or a log rule."""
    return f"log rule {name.removeprefix(LOG_RULES)}" if name.startswith(LOG_RULES) else f"failurePolicy rule {name}"


class ExitCodeOperator(str, Enum):
    """How `values` of a rule select exit codes."""

    IN = "In"
    NOT_IN = "NotIn"


@dataclass(frozen=True)
class PodCondition:
    """Type and status of a pod's condition, such as `DisruptionTarget` and `True`."""

    type: str
    status: str = "True"


@dataclass(frozen=True)
class FailureRule:
    """One rule. It has exit codes, reasons or conditions, and matches a failure with one of them."""

    name: str
    action: FailureAction
    exit_codes: tuple[int, ...] = ()
    operator: ExitCodeOperator = ExitCodeOperator.IN
    reasons: tuple[str, ...] = ()
    """Reasons of ended containers, or values of `FailureClass`."""
    conditions: tuple[PodCondition, ...] = ()

    def matches(self, exit_code: int | None, reasons: Iterable[str], conditions: Iterable[PodCondition] = ()) -> bool:
        """Return whether a failure matches. `exit_code` is None if it left none; no rule for exit codes matches it."""
        if self.exit_codes:
            found = exit_code in self.exit_codes
            return exit_code is not None and found is (self.operator is ExitCodeOperator.IN)
        return not {*self.reasons}.isdisjoint(reasons) or not {*self.conditions}.isdisjoint(conditions)


def first_match(
    rules: Iterable[FailureRule],
    exit_code: int | None,
    reasons: Iterable[str],
    conditions: Iterable[PodCondition] = (),
) -> FailureRule | None:
    """Return the first rule that matches the failure; None if none does."""
    reasons, conditions = frozenset(reasons), frozenset(conditions)
    return next((rule for rule in rules if rule.matches(exit_code, reasons, conditions)), None)


def shell_exit_code(exit_code: int | None, signal_name: str) -> int | None:
    """Return the exit code, or 128 plus the number of the signal that ended the process, as Kubernetes reports it."""
    if exit_code is not None or signal_name not in signal.Signals.__members__:
        return exit_code
    return 128 + signal.Signals[signal_name].value


def parse_rules(raw: Any) -> tuple[FailureRule, ...]:
    """Return the rules of a spec that the API server, or the same schema, has validated; invalid ones are left out."""
    rules = []
    for item in raw if isinstance(raw, list) else ():
        try:
            rules.append(_parse_rule(item))
        except (AttributeError, KeyError, TypeError, ValueError):
            continue
    return tuple(rules)


def _parse_rule(raw: Mapping[str, Any]) -> FailureRule:
    codes = raw.get("onExitCodes", {})
    return FailureRule(
        name=str(raw["name"]),
        action=FailureAction(raw["action"]),
        exit_codes=tuple(map(int, codes.get("values", ()))),
        operator=ExitCodeOperator(codes.get("operator", ExitCodeOperator.IN)),
        reasons=tuple(map(str, raw.get("onReasons", ()))),
        conditions=tuple(PodCondition(c["type"], c.get("status", "True")) for c in raw.get("onPodConditions", ())),
    )

"""`spec.logRules`: what the agents look for in the output of workers, and what follows from it. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

from elasticjob._runtime.contract.log_rules.line_pattern import MAX_TABLE, LinePattern
from elasticjob._runtime.contract.log_rules.pattern_program import PatternError

STEP, TOTAL = "step", "total"
"""Names of the groups with the step that is done, and with the number of steps of the whole training."""
MAX_RULES = 8
MAX_CONDITIONS = 8
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_MAX_NAME = 63
_MAX_BOUND = 1e15
_MAX_SECONDS = 86400


class LogAction(str, Enum):
    """What follows once a condition is met (`conditions[].action`)."""

    EVENT = "Event"
    """It is only reported."""
    RESTART_GROUP = "RestartGroup"
    """All workers restart, as after a failure of the worker that has written the line."""
    FAIL_JOB = "FailJob"


class LocalRanks(str, Enum):
    """The ranks of a worker pod whose output is looked at (`localRanks`)."""

    ALL = "All"
    FIRST = "First"


class LogRuleError(ValueError):
    """A rule is refused. The message names it, and says what to write instead."""


@dataclass(frozen=True)
class LogCondition:
    """A condition on a metric. Exactly one of `not_finite`, `below` and `above` is given."""

    metric: str
    not_finite: bool = False
    below: float | None = None
    above: float | None = None
    for_seconds: float = 0.0
    """How long all values that a rank writes must be so."""
    action: LogAction = LogAction.EVENT

    def holds(self, value: float) -> bool:
        """Return whether a value is as the condition says."""
        if self.not_finite:
            return not math.isfinite(value)
        if self.below is not None:
            return value < self.below
        return self.above is not None and value > self.above

    def describe(self) -> str:
        """Return the condition in words, such as `below 100 for 60 s`."""
        bound = "not finite" if self.not_finite else f"below {self.below:g}" if self.below is not None else ""
        bound = bound or f"above {self.above:g}"
        return f"{bound} for {self.for_seconds:g} s" if self.for_seconds else bound


@dataclass(frozen=True)
class LogRule:
    """One rule: a pattern with named groups, and conditions on the metrics among them."""

    name: str
    pattern: str
    local_ranks: LocalRanks = LocalRanks.ALL
    conditions: tuple[LogCondition, ...] = ()


@lru_cache(maxsize=64)
def compile_rules(rules: tuple[LogRule, ...]) -> tuple[LinePattern, ...]:
    """Return the patterns of the rules; LogRuleError if one is refused. Together they have MAX_TABLE places."""
    return tuple(_compiled(rule, MAX_TABLE // len(rules)) for rule in rules)


def _compiled(rule: LogRule, max_table: int) -> LinePattern:
    try:
        pattern = LinePattern(rule.pattern, max_table)
    except PatternError as error:
        raise LogRuleError(f"log rule {rule.name}: {error}") from None
    if not pattern.groups:
        raise LogRuleError(
            rf"log rule {rule.name}: the pattern has no group with a name: write one, such as (?P<step>\d+)"
        )
    missing = next((c.metric for c in rule.conditions if c.metric not in pattern.groups), None)
    if missing is not None:
        raise LogRuleError(
            rf"log rule {rule.name}: the pattern has no group {missing!r} for its condition: write (?P<{missing}>\S+)"
        )
    return pattern


def decode_log_rules(raw: Any) -> tuple[LogRule, ...]:
    """Return the rules of a spec; LogRuleError if one is refused.

    The API server has checked the schema. What it cannot check is whether a pattern is possible.
    """
    if raw is None:
        return ()
    if not isinstance(raw, list) or len(raw) > MAX_RULES:
        raise LogRuleError(f"logRules must be a list of at most {MAX_RULES} rules")
    rules = tuple(_decode_rule(item) for item in raw)
    names = [rule.name for rule in rules]
    if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
        raise LogRuleError(f"log rule {twice}: two rules have this name: write another name for one of them")
    compile_rules(rules)
    return rules


def _decode_rule(raw: Any) -> LogRule:
    if not isinstance(raw, dict) or not isinstance(raw.get("name"), str) or not isinstance(raw.get("pattern"), str):
        raise LogRuleError("each of logRules needs a name and a pattern")
    name = raw["name"]
    if len(name) > _MAX_NAME or not _NAME.fullmatch(name):
        raise LogRuleError(f"log rule {name[:_MAX_NAME]!r}: write a name of a-z, 0-9 and '-' that starts with a letter")
    conditions = raw.get("conditions") or []
    if not isinstance(conditions, list) or len(conditions) > MAX_CONDITIONS:
        raise LogRuleError(f"log rule {name}: conditions must be a list of at most {MAX_CONDITIONS}")
    try:
        ranks = LocalRanks(raw.get("localRanks", LocalRanks.ALL.value))
        return LogRule(name, raw["pattern"], ranks, tuple(_decode_condition(item) for item in conditions))
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise LogRuleError(f"log rule {name}: {error}") from None


def _decode_condition(raw: Mapping[str, Any]) -> LogCondition:
    condition = LogCondition(
        metric=str(raw["metric"]),
        not_finite=raw.get("notFinite") is True,
        below=_number(raw, "below", _MAX_BOUND),
        above=_number(raw, "above", _MAX_BOUND),
        for_seconds=_number(raw, "forSeconds", _MAX_SECONDS) or 0.0,
        action=LogAction(raw.get("action", LogAction.EVENT.value)),
    )
    if sum((condition.not_finite, condition.below is not None, condition.above is not None)) != 1:
        raise ValueError("write exactly one of notFinite: true, below and above in each condition")
    return condition


def _number(raw: Mapping[str, Any], name: str, most: float) -> float | None:
    value = raw.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not -most <= value <= most:
        raise ValueError(f"{name} must be a number of at most {most:g}")
    return float(value)

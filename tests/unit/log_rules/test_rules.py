"""Rules of spec.logRules as a manifest has them."""

from __future__ import annotations

from typing import Any

import pytest

from elasticjob._runtime.contract.log_rules.rules import (
    LocalRanks,
    LogAction,
    LogCondition,
    LogRule,
    LogRuleError,
    compile_rules,
    decode_log_rules,
)

PATTERN = r"step (?P<step>\d+) loss (?P<loss>\S+)"


def rule(**fields: Any) -> dict[str, Any]:
    return {"name": "steps", "pattern": PATTERN} | fields


def test_a_rule_with_everything() -> None:
    conditions = [
        {"metric": "loss", "notFinite": True, "action": "RestartGroup"},
        {"metric": "loss", "above": 1, "forSeconds": 60},
    ]
    (found,) = decode_log_rules([rule(localRanks="First", conditions=conditions)])
    assert found == LogRule(
        "steps",
        PATTERN,
        LocalRanks.FIRST,
        (
            LogCondition("loss", not_finite=True, action=LogAction.RESTART_GROUP),
            LogCondition("loss", above=1.0, for_seconds=60.0),
        ),
    )


def test_rules_are_compiled_once() -> None:
    rules = decode_log_rules([rule()])
    assert compile_rules(rules) is compile_rules(decode_log_rules([rule()]))


@pytest.mark.parametrize("raw", [None, []])
def test_no_rules(raw: Any) -> None:
    assert decode_log_rules(raw) == ()


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ({}, "must be a list"),
        ([rule()] * 9, "at most 8 rules"),
        ([rule(), rule()], "log rule steps: two rules have this name"),
        ([{"name": "a"}], "needs a name and a pattern"),
        (["a"], "needs a name and a pattern"),
        ([rule(name="A b")], "write a name of a-z"),
        ([rule(pattern="step")], "no group with a name"),
        ([rule(pattern="(?P<step>")], "log rule steps: no regular expression of Python"),
        ([rule(localRanks="Last")], "log rule steps: 'Last'"),
        ([rule(conditions={})], None),
        ([rule(conditions="a")], "must be a list"),
        ([rule(conditions=[1])], "log rule steps"),
        ([rule(conditions=[{"metric": "los", "below": 1}])], r"no group 'los' .* write \(\?P<los>"),
        ([rule(conditions=[{"metric": "loss"}])], "exactly one of notFinite"),
        ([rule(conditions=[{"metric": "loss", "notFinite": False}])], "exactly one of notFinite"),
        ([rule(conditions=[{"metric": "loss", "below": 1, "above": 2}])], "exactly one of notFinite"),
        ([rule(conditions=[{"metric": "loss", "below": float("nan")}])], "below must be a number"),
        ([rule(conditions=[{"metric": "loss", "below": True}])], "below must be a number"),
        ([rule(conditions=[{"metric": "loss", "below": 1, "action": "Ignore"}])], "'Ignore' is not a valid"),
    ],
)
def test_mistakes(raw: Any, problem: str | None) -> None:
    if problem is None:
        decode_log_rules(raw)
        return
    with pytest.raises(LogRuleError, match=problem):
        decode_log_rules(raw)

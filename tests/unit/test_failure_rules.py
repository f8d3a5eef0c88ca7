"""Which rule of spec.failurePolicy.rules matches a failure."""

from __future__ import annotations

from typing import Any

import pytest

from elasticjob._runtime.contract import codec
from elasticjob._runtime.contract.failures.failure_rules import PodCondition, first_match, parse_rules, shell_exit_code
from elasticjob._runtime.contract.messages import RoundSettings


def rule(name: str, **criterion: Any) -> dict[str, Any]:
    return {"name": name, "action": "FailJob", **criterion}


RULES = [
    rule("two", onExitCodes={"operator": "In", "values": [2, 3]}),
    rule("oom", onReasons=["OOMKilled", "Hang"]),
    rule("drain", onPodConditions=[{"type": "DisruptionTarget"}, {"type": "Ready", "status": "False"}]),
    rule("rest", onExitCodes={"operator": "NotIn", "values": [1, 2]}),
]
DISRUPTED = PodCondition("DisruptionTarget", "True")


@pytest.mark.parametrize(
    ("code", "reasons", "conditions", "name"),
    [
        (2, {"OOMKilled"}, {DISRUPTED}, "two"),
        (137, {"OOMKilled"}, {DISRUPTED}, "oom"),
        (None, {"Killed", "Hang"}, set(), "oom"),
        (None, set(), {DISRUPTED}, "drain"),
        (None, set(), {PodCondition("DisruptionTarget", "False")}, None),
        (None, set(), {PodCondition("Ready", "False")}, "drain"),
        (137, {"Killed"}, set(), "rest"),
        (1, {"UserError"}, set(), None),
        (None, {"NodeLost"}, set(), None),
    ],
)
def test_the_first_rule_that_matches_applies(code: int | None, reasons: Any, conditions: Any, name: str | None) -> None:
    found = first_match(parse_rules(RULES), code, reasons, conditions)
    assert (found.name if found else None) == name


@pytest.mark.parametrize(
    ("code", "signal", "expected"),
    [(3, "", 3), (None, "SIGKILL", 137), (137, "SIGKILL", 137), (None, "", None), (None, "SIGNONE", None)],
)
def test_a_signal_has_the_exit_code_of_a_shell(code: int | None, signal: str, expected: int | None) -> None:
    assert shell_exit_code(code, signal) == expected


def test_rules_survive_the_wire() -> None:
    settings = RoundSettings(1, 2, 2, failure_rules=parse_rules(RULES))
    assert len(settings.failure_rules) == len(RULES)
    assert codec.parse(RoundSettings, codec.loads(codec.dumps(settings))) == settings


@pytest.mark.parametrize(
    "raw", [None, {}, [None], [{"name": "a"}], [rule("a", action="Count")], [rule("a", onExitCodes=3)]]
)
def test_what_no_api_server_accepts_is_no_rule(raw: Any) -> None:
    assert parse_rules(raw) == ()

"""Conditions as docs/reference lists them: each state is asserted in a test, and these have no other one."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elasticjob._runtime.contract.messages import FailureClass
from elasticjob_operator.model.job.status import ConditionType
from elasticjob_operator.model.observed import Observed, Refusal, RefusalReason
from support.operator.build import (
    NOW,
    condition,
    conditions_of,
    elastic,
    ended,
    failure,
    gathering,
    job,
    reasons_of,
    report,
    round_ended,
    run,
    status,
    steady,
    worker,
)
from support.operator.condition_table import DOCUMENTED, REFERENCE, undocumented

TESTS = Path(__file__).resolve().parents[2]
TRAINED = {"rendezvousRound": 1, "rendezvous": {"incarnation": 0, "standby": 1, "round": "1.0.1"}}


@functools.cache
def texts_of_tests() -> list[str]:
    """Return the text of each test function of the operator and of the cluster, with its decorators."""
    texts = []
    for folder in ("unit/operator", "e2e", "api_server"):
        for file in sorted((TESTS / folder).glob("test_*.py")):
            text = file.read_text()
            lines = text.splitlines()
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
                    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                    texts.append("\n".join(lines[first - 1 : node.end_lineno]))
    return texts


@pytest.mark.parametrize(("kind", "status_", "reason"), sorted(DOCUMENTED))
def test_one_test_names_the_condition_with_its_reason(kind: str, status_: str, reason: str) -> None:
    assert status_ in ("True", "False", "Unknown")
    assert any(f'"{kind}"' in text and f'"{reason}"' in text for text in texts_of_tests()), "no test has both"


def test_the_reference_says_what_each_value_of_each_condition_means() -> None:
    table = REFERENCE.read_text().split("| condition | True | False | Unknown | absent |", 1)[1].split("\n\n", 1)[0]
    meanings = dict(rows_by_condition(table))
    assert meanings.keys() == {kind for kind, _, _ in DOCUMENTED} >= {kind.value for kind in ConditionType}
    for kind, status_, _ in DOCUMENTED:
        column = ("True", "False", "Unknown").index(status_)
        assert meanings[kind][column] != "-", f"{kind} can be {status_}"
    for kind, cells in meanings.items():
        stated = {name for name, cell in zip(("True", "False", "Unknown"), cells, strict=True) if cell != "-"}
        assert stated == {status_ for other, status_, _ in DOCUMENTED if other == kind}


def rows_by_condition(table: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each condition with the cells of True, False and Unknown."""
    for line in table.splitlines()[2:]:
        names, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        yield from ((name, cells[:3]) for name in re.findall(r"`(\w+)`", names))


def test_a_condition_without_a_row_in_the_reference_is_found() -> None:
    written = {"conditions": [condition("Running", reason="WorldFormed"), condition("Running", reason="Other")]}
    assert undocumented(written, {}) == {("Running", "True", "Other")}
    assert undocumented(written, written) == set()
    assert undocumented({"conditions": [condition("OfALaterVersion")]}, {}) == set()


@pytest.mark.parametrize("reason", [RefusalReason.INVALID_SPEC, RefusalReason.NAME_TAKEN])
def test_a_refused_pod(reason: RefusalReason) -> None:
    refused = {"bert-1-0": Refusal(reason, "no", NOW + 5, NOW)}
    one = steady(workers=(worker(0),), last_report=report(worker(0)))
    trains = replace(one, job=job(status=status(**TRAINED), **elastic(1, 2, 2)), refusals=refused)
    assert reasons_of(run(trains))["Running"] == ("True", "WorldFormed")
    assert reasons_of(run(trains))["FullyScaled"] in {("False", "InvalidSpec"), ("False", "NameTaken")}
    assert reasons_of(run(trains))["FullyScaled"][1] == reason.value
    blocked = replace(one, refusals=refused, link=replace(one.link, report=gathering(worker(0))))
    assert reasons_of(run(blocked))["Running"] == ("False", reason.value)


def test_a_job_that_is_scaled_down() -> None:
    pods = tuple(worker(index) for index in range(3))
    known = status(incarnations="0,0,0", targetReplicas=3, **TRAINED)
    p = run(replace(steady(workers=pods, last_report=report(*pods)), job=job(status=known, **elastic(2, 3, 2))))
    assert reasons_of(p)["FullyScaled"] == ("False", "ScalingDown")


@pytest.mark.parametrize("suspended", [True, False], ids=["suspended", "finished"])
def test_a_job_that_does_not_run(suspended: bool) -> None:
    before = [condition("Restarting", reason="WorkerFailed"), condition("RendezvousReady", reason="StoreAvailable")]
    end = [] if suspended else [condition("SuccessCriteriaMet", reason="AllAgentsSucceeded")]
    known = status(conditions=[*before, *end], **TRAINED)
    pods = tuple(worker(index, **ended(0)) for index in range(2))
    found = reasons_of(run(Observed(job=job(status=known, suspend=suspended), workers=pods)))
    reason = "Suspended" if suspended else "Finished"
    assert {kind: found[kind] for kind in ("RendezvousReady", "Running", "FullyScaled")} == dict.fromkeys(
        ("RendezvousReady", "Running", "FullyScaled"), ("False", reason)
    )
    assert found["Restarting"] == ("False", "Suspended" if suspended else "WorldFormed")


def test_a_restart_because_a_node_is_unhealthy() -> None:
    unhealthy = failure("bert-0-0", kind=FailureClass.DEVICE_UNHEALTHY, exception="", signal="")
    rounds = (round_ended(1, failure=unhealthy),)
    pods = (worker(0), worker(1))
    observed = steady(workers=pods, last_report=gathering(*pods, ended_rounds=rounds))
    p = run(replace(observed, job=job(status=status(**TRAINED))))
    assert reasons_of(p)["Restarting"] == ("True", "DeviceUnhealthy")
    assert conditions_of(p)["Restarting"]["message"] != ""

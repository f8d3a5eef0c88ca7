"""docs/reference/ names what the product names, and each name of its tables is in a test."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import Counter
from prometheus_client.metrics import MetricWrapperBase

from elasticjob._runtime.contract.names import FINAL_EXCEPTIONS, Env
from elasticjob_operator import metrics, settings
from support.common.read_yaml import read_yaml

REPOSITORY = Path(__file__).resolve().parents[2]
REFERENCE = "\n".join(page.read_text() for page in sorted((REPOSITORY / "docs/reference").glob("*.md")))
OPERATOR = "".join(file.read_text() for file in (REPOSITORY / "operator").rglob("*.py"))
for shared in ("failures/failure_text", "names"):
    OPERATOR += (REPOSITORY / f"agent/elasticjob/_runtime/contract/{shared}.py").read_text()
TESTS = "".join(
    file.read_text()
    for folder in ("unit", "e2e", "integration", "support")
    for file in (REPOSITORY / "tests" / folder).rglob("*.py")
    if file != Path(__file__)
)
NAME = re.compile(r"`(\w+)`")


def rows(heading: str) -> Iterator[list[str]]:
    """Yield the cells of the rows of the first table below a heading, without its header."""
    section = REFERENCE.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    table = section.split("\n|", 1)[1].split("\n\n", 1)[0]
    for line in table.splitlines()[2:]:
        yield [cell.strip() for cell in line[1:-1].split("|")]


REASONS = {name for _, _, reasons, _ in rows("Conditions") for name in NAME.findall(reasons)}
CONDITIONS = {name for kinds, *_ in rows("Conditions") for name in NAME.findall(kinds)}
EVENTS = {name: kinds for names, kinds, _ in rows("Events") for name in NAME.findall(names)}
PHASES = {name for names, _ in rows("Phases") for name in NAME.findall(names)}


@pytest.mark.parametrize("name", sorted(REASONS | CONDITIONS | EVENTS.keys() | PHASES))
def test_a_name_in_status_or_events_is_in_the_operator_and_in_a_test(name: str) -> None:
    assert f'"{name}"' in OPERATOR
    assert re.search(rf"\b{name}\b", TESTS)


def test_the_reasons_that_the_operator_writes_are_documented() -> None:
    written = re.findall(r'\b[cC]ondition\(\s*(?:True|False|"\w+"),\s*"(\w+)"', OPERATOR)
    outcomes = re.findall(r'JobOutcome\(\s*(?:True|False),\s*"(\w+)"', OPERATOR)
    assert len(written) > 20
    assert len(outcomes) > 5
    assert {*written, *outcomes, *FINAL_EXCEPTIONS.values()} - REASONS == set()


def test_the_events_that_the_operator_records_are_documented() -> None:
    recorded = re.findall(r'EventRecord\(\s*"(\w+)"', OPERATOR)
    outcomes = re.findall(r'JobOutcome\(\s*False,\s*"(\w+)"', OPERATOR)
    assert len(recorded) > 15
    assert {*recorded, *outcomes} - EVENTS.keys() == set()


def test_each_field_of_the_status_is_documented() -> None:
    crd = read_yaml(REPOSITORY / "crds/elasticjobs.in.yaml")
    (version,) = crd["spec"]["versions"]
    status = version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
    assert [name for name in status if f"`{name}`" not in REFERENCE and f"`status.{name}`" not in REFERENCE] == []


def test_the_metrics_are_those_of_the_operator() -> None:
    found = {}
    for metric in vars(metrics).values():
        if isinstance(metric, MetricWrapperBase):
            name = next(iter(metric.describe())).name + ("_total" if isinstance(metric, Counter) else "")
            found[name] = set(metric._labelnames)
    documented = {
        name: set(NAME.findall(labels))
        for names, labels, _ in rows("Metrics of the operator")
        for name in NAME.findall(names)
    }
    assert found == documented


def test_the_flags_of_the_operator_are_documented() -> None:
    source = Path(settings.__file__).read_text()
    flags = re.findall(r'add(?:_argument)?\(\s*"(--[-a-z]+)"', source)
    assert len(flags) > 15
    assert [flag for flag in flags if flag != "--version" and f"`{flag}`" not in REFERENCE] == []


def test_the_variables_of_agents_and_stores_are_documented() -> None:
    names = [value for name, value in vars(Env).items() if name.isupper()]
    assert len(names) > 20
    assert [name for name in names if f"`{name}`" not in REFERENCE] == []

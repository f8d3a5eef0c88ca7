"""Each name that a person can meet in a job, a pod, a metric or a command has an entry in docs/reference.

The names are read from the code. test_reference.py checks the other direction, and the tables with several columns.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from elasticjob._runtime.contract.messages import FailureClass
from elasticjob._runtime.contract.names import ExitCode
from elasticjob.cli.arguments import command_parser
from elasticjob_operator.model.job.status import ConditionType
from elasticjob_operator.model.observed import RefusalReason

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
REFERENCE = "\n".join(page.read_text() for page in sorted((DOCS / "reference").glob("*.md")))
SOURCES = {
    path: path.read_text()
    for root in ("agent/elasticjob", "operator/elasticjob_operator")
    for path in sorted((REPOSITORY / root).rglob("*.py"))
}
VARIABLE = re.compile(
    r"(ELASTICJOB|PET|TORCHELASTIC|KUBEFLOW_TRAINER|NOTICE|METRICS|HEALTH)_[A-Z0-9_]*[A-Z0-9]"
    r"|ALLOW_SEPARATE_WORLDS|LOG_LEVEL|LOG_FORMAT|WATCH_NAMESPACES|TOPOLOGY_LABELS|NODE_WARNINGS"
)
NAME_OF_GROUP = re.compile(r"elasticjob\.dev/[a-z-]+")
IN_PODS = {"agent", "store"}
"""Verbs that only pods call; their options are variables."""


def texts() -> Iterator[str]:
    """Yield each constant text of the code."""
    for source in SOURCES.values():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)):
                yield node.value if isinstance(node.value, str) else node.value.decode("latin-1")


TEXTS = set(texts())
VARIABLES = sorted(text for text in TEXTS if VARIABLE.fullmatch(text))
NAMES_OF_GROUP = sorted(text for text in TEXTS if NAME_OF_GROUP.fullmatch(text))


def section(heading: str) -> str:
    return REFERENCE.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


@pytest.mark.parametrize("condition", [kind.value for kind in ConditionType])
def test_a_condition_has_an_entry(condition: str) -> None:
    assert f"`{condition}`" in section("Conditions")


@pytest.mark.parametrize("reason", [reason.value for reason in RefusalReason])
def test_a_reason_for_which_the_api_server_refuses_has_an_entry(reason: str) -> None:
    assert f"`{reason}`" in section("Conditions")


@pytest.mark.parametrize("failure", [kind.value for kind in FailureClass])
def test_a_failure_class_has_an_entry(failure: str) -> None:
    assert f"| `{failure}` |" in section("Failure classes")


@pytest.mark.parametrize("code", [int(code) for code in ExitCode])
def test_an_exit_code_has_an_entry(code: int) -> None:
    assert f"\n| {code} |" in section("Exit codes of the agent")


def test_variables_have_entries() -> None:
    assert len(VARIABLES) > 60
    assert [name for name in VARIABLES if not re.search(rf"`{name}[`=]", REFERENCE)] == []


def test_labels_and_annotations_have_entries() -> None:
    assert len(NAMES_OF_GROUP) > 2
    assert [name for name in NAMES_OF_GROUP if f"`{name}`" not in REFERENCE] == []


def test_the_metrics_of_an_agent_have_entries() -> None:
    sources = "\n".join(source for path, source in SOURCES.items() if "_runtime/agent/reporting" in str(path))
    names = set(re.findall(r"(?:\{_PREFIX\}|elasticjob_agent)(_[a-z_]+)", sources))
    documented = section("Metrics of an agent")
    assert len(names) > 6
    assert [name for name in sorted(names) if f"`elasticjob_agent{name}`" not in documented] == []


def leaves(values: object, path: str = "") -> Iterator[str]:
    if not isinstance(values, dict) or not values:
        yield path
        return
    for key, value in values.items():
        yield from leaves(value, f"{path}.{key}" if path else key)


def test_the_values_of_the_chart_have_entries() -> None:
    values = yaml.safe_load((REPOSITORY / "charts/elasticjob/values.yaml").read_text())
    documented = set(re.findall(r"^\| `([\w.]+)` \|", (DOCS / "reference/chart-values.md").read_text(), re.MULTILINE))
    missing = [path for path in leaves(values) if path not in documented and path.rpartition(".")[0] not in documented]
    assert missing == []


def verbs() -> dict[str, argparse.ArgumentParser]:
    parser = command_parser("elasticjob", "0")
    (choices,) = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(choices)


@pytest.mark.parametrize("verb", sorted(verbs()))
def test_a_verb_has_an_entry(verb: str) -> None:
    assert re.search(rf"`{verb}[` ]", (DOCS / "reference/cli.md").read_text())


@pytest.mark.parametrize("verb", sorted(verbs().keys() - IN_PODS))
def test_the_flags_of_a_verb_are_in_the_pages(verb: str) -> None:
    pages = "\n".join(page.read_text() for page in sorted(DOCS.rglob("*.md")) if "contribute" not in str(page))
    for action in verbs()[verb]._actions:
        spellings = [text for text in action.option_strings if text not in ("-h", "--help")]
        assert not spellings or any(re.search(rf"`?{text}\b", pages) for text in spellings), spellings

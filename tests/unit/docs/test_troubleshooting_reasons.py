"""docs/operate/troubleshooting.md has a section for each reason that tells a person of a trouble."""

from __future__ import annotations

import re

import pytest

from elasticjob._runtime.contract.messages import FailureClass
from elasticjob_operator.model.observed import RefusalReason
from support.cluster.kubectl import REPOSITORY
from support.operator.condition_table import DOCUMENTED

PAGE = (REPOSITORY / "docs/operate/troubleshooting.md").read_text()
EVENTS = (REPOSITORY / "docs/reference/conditions-and-events.md").read_text().partition("\n## Events\n")[2]
NAME = re.compile(r"`(\w+)`")
GOOD_WHEN_FALSE = {"Suspended", "Restarting", "ReconcileFailed", "Failed", "FailureTarget"}
ENDED = {"Finished", "Suspended"}
"""Reasons of conditions of a job that has ended or waits on purpose; `Suspended` has its own condition."""
QUESTIONS = [
    "My job is Pending",
    "It restarts again and again",
    "It hangs",
    "It is slower than before",
    "One rank's loss differs",
    "A pod is stuck Terminating",
    "The image cannot be pulled",
    "NCCL fails after a drain",
    "Where are the logs of the rank that failed yesterday?",
    "What do I attach to a bug report?",
]


def conditions() -> set[str]:
    """Return the reasons of conditions that are not as they should be. DOCUMENTED is held against the operator."""
    return {
        reason
        for kind, status, reason in DOCUMENTED
        if (status == "True") is (kind in GOOD_WHEN_FALSE) or status == "Unknown"
    } - ENDED


def warnings() -> set[str]:
    """Return the reasons of Events of type Warning."""
    found = set()
    for names, kinds in re.findall(r"^\| (`.+?) \| (Normal|Warning|Normal, Warning) \|", EVENTS, re.MULTILINE):
        found |= set(NAME.findall(names)[-1:] if "," in kinds else NAME.findall(names) if kinds == "Warning" else ())
    return found


def sections() -> dict[str, str]:
    """Return the section of each reason of the table."""
    table = PAGE.partition("## From a reason to its section")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+) \| \[(.+)\]\(#.+\) \|$", table, re.MULTILINE)
    return {name: section for names, section in rows for name in NAME.findall(names)}


CLASSES = {kind.value for kind in FailureClass}
REFUSALS = {reason.value for reason in RefusalReason}


@pytest.mark.parametrize("reason", sorted(conditions() | warnings() | CLASSES | REFUSALS))
def test_a_reason_of_a_trouble_has_a_section(reason: str) -> None:
    assert f"\n## {sections()[reason]}\n" in PAGE


def test_no_reason_of_the_table_is_unknown() -> None:
    assert set(sections()) - conditions() - warnings() - CLASSES - REFUSALS == set()


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_has_a_section_with_something_to_type_or_to_set(question: str) -> None:
    assert "`" in PAGE.split(f"\n## {question}\n")[1].split("\n## ")[0]

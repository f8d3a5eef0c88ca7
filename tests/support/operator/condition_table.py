"""The table of conditions in docs/reference/conditions-and-events.md: what programs may rely on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from elasticjob_operator.model.job.status import ConditionType

REFERENCE = Path(__file__).resolve().parents[3] / "docs/reference/conditions-and-events.md"
State = tuple[str, str, str]
"""Type, status and reason of a condition."""
_NAME = re.compile(r"`(\w+)`")
_KNOWN = {kind.value for kind in ConditionType}


def documented_conditions(reference: str) -> frozenset[State]:
    """Return the states in the first table below the heading Conditions of the text of that page."""
    section = reference.split("\n## Conditions\n", 1)[1].split("\n## ", 1)[0]
    return frozenset(_states(section.split("\n|", 1)[1].split("\n\n", 1)[0]))


def _states(table: str) -> Iterator[State]:
    kinds: list[str] = []
    for line in table.splitlines()[2:]:
        names, status, reasons, _ = (cell.strip() for cell in line[1:-1].split("|"))
        kinds = _NAME.findall(names) or kinds  # an empty cell: as in the row above
        yield from ((kind, status, reason) for kind in kinds for reason in _NAME.findall(reasons))


DOCUMENTED = documented_conditions(REFERENCE.read_text())


def documented_reason(kind: str, status: str) -> str:
    """Return a reason of a condition with this status; `R` if no row has one, as for a type of Kubernetes."""
    return min((state[2] for state in DOCUMENTED if state[:2] == (kind, status)), default="R")


def undocumented(status: Mapping[str, Any], before: Mapping[str, Any]) -> set[State]:
    """Return the states of conditions in a status that no row has. Those that it had before do not count, nor do types
    that this operator does not know."""
    return {state for state in _written(status) if state[0] in _KNOWN} - {*_written(before)} - DOCUMENTED


def _written(status: Mapping[str, Any]) -> Iterator[State]:
    conditions = status.get("conditions")
    for item in conditions if isinstance(conditions, list) else ():
        if isinstance(item, dict):
            yield str(item.get("type")), str(item.get("status")), str(item.get("reason"))

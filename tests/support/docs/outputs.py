"""Compare what a command prints with what a page shows. Pure.

A page shows one run, and the next run prints other times, addresses and suffixes of names. So these parts of a line are
compared by their form, and spaces by whether there are any. `...` stands for any text; on a line of its own, for any
lines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_CHANGING = [
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?Z?", "TIME"),
    (r"\b\d{1,3}(?:\.\d{1,3}){3}\b", "ADDRESS"),
    (r"(?<=elasticjob-)[0-9a-f]{8,10}-[a-z0-9]{5}\b", "SUFFIX"),
    (r"\b(?:\d+d)?(?:\d+h)?(?:\d+m)?\d+(?:\.\d+)?s\b|\b\d+[dhm]\b", "DURATION"),
    (r"\b\d+\.\d+ s\b", "DURATION"),
]
"""Expression of a part that is different in each run, and what it is compared as."""


def normal(line: str) -> str:
    """Return a line without what is different in each run."""
    for expression, name in _CHANGING:
        line = re.sub(expression, name, line)
    return re.sub(r"\s+", " ", line).strip()


def _matches(shown: str, printed: str) -> bool:
    pattern = ".*".join(re.escape(normal(part)) for part in shown.split("..."))
    return re.fullmatch(pattern.replace(r"\ ", r"\s*"), normal(printed)) is not None


def differences(shown: str, printed: str, *, some_lines: bool = False) -> list[str]:
    """Return the shown lines that are not printed, or where the printed text goes on otherwise; empty: they agree.

    With `some_lines`, the shown lines may come in any order and among others.
    """
    expected = [line for line in shown.splitlines() if line.strip()]
    lines = [line for line in printed.splitlines() if line.strip()]
    if some_lines:
        return [f"not printed: {line}" for line in expected if not any(_matches(line, other) for other in lines)]
    return [] if _in_order(expected, lines) else ["shown:", *expected, "printed:", *lines]


def _in_order(shown: Sequence[str], printed: Sequence[str]) -> bool:
    if not shown:
        return not printed
    if shown[0].strip() == "...":
        return any(_in_order(shown[1:], printed[skipped:]) for skipped in range(len(printed) + 1))
    return bool(printed) and _matches(shown[0], printed[0]) and _in_order(shown[1:], printed[1:])

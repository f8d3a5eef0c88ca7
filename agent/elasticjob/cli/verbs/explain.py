"""`elasticjob explain`: what a phase, a condition's reason, an Event or a class of failures means, and what to do.

`reasons.json` has the tables of the documentation; `make reasons` writes it. No cluster is asked.
"""

from __future__ import annotations

import difflib
import json
import textwrap
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import TypeAlias

from elasticjob.cli.views.output import VerbOutput
from elasticjob.cli.views.style import Painter

Explanation: TypeAlias = dict[str, str]
"""`name`, `kind` and `meaning`, and `do` if a person can do something about it."""
_WIDTH = 100


def show_explanation(output: VerbOutput, name: str) -> int:
    """Show what a name means; return 1 if no table has it."""
    found = explanations(name)
    if not found:
        names = sorted({item["name"] for item in all_explanations()})
        similar = difflib.get_close_matches(name, names, n=4, cutoff=0.4)
        hint = f"; did you mean {', '.join(similar)}?" if similar else f"; known are: {', '.join(names)}"
        output.note(f"elasticjob explain: no phase, reason, Event or failure class is called {name!r}{hint}")
        return 1
    output.show(found, lambda painter: _lines(found, painter))
    return 0


@cache
def all_explanations() -> tuple[Explanation, ...]:
    return tuple(json.loads(resources.files("elasticjob.cli").joinpath("reasons.json").read_text(encoding="utf-8")))


def explanations(name: str) -> list[Explanation]:
    """Return what is known about a name, whose case does not matter."""
    return [item for item in all_explanations() if item["name"].lower() == name.lower()]


def advice(name: str) -> str:
    """Return what to do about a reason; empty if there is nothing to say."""
    return next((item["do"] for item in explanations(name) if "do" in item), "")


def _lines(found: Sequence[Explanation], painter: Painter) -> list[str]:
    lines = []
    for item in found:
        lines.append(f"{painter.paint(item['name'], 'bold')}   {painter.paint(item['kind'], 'dim')}")
        lines += _wrapped(item["meaning"])
        if "do" in item:
            lines += _wrapped(f"What to do: {item['do']}")
    return lines


def _wrapped(text: str) -> list[str]:
    # A name such as elasticjob.dev/job-name=bert stays in one piece, so that a command can be copied.
    return textwrap.wrap(
        text, _WIDTH, initial_indent="  ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )

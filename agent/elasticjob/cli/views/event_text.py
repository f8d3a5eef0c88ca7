"""Events as lines of a table. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elasticjob.cli.views.style import Painter
from elasticjob.cli.views.table import text_table
from elasticjob.cli.views.times import age_text

_HEADER = ("AGO", "TYPE", "REASON", "OBJECT", "MESSAGE")


def event_lines(events: Sequence[Mapping[str, Any]], painter: Painter, now: float, *, with_header: bool) -> list[str]:
    """Return a line for each Event of `event_views`; none without Events."""
    rows = [_row(event, painter, now) for event in events]
    return text_table(_HEADER if with_header else (), rows) if rows else []


def history_lines(events: Sequence[Mapping[str, Any]], painter: Painter, now: float) -> list[str]:
    """Return the Events of one job without type and object: warnings are yellow."""
    rows = []
    for event in events:
        colour = ("yellow",) if event["type"] == "Warning" else ()
        text = " ".join(str(event.get("message", "")).split())
        rows.append((age_text(event.get("time"), now), painter.paint(event.get("reason", ""), *colour), text))
    return text_table((), rows, "  ")


def _row(event: Mapping[str, Any], painter: Painter, now: float) -> tuple[str, ...]:
    warning = event["type"] == "Warning"
    times = f" (x{event['count']})" if event.get("count") else ""
    text = " ".join(str(event.get("message", "")).split())
    return (
        age_text(event.get("time"), now),
        painter.paint(event["type"], *(("yellow",) if warning else ())),
        painter.paint(event.get("reason", ""), "bold"),
        event.get("object", ""),
        text + times,
    )

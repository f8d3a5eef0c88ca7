"""Tables of text, in the form of kubectl's."""

from __future__ import annotations

from collections.abc import Sequence

from elasticjob.cli.views.style import shown_width

_GAP = "   "


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "") -> list[str]:
    """Return the lines of a table. Every column is as wide as its widest cell; the last one is not filled up."""
    lines = [list(header), *map(list, rows)] if header else [list(row) for row in rows]
    if not lines:
        return []
    widths = [max(shown_width(line[column]) for line in lines) for column in range(len(lines[0]))]
    return [indent + _row(line, widths) for line in lines]


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    filled = [cell + " " * (width - shown_width(cell)) for cell, width in zip(cells, widths, strict=True)]
    return _GAP.join(filled).rstrip()

"""Draw mermaid's sequence diagrams as SVG, so that the site needs no script from another host. Pure.

GitHub draws the same blocks by itself. The part of the language that our pages use: `participant A as name`,
`A->>B: text`, `A--xB: text` (lost), `A->>A: text` and `Note over A,B: text`. Colours are those of the theme.
"""

from __future__ import annotations

import re
import textwrap
from html import escape

_ARROW = re.compile(r"(.+?)\s*(->>|--x)\s*(.+?):\s*(.+)")
_NOTE = re.compile(r"Note over ([^:]+):\s*(.+)")
_PARTICIPANT = re.compile(r"participant (\w+)(?: as (.+))?")
_BLOCK = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_WIDTH, _TOP, _LINE = 760, 56, 16
_INK, _SOFT = "var(--md-default-fg-color)", "var(--md-default-fg-color--lighter)"


def with_pictures(markdown: str) -> str:
    """Return a page with each block of mermaid replaced by a picture; raise ValueError for what has no rule here."""
    return _BLOCK.sub(lambda match: f'<div class="sequence">{picture(match[1])}</div>', markdown)


def picture(source: str) -> str:
    """Return the SVG of a sequence diagram, on one line: a blank line would end the block of HTML in a page."""
    first, *lines = [line.strip() for line in source.strip().splitlines()]
    if first != "sequenceDiagram":
        raise ValueError(f"only sequenceDiagram is drawn, and not {first}")
    names, steps = _read([line for line in lines if line])
    gap = _WIDTH / len(names)
    at = {key: gap * (number + 0.5) for number, key in enumerate(names)}
    shapes, y = [], _TOP
    for step in steps:
        y = _draw(shapes, step, at, gap, y)
    for key, name in names.items():
        shapes.insert(0, f'<path d="M{at[key]:.0f} 36V{y}" stroke="{_SOFT}" stroke-dasharray="4 4"/>')
        shapes.append(_text(at[key], 24, [name], bold=True))
    head = f'<svg viewBox="0 0 {_WIDTH} {y + 8}" role="img" style="max-width:{_WIDTH}px;width:100%" fill="none">'
    return "".join([head, *shapes, "</svg>"])


def _read(lines: list[str]) -> tuple[dict[str, str], list[tuple[str, str, str, str]]]:
    """Return the names of the participants by key, and the steps: kind, from, to, text."""
    names: dict[str, str] = {}
    steps = []
    for line in lines:
        if match := _PARTICIPANT.fullmatch(line):
            names[match[1]] = match[2] or match[1]
        elif match := _NOTE.fullmatch(line):
            over = [key.strip() for key in match[1].split(",")]
            steps.append(("note", over[0], over[-1], match[2]))
        elif match := _ARROW.fullmatch(line):
            steps.append((match[2], match[1], match[3], match[4]))
        else:
            raise ValueError(f"a line of a sequence diagram has no rule: {line}")
        for key in steps[-1][1:3] if steps else ():
            names.setdefault(key, key)
    return names, steps


def _draw(shapes: list[str], step: tuple[str, str, str, str], at: dict[str, float], gap: float, y: int) -> int:
    """Add a step below y, and return where the next one begins."""
    kind, source, target, text = step
    left, right = sorted((at[source], at[target]))
    if kind == "note":
        left, right = max(left - gap / 2 + 8, 4), min(right + gap / 2 - 8, _WIDTH - 4)
        words = _wrapped(text, right - left - 12)
        height = _LINE * len(words) + 10
        shapes.append(
            f'<rect x="{left:.0f}" y="{y}" width="{right - left:.0f}" height="{height}" rx="4" fill="{_SOFT}"'
            f' fill-opacity=".25" stroke="{_SOFT}"/>'
        )
        shapes.append(_text((left + right) / 2, y + 17, words))
        return y + height + 14
    if source == target:
        words = _wrapped(text, min(gap * 1.4, _WIDTH - left) - 30)
        height = max(_LINE * len(words), 22)
        shapes.append(f'<path d="M{left:.0f} {y}h16v{height}h-13" stroke="{_INK}"/>')
        shapes.append(_head(left, y + height, -1))
        shapes.append(_text(left + 24, y + 12, words, anchor="start"))
        return y + height + 18
    words = _wrapped(text, max(right - left - 12, 90))
    y += _LINE * len(words)
    way = 1 if at[target] > at[source] else -1
    end = at[target] - (way * gap * 0.25 if kind == "--x" else 0)
    dash = ' stroke-dasharray="6 4"' if kind == "--x" else ""
    shapes.append(f'<path d="M{at[source]:.0f} {y}H{end:.0f}" stroke="{_INK}"{dash}/>')
    shapes.append(_text((left + right) / 2, y - _LINE * len(words) + 11, words))
    shapes.append(_cross(end, y) if kind == "--x" else _head(end, y, way))
    return y + 18


def _wrapped(text: str, width: float) -> list[str]:
    return textwrap.wrap(text, max(int(width / 6.6), 8))


def _text(x: float, y: float, lines: list[str], *, anchor: str = "middle", bold: bool = False) -> str:
    weight = ' font-weight="700"' if bold else ""
    rows = "".join(
        f'<tspan x="{x:.0f}" y="{y + number * _LINE:.0f}">{escape(line)}</tspan>' for number, line in enumerate(lines)
    )
    return f'<text fill="{_INK}" font-size="13" text-anchor="{anchor}"{weight}>{rows}</text>'


def _head(x: float, y: float, way: int) -> str:
    return f'<path d="M{x:.0f} {y}l{-8 * way} -4v8z" fill="{_INK}"/>'


def _cross(x: float, y: float) -> str:
    return f'<path d="M{x - 5:.0f} {y - 5}l10 10m0 -10l-10 10" stroke="{_INK}" stroke-width="2"/>'

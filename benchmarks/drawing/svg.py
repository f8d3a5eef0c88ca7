"""A small SVG builder. Pictures have a ground of their own, light or dark as the reader's system is. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_STYLE = """
.ground{fill:#ffffff}.text{fill:#1f2937}.faint{fill:#6b7280}.line{stroke:#6b7280}.box{fill:#f3f4f6;stroke:#9ca3af}
.blue{fill:#bfdbfe;stroke:#2563eb}.green{fill:#bbf7d0;stroke:#16a34a}.red{fill:#fecaca;stroke:#dc2626}
.amber{fill:#fde68a;stroke:#d97706}.violet{fill:#ddd6fe;stroke:#7c3aed}.grey{fill:#e5e7eb;stroke:#9ca3af}
.tip{fill:#6b7280}
@media (prefers-color-scheme: dark){
.ground{fill:#1e2129}.text{fill:#e5e7eb}.faint{fill:#9ca3af}.line{stroke:#9ca3af}.box{fill:#2b303b;stroke:#6b7280}
.blue{fill:#1e3a8a;stroke:#60a5fa}.green{fill:#14532d;stroke:#4ade80}.red{fill:#7f1d1d;stroke:#f87171}
.amber{fill:#78350f;stroke:#fbbf24}.violet{fill:#4c1d95;stroke:#a78bfa}.grey{fill:#374151;stroke:#6b7280}
.tip{fill:#9ca3af}}
"""
_FONT = "font-family='system-ui,-apple-system,Segoe UI,Roboto,DejaVu Sans,sans-serif'"


class Picture:
    """Collects shapes; `text()` is the file. Lengths are pixels, and y grows downwards."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size = (width, height)
        self._title = title
        self._shapes: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, colour: str = "box", radius: float = 6) -> None:
        """Add a rectangle in one of the colours of the style."""
        self._shapes.append(
            f"<rect class='{colour}' x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='{radius:g}'/>"
        )

    def label(
        self, x: float, y: float, text: str, *, anchor: str = "start", size: int = 14, faint: bool = False,
        bold: bool = False,
    ) -> None:  # fmt: skip
        """Add a line of text whose baseline is at y; `anchor`: start, middle or end."""
        weight = " font-weight='600'" if bold else ""
        self._shapes.append(
            f"<text class='{'faint' if faint else 'text'}' x='{x:g}' y='{y:g}' font-size='{size}'"
            f" text-anchor='{anchor}'{weight}>{escape(text)}</text>"
        )

    def note(self, y: float, *lines: str) -> None:
        """Add lines below a diagram, from its left edge on; y is the first baseline."""
        for number, line in enumerate(lines):
            self.label(20, y + 19 * number, line, size=13)

    def titled_box(
        self, x: float, y: float, width: float, height: float, lines: Sequence[str], colour: str = "box"
    ) -> None:
        """Add a box with centred lines, the first of them bold."""
        self.box(x, y, width, height, colour)
        top = y + height / 2 - (len(lines) - 1) * 9 + 5
        for number, line in enumerate(lines):
            self.label(
                x + width / 2, top + 18 * number, line, anchor="middle", size=14 if number == 0 else 12,
                bold=number == 0, faint=number > 0,
            )  # fmt: skip

    def line(
        self, x1: float, y1: float, x2: float, y2: float, *, arrow: bool = False, dashed: bool = False,
        weak: bool = False,
    ) -> None:  # fmt: skip
        """Add a line, with an arrow at its second end if asked; `weak`: as a grid behind text."""
        dash = (" stroke-dasharray='5 4'" if dashed else "") + (" stroke-opacity='0.35'" if weak else "")
        tip = " marker-end='url(#tip)'" if arrow else ""
        self._shapes.append(
            f"<line class='line' x1='{x1:g}' y1='{y1:g}' x2='{x2:g}' y2='{y2:g}' stroke-width='1.5'{dash}{tip}/>"
        )

    def text(self) -> str:
        """Return the file."""
        width, height = self._size
        tip = (
            "<defs><marker id='tip' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='8' markerHeight='8' orient='auto'>"
            "<path class='tip' d='M0 0 8 4 0 8z'/></marker></defs>"
        )
        head = (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}'"
            f" role='img' {_FONT}>"
        )
        parts = [head, f"<title>{escape(self._title)}</title>", f"<style>{_STYLE}</style>", tip]
        ground = f"<rect class='ground' width='{width}' height='{height}' rx='10'/>"
        return "\n".join([*parts, ground, *self._shapes, "</svg>\n"])

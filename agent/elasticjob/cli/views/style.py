"""Colours, only on a terminal whose user has not turned them off."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TextIO

_CODES = {
    "bold": "1",
    "dim": "2",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "blue": "34",
    "magenta": "35",
    "cyan": "36",
}
RANK_COLOURS = ("cyan", "green", "yellow", "blue", "magenta")
"""In turn, so that neighbours differ. Red is for failures."""
_ESCAPE = re.compile("\x1b\\[[0-9;]*m")


class Painter:
    """Paints text; without `colour` it returns the text as it is."""

    def __init__(self, colour: bool) -> None:
        self.colour = colour

    def paint(self, text: str, *styles: str) -> str:
        """Return the text in these styles, such as `bold` and `red`."""
        if not self.colour or not text or not styles:
            return text
        return f"\x1b[{';'.join(_CODES[style] for style in styles)}m{text}\x1b[0m"

    def of_rank(self, text: str, rank: int) -> str:
        """Return the text in the colour of a rank."""
        return self.paint(text, RANK_COLOURS[rank % len(RANK_COLOURS)])


def wants_colour(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Return whether colours may be written: NO_COLOR is empty, and the stream is a terminal that shows them."""
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM", "") not in ("", "dumb")


def shown_width(text: str) -> int:
    """Return how many columns a text takes on a terminal."""
    return len(_ESCAPE.sub("", text))

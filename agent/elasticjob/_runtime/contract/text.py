"""Texts and numbers in messages for users."""

from __future__ import annotations

import re

_NOT_PRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except for tab and newline, those that reverse a line, and halves of surrogate pairs."""


def printable(text: str) -> str:
    r"""Return the text of a worker or a peer as one that a terminal may show: `\x1b` for the character ESC."""
    return _NOT_PRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def with_noun(number: int, noun: str) -> str:
    """Return the number with its noun, which takes an s in the plural: "1 node", "2 nodes"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def describe_speed(size: int, seconds: float) -> str:
    """Return how fast so many bytes came, such as `1.25 GB in 0.500 s (2.50 GB/s)`; units are decimal."""
    unit, factor = next(((u, f) for u, f in (("GB", 1e9), ("MB", 1e6)) if size >= f), ("kB", 1e3))
    return f"{size / factor:.3g} {unit} in {seconds:.3f} s ({size / seconds / 1e9:.2f} GB/s)"

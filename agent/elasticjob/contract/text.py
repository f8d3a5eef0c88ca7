"""Numbers in messages for users."""

from __future__ import annotations


def with_noun(number: int, noun: str) -> str:
    """Return the number with its noun, which takes an s in the plural: "1 node", "2 nodes"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

"""Numbers in messages for users."""

from __future__ import annotations


def with_noun(number: int, noun: str) -> str:
    """Return the number with its noun, which takes an s in the plural: "1 node", "2 nodes"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def describe_speed(size: int, seconds: float) -> str:
    """Return how fast so many bytes came, such as `1.25 GB in 0.500 s (2.50 GB/s)`; units are decimal."""
    unit, factor = next(((u, f) for u, f in (("GB", 1e9), ("MB", 1e6)) if size >= f), ("kB", 1e3))
    return f"{size / factor:.3g} {unit} in {seconds:.3f} s ({size / seconds / 1e9:.2f} GB/s)"

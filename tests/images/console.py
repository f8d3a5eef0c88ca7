"""Progress on screen, and the error that ends a build."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


class ImageError(Exception):
    """An image cannot be built; the message says why and what to do."""


def say(text: str) -> None:
    """One line of progress, at once."""
    print(f"[images] {text}", file=sys.stderr, flush=True)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Say that the block begins, and how long it took."""
    say(f"{name} ...")
    began = time.monotonic()
    yield
    say(f"{name}: {time.monotonic() - began:.1f} s")

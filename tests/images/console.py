"""Progress on standard error, and the error that ends a build."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


class ImageError(Exception):
    """An image cannot be built; the message says why and what to do."""


def progress(text: str) -> None:
    """Print one line of progress, unbuffered."""
    print(f"[images] {text}", file=sys.stderr, flush=True)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Print when the block begins, and its duration when it ends."""
    progress(f"{name} ...")
    began = time.monotonic()
    yield
    progress(f"{name}: {time.monotonic() - began:.1f} s")

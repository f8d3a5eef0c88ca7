"""Progress on standard error."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


def progress(text: str) -> None:
    """Print one line of progress, unbuffered."""
    print(f"[cluster] {text}", file=sys.stderr, flush=True)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Print the name and the duration of the block when it ends without an error."""
    began = time.monotonic()
    yield
    progress(f"{time.monotonic() - began:5.1f} s  {name}")

"""Progress on screen: what is being done, and how long it took."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


def say(text: str) -> None:
    """One line of progress, at once."""
    print(f"[cluster] {text}", file=sys.stderr, flush=True)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Times the block and says its name and seconds when it ends well."""
    began = time.monotonic()
    yield
    say(f"{time.monotonic() - began:5.1f} s  {name}")

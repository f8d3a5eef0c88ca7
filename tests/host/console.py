"""Progress on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Console:
    """The progress of one part, such as `cluster`."""

    part: str

    def progress(self, text: str) -> None:
        """Print one line of progress, unbuffered and whole, because parts may print at the same time."""
        sys.stderr.write(f"[{self.part}] {text}\n")
        sys.stderr.flush()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Print when the block begins, and its duration when it ends without an error."""
        self.progress(f"{name} ...")
        began = time.monotonic()
        yield
        self.progress(f"{time.monotonic() - began:5.1f} s  {name}")

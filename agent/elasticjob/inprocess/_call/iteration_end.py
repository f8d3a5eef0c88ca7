"""How an iteration has ended on this rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class IterationCompleted:
    """All ranks have completed the iteration."""

    value: Any


@dataclass(frozen=True)
class IterationInterrupted:
    """The iteration is to be restarted."""

    error: Exception | None
    """What this rank's function raised."""

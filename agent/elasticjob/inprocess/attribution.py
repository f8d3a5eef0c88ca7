"""Why an iteration was interrupted, as ranks record it in the store."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Interruption(Enum):
    """Kinds of interruptions."""

    EXCEPTION = "exception"
    """The function, or a hook before it, raised an `Exception`."""
    BASE_EXCEPTION = "base exception"
    """It raised another exception, and the rank leaves."""
    SOFT_TIMEOUT = "soft time-out"
    """The rank made no progress within the soft time-out."""
    HARD_TIMEOUT = "hard time-out"
    """The rank made no progress within the hard time-out, and its monitor process ends it."""
    TERMINATED = "terminated"
    """The rank's process has ended."""
    UNRESPONSIVE = "unresponsive"
    """The rank's monitor process sends no heartbeats: its node is lost, or cut off."""
    MONITOR_PROCESS = "monitor process"
    """The rank's monitor process has ended; the next iteration begins with a new one."""
    MONITOR_PROCESS_EXCEPTION = MONITOR_PROCESS
    """The same under its name in NVIDIA's wrapper."""


@dataclass(frozen=True)
class InterruptionRecord:
    """One rank's interruption. `rank` is the rank in the iteration that was interrupted."""

    rank: int
    interruption: Interruption

    def encode(self) -> str:
        return json.dumps([self.rank, self.interruption.value]) + "\n"


def decode_records(text: str) -> tuple[InterruptionRecord, ...]:
    """Return the records in a text of encoded ones, each once."""
    values: Iterable[tuple[int, str]] = (json.loads(line) for line in text.splitlines())
    return tuple(dict.fromkeys(InterruptionRecord(rank, Interruption(kind)) for rank, kind in values))

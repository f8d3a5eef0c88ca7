"""What a worker and its agent share while a round runs: one socket to meet at, one page of memory for each worker.

A worker connects to the socket that its environment names and says `local rank, round` as JSON. It gets one byte and
descriptors: its page, then whatever memory the agent keeps for the node. From then on the agent sends a byte whenever
it has moved LIMIT; a worker sends nothing more: it writes its words, which wakes nobody.

Every word has one writer and is written whole (aligned, 8 bytes).
"""

from __future__ import annotations

import mmap
from enum import IntEnum

PAGE_SIZE = mmap.PAGESIZE


class PageWord(IntEnum):
    """Index of each 64-bit word of a page."""

    STEP = 0
    """Worker: the latest step that it reported, NO_STEP before the first."""
    TIME = 1
    """Worker: when that was, in nanoseconds of CLOCK_MONOTONIC, which all processes of a host share."""
    LIMIT = 2
    """Agent: reports below it return at once. A report of this step or a later one stops the worker, but for HOLD."""
    STOPPED = 3
    """Worker: 1 once it has stopped at LIMIT and saved what it wanted to save; whatever follows is its end."""

    HEARTBEATS = 4
    """Worker: steps of its optimizers so far, for scripts that report none themselves."""
    HEARTBEAT_TIME = 5
    """Worker: when the last of them was, as TIME."""
    ENDING = 6
    """Worker: 1 once its program is over and Python cleans up, which may take its time."""
    OWN = 7
    """Worker: nanoseconds so far in which it waited for no other rank (training.own_time); 0 where nobody knows."""


NO_STEP = -1
NO_LIMIT = (1 << 63) - 1
HOLD = -1
"""A LIMIT that is not known yet: whoever reports waits for the byte that says that it is."""


def open_page(descriptor: int) -> memoryview:
    """The words of a page."""
    return memoryview(mmap.mmap(descriptor, PAGE_SIZE)).cast("q")

"""Memory that a worker and its agent share during a round: one page for each worker, of 64-bit words.

How they meet: the worker connects to the Unix socket that `Env.AGENT_SOCKET` names and sends its local rank and round
as JSON. The agent answers one byte and file descriptors: the worker's page, then the memory in which `elasticjob.State`
keeps the node's training state. After that the worker sends nothing more. It writes words of its page, which costs no
system call and wakes no process. The agent sends one byte on the socket whenever it has changed LIMIT, so that a
worker can block until then.

Every word has one writer and is written in one piece (aligned, 8 bytes).
"""

from __future__ import annotations

import mmap
from enum import IntEnum

PAGE_SIZE = mmap.PAGESIZE


class PageWord(IntEnum):
    """Index of each word in a page, with its writer."""

    STEP = 0
    """Worker: the latest step that it reported, NO_STEP before the first."""
    TIME = 1
    """Worker: when it reported that step; nanoseconds of CLOCK_MONOTONIC, which all processes of a host share."""
    LIMIT = 2
    """Agent: the worker stops when it reports this step or a later one; earlier reports return at once.

    HOLD and NO_LIMIT are special values.
    """
    STOPPED = 3
    """Worker: 1 once it has stopped at LIMIT and run its `on_stop` callbacks; the process then exits."""

    HEARTBEATS = 4
    """Worker: number of optimizer steps so far, for scripts that do not report steps."""
    HEARTBEAT_TIME = 5
    """Worker: when the last optimizer step was, as TIME."""
    ENDING = 6
    """Worker: 1 once its program is over. Python's own cleanup may still take a while."""
    OWN = 7
    """Worker: nanoseconds so far without waits for other ranks (`training.own_time`); 0 if unknown."""
    DEADLINE = 8
    """Agent: when it kills the worker at the latest, as TIME; NO_LIMIT while nothing ends the worker."""


NO_STEP = -1
NO_LIMIT = (1 << 63) - 1
HOLD = -1
"""Value of LIMIT while the last step is not decided: a worker that reports a step waits for the agent's next byte."""


def open_page(descriptor: int) -> memoryview:
    """Map the page in `descriptor` and return its words, indexed by `PageWord`."""
    return memoryview(mmap.mmap(descriptor, PAGE_SIZE)).cast("q")

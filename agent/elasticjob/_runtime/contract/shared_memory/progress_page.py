"""Memory that a worker and its agent share during a round: one page for each worker, of 64-bit words.

How they meet: the worker connects to the Unix socket that `Env.AGENT_SOCKET` names and sends its local rank and round
as JSON. The agent answers one byte and file descriptors: the worker's page, then the memory in which `elasticjob.State`
keeps the pod's training state. After that the worker sends nothing more. It writes words of its page, which costs no
system call and wakes no process. The agent sends one byte on the socket whenever it has changed LIMIT, so that a
worker can block until then.

The rest of the page is for a JSON text: what rank 0 reports of the training, `{"total": ..., "metrics": {...}}`.

Every word has one writer and is written in one piece (aligned, 8 bytes).
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
from enum import IntEnum
from typing import TypeAlias

from elasticjob._runtime.system.memory_file import has_fixed_size

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
    """Worker: nanoseconds so far without waits for other ranks (`training.compute_time`); 0 if unknown."""
    DEADLINE = 8
    """Agent: when it kills the worker or the Node ends, as TIME; NO_LIMIT while nothing ends the worker."""
    FIRST_STEP = 9
    """Worker: the first step for which it wrote a text, while TEXT_VERSION is not 0."""
    FIRST_TIME = 10
    """Worker: when that step was, as TIME."""
    TEXT_VERSION = 11
    """Worker: 0 without a text; odd while it changes the text; higher after each change."""
    TEXT_SIZE = 12
    """Worker: bytes of the text, UTF-8."""
    BEGIN_STEP = 13
    """Worker: the step at which its round begins, if `State.sync` has reported it in STEP; else NO_STEP."""
    BEGIN_TIME = 14
    """Worker: when it reported BEGIN_STEP, as TIME; 0 before."""


TEXT_OFFSET = 256
"""Where the text begins in the page, in bytes."""
MAX_TEXT = PAGE_SIZE - TEXT_OFFSET
NO_STEP = -1
NO_LIMIT = (1 << 63) - 1
HOLD = -1
"""Value of LIMIT while the last step is not decided: a worker that reports a step waits for the agent's next byte."""


def open_page(descriptor: int) -> memoryview:
    """Map the page in `descriptor` and return its words, indexed by `PageWord`."""
    return memoryview(mmap.mmap(descriptor, PAGE_SIZE)).cast("q")


class FilePage:
    """The words of a page that is read and written by its descriptor, which takes a system call each."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self._descriptor)

    def __getitem__(self, word: int) -> int:
        """Return the word; NO_STEP if the page has been cut off."""
        data = self.read(8 * word, 8)
        value: int = struct.unpack("=q", data)[0] if len(data) == 8 else NO_STEP
        return value

    def __setitem__(self, word: int, value: int) -> None:
        os.pwrite(self._descriptor, struct.pack("=q", value), 8 * word)

    def read(self, start: int, size: int) -> bytes:
        """Return bytes of the page."""
        return os.pread(self._descriptor, size, start)


AgentPage: TypeAlias = "memoryview | FilePage"
"""The words of a page in its agent."""


def open_agent_page(descriptor: int) -> AgentPage:
    """Return the words of the page, in a form that a worker cannot break.

    A worker has the page's descriptor. If it may cut off the file, mapped memory would kill the agent (SIGBUS).
    """
    return open_page(descriptor) if has_fixed_size(descriptor) else FilePage(descriptor)


def write_text(words: memoryview, text: bytes) -> None:
    """Replace the page's text, of MAX_TEXT bytes at most."""
    words[PageWord.TEXT_VERSION] += 1
    words.cast("B")[TEXT_OFFSET : TEXT_OFFSET + len(text)] = text
    words[PageWord.TEXT_SIZE] = len(text)
    words[PageWord.TEXT_VERSION] += 1


def read_text(words: AgentPage) -> bytes | None:
    """Return the page's text; None without one, or if it is being changed."""
    version, size = words[PageWord.TEXT_VERSION], words[PageWord.TEXT_SIZE]
    if version <= 0 or version % 2 or not 0 <= size <= MAX_TEXT:
        return None
    if isinstance(words, FilePage):
        text = words.read(TEXT_OFFSET, size)
    else:
        text = bytes(words.cast("B")[TEXT_OFFSET : TEXT_OFFSET + size])
    return text if words[PageWord.TEXT_VERSION] == version else None

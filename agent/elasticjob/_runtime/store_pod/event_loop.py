"""An event loop whose turns stay short, however many connections have something to read."""

from __future__ import annotations

import asyncio
import random
import selectors
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

READY_AT_ONCE = 256
"""Connections that are read from in one turn. 4096 agents whose workers fail at once send as many messages: to read all
of them in one turn takes 0.2 s, in which the store does not answer."""


class TurnSelector(selectors.DefaultSelector):
    """Reports READY_AT_ONCE connections at a time.

    The kernel reports the others again in the next turn. It keeps their order, so we begin at a random one: otherwise
    connections at the front that always have something to read would keep the others waiting.
    """

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(timeout)
        if len(ready) <= READY_AT_ONCE:
            return ready
        first = random.randrange(len(ready))  # noqa: S311
        return [*ready[first:], *ready[:first]][:READY_AT_ONCE]


def run_in_turns(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as `asyncio.run` does, in such an event loop. Python 3.10 has its own loop only."""
    if sys.version_info < (3, 11):
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(TurnSelector())) as runner:
        return runner.run(main)

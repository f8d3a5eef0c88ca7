"""A node's side of the control link: connect, announce, listen; connect again, for as long as it takes."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence

from elasticjob.contract.messages import (
    Closed,
    CoordinatorToNode,
    EndRound,
    Finish,
    NewerStore,
    NodeToCoordinator,
    PlanEnd,
    Standby,
    StartRound,
)
from elasticjob.control_link.link import ControlLink, LinkError

log = logging.getLogger(__name__)

FIRST_BACKOFF = 0.05
MAX_BACKOFF = 1.0
"""Seconds between attempts: doubling from the first to the largest, each shortened by a random part."""


class NoCoordinatorError(Exception):
    """No coordinator within the join timeout, and never a round; the message says why."""


class StaleStoreError(Exception):
    """A store older than one already heard of answered."""


class NodeClient:
    """One node at the coordinator. `dial` opens a link, `greeting` is what is said first on each,
    `hear` takes what the coordinator says, `had_round` tells whether this node must never give up. `linked` is told
    that the link came up, or was lost, and then whether nothing but keep-alive noticed.
    """

    def __init__(
        self,
        dial: Callable[[], Awaitable[ControlLink]],
        greeting: Callable[[], Sequence[NodeToCoordinator]],
        hear: Callable[[CoordinatorToNode], None],
        *,
        had_round: Callable[[], bool],
        join_timeout: float,
        linked: Callable[[bool, bool], None] = lambda up, silent: None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._dial = dial
        self._greeting = greeting
        self._hear = hear
        self._had_round = had_round
        self._join_timeout = join_timeout
        self._linked = linked
        self._jitter = jitter
        self._link: ControlLink | None = None
        self._newest = 0
        self._trouble = ""

    def send(self, message: NodeToCoordinator) -> None:
        """Send on the open link. Without one nothing is sent: the next greeting carries the state."""
        if self._link is not None:
            self._link.send(message)

    async def run(self) -> None:
        """Stay connected until cancelled; `GaveUp` where no coordinator was ever of use."""
        started, backoff = time.monotonic(), FIRST_BACKOFF
        while True:
            try:
                why = await self._connected()
                started, backoff = time.monotonic(), FIRST_BACKOFF
            except (OSError, LinkError, StaleStoreError) as error:
                why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                if why != self._trouble:
                    self._trouble = why
                    log.info("no link to the store yet: %s", why)
            if not self._had_round() and time.monotonic() - started > self._join_timeout:
                raise NoCoordinatorError(why)
            await asyncio.sleep(backoff * (0.5 + self._jitter() / 2))
            backoff = min(2 * backoff, MAX_BACKOFF)

    async def _connected(self) -> str:
        """One connection, from greeting to its end."""
        link = await self._dial()
        try:
            if link.welcome.incarnation < self._newest:
                link.send(NewerStore(self._newest))
                raise StaleStoreError(f"store {link.welcome.incarnation} is older than {self._newest}")
            self._newest = link.welcome.incarnation
            self._trouble = ""
            log.info("joined (store %d)", self._newest)
            for message in self._greeting():
                link.send(message)
            self._link = link
            self._linked(True, False)
            await self._listen(link)
        finally:
            link.close()
            if self._link is not None:
                self._link = None
                self._linked(False, link.lost_by_keep_alive)
        log.info("lost the store; reconnecting")
        return "connection closed"

    async def _listen(self, link: ControlLink) -> None:
        while (message := await link.receive()) is not None:
            if isinstance(message, (StartRound, Standby, PlanEnd, EndRound, Closed, Finish)):
                self._hear(message)
            else:
                log.warning("ignored %s: not for a node", type(message).__name__)

"""A node's side of the control link: connect, announce the node, receive messages; reconnect when the link is lost.

Every connection begins with the greeting: an `Announce`, and messages that a lost connection may have swallowed. So a
node's state is complete at the coordinator after each reconnect, and nothing needs to be queued while there is no link.

A node that has been in a round reconnects without limit, because its workers can train without the store. A node that
has not gives up after the join timeout. Incarnations of stores only grow: a node that has met a store does not talk to
an older one, but sends it `NewerStore`, on which that store closes itself.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence

from elasticjob.contract.messages import CoordinatorToNode, NewerStore, NodeToCoordinator
from elasticjob.control_link.link import ControlLink, LinkError

log = logging.getLogger(__name__)

FIRST_BACKOFF = 0.05
MAX_BACKOFF = 1.0
"""Seconds between attempts: doubled from the first to the largest, each shortened by a random part, at most half."""


class NoCoordinatorError(Exception):
    """The node found no coordinator within the join timeout and has never been in a round."""


class StaleStoreError(Exception):
    """The store that answered is older than one that this node has met."""


class NodeClient:
    """Keeps one node connected to the job's coordinator."""

    def __init__(
        self,
        dial: Callable[[], Awaitable[ControlLink]],
        greeting: Callable[[], Sequence[NodeToCoordinator]],
        on_message: Callable[[CoordinatorToNode], None],
        *,
        had_round: Callable[[], bool],
        join_timeout: float,
        on_link_change: Callable[[bool, bool], None] = lambda up, by_keep_alive: None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`dial` opens a link; `greeting` returns the messages to send first on it; `had_round` returns whether the
        node has been in a round. `on_link_change` is called with (True, False) when the link is up, and with (False,
        whether only keep-alive detected the loss) when it is lost. `jitter` returns a number from 0 to 1.
        """
        self._dial = dial
        self._greeting = greeting
        self._on_message = on_message
        self._had_round = had_round
        self._join_timeout = join_timeout
        self._on_link_change = on_link_change
        self._jitter = jitter
        self._link: ControlLink | None = None
        self._newest = 0
        """Highest incarnation of a store that this node has met."""
        self._logged_problem = ""
        """Why the last attempt failed, so that the log has each problem once; empty after a success."""

    def send(self, message: NodeToCoordinator) -> None:
        """Send a message if there is a link. If there is none, the next greeting carries the node's state."""
        if self._link is not None:
            self._link.send(message)

    async def run(self) -> None:
        """Stay connected until cancelled. NoCoordinatorError: the join timeout is over; the message has the reason."""
        started, backoff = time.monotonic(), FIRST_BACKOFF
        while True:
            try:
                reason = await self._connect_once()
                started, backoff = time.monotonic(), FIRST_BACKOFF
            except (OSError, LinkError, StaleStoreError) as error:
                reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                if reason != self._logged_problem:
                    self._logged_problem = reason
                    log.info("cannot connect to the store, retrying: %s", reason)
            if not self._had_round() and time.monotonic() - started > self._join_timeout:
                raise NoCoordinatorError(reason)
            await asyncio.sleep(backoff * (0.5 + self._jitter() / 2))
            backoff = min(2 * backoff, MAX_BACKOFF)

    async def _connect_once(self) -> str:
        """Serve one connection until it closes; return the reason."""
        link = await self._dial()
        try:
            if link.welcome.incarnation < self._newest:
                link.send(NewerStore(self._newest))
                raise StaleStoreError(f"store {link.welcome.incarnation} is older than store {self._newest}")
            self._newest = link.welcome.incarnation
            self._logged_problem = ""
            log.info("connected to store %d", self._newest)
            for message in self._greeting():
                link.send(message)
            self._link = link
            self._on_link_change(True, False)
            await self._receive_messages(link)
        finally:
            link.close()
            if self._link is not None:
                self._link = None
                self._on_link_change(False, link.lost_by_keep_alive)
        log.info("lost the connection to the store, reconnecting")
        return "connection closed"

    async def _receive_messages(self, link: ControlLink) -> None:
        while (message := await link.receive()) is not None:
            if isinstance(message, CoordinatorToNode):
                self._on_message(message)
            else:
                log.warning("ignored a message of type %s: it is not for a node", type(message).__name__)

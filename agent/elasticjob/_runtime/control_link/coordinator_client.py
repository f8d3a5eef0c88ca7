"""An agent's side of the control link: connect, announce the agent, receive messages; reconnect when the link is lost.

Every connection begins with the greeting: an `Announce`, and messages that a lost connection may have swallowed. So an
agent's state is complete at the coordinator after each reconnect, and nothing needs to be queued while there is no
link.

An agent that has been in a round reconnects without limit, because its workers can train without the store. An agent
that has not gives up after the join timeout. Incarnations of stores only grow: an agent that has met a store does not
talk to an older one. It sends `NewerStore` to that store, which then closes itself.

The store tells its agents where its standby store is. An agent without a link tries both. At a standby store that is
still passive it waits, and goes on trying the store: the first of them that is active gets the agent. A passive standby
store does not count as one that the agent has met.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from elasticjob._runtime.contract.messages import (
    NO_STANDBY_STORE,
    AgentToCoordinator,
    Announce,
    CoordinatorToAgent,
    NewerStore,
    StandbyStore,
    StoreActive,
    is_known,
)
from elasticjob._runtime.control_link.link import ControlLink, LinkError

log = logging.getLogger(__name__)

FIRST_BACKOFF = 0.05
MAX_BACKOFF = 1.0
"""Seconds between attempts: doubled from the first to the largest, each shortened by a random part, at most half."""
HEAD_START = 0.1
"""Seconds that the first attempt to reconnect has before the standby store is tried too. A link that broke alone is
back by then, and the standby store does not notice it."""


class NoCoordinatorError(Exception):
    """The agent found no coordinator within the join timeout and has never been in a round."""


class StaleStoreError(Exception):
    """The store that answered is older than one that this agent has met."""


class _Search:
    """The search of several tasks for an active store.

    Before Python 3.12 `asyncio.wait_for` loses a cancellation at the moment that what it waits for ends, so the tasks
    look at `over` as well.
    """

    def __init__(self) -> None:
        self.failed = asyncio.Event()
        """Set when an attempt has failed."""
        self.over = False


class CoordinatorClient:
    """Keeps one agent connected to the job's coordinator."""

    def __init__(
        self,
        dial: Callable[[], Awaitable[ControlLink]],
        greeting: Callable[[], Sequence[AgentToCoordinator]],
        on_message: Callable[[CoordinatorToAgent], None],
        *,
        had_round: Callable[[], bool],
        join_timeout: float,
        on_link_change: Callable[[ControlLink | None], None] = lambda link: None,
        jitter: Callable[[], float] = random.random,
        dial_standby: Callable[[StandbyStore], Awaitable[ControlLink]] | None = None,
    ) -> None:
        """`dial` opens a link; `greeting` returns the messages to send first on it; `had_round` returns whether the
        agent has been in a round. `on_link_change` is called with the link when it is up, and with None when it is
        lost. `jitter` returns a number from 0 to 1.
        `dial_standby` opens a link to a standby store; None: the agent uses none.
        """
        self._dial = dial
        self._dial_standby = dial_standby
        self._greeting = greeting
        self._on_message = on_message
        self._had_round = had_round
        self._join_timeout = join_timeout
        self._on_link_change = on_link_change
        self._jitter = jitter
        self.link: ControlLink | None = None
        """The link to an active store."""
        self._waiting: ControlLink | None = None
        """The link to a passive standby store."""
        self._standby = NO_STANDBY_STORE
        self._store_vanished = False
        """Whether only keep-alive detected that the last link was lost."""
        self._newest = 0
        """Highest incarnation of a store that this agent has met."""
        self._started = time.monotonic()
        """When the agent began to look for a store."""
        self._logged_problem = ""
        """Why the last attempt failed, so that the log has each problem once; empty after a success."""

    def send(self, message: AgentToCoordinator) -> None:
        """Send a message if there is a link. If there is none, the next greeting carries the agent's state."""
        link = self.link or self._waiting
        if link is not None:
            link.send(message)

    def knows(self, message: AgentToCoordinator) -> bool:
        """Return whether the store knows messages of this type; true without a link, because the next one may."""
        link = self.link or self._waiting
        return link is None or is_known(message, link.protocol)

    def greet_again(self) -> None:
        """Announce the agent once more over the link that it has, if any: the store answers with what it knows."""
        if self.link is not None:
            self._greet(self.link)

    async def run(self) -> None:
        """Stay connected until cancelled. NoCoordinatorError: the join timeout is over; the message has the reason."""
        backoff = FIRST_BACKOFF
        while True:
            link = await self._find_store(backoff)
            connected_at = time.monotonic()
            await self._serve(link)
            self._started = time.monotonic()
            log.info("lost the connection to the store, reconnecting")
            if self._join_timeout_over():
                raise NoCoordinatorError("connection closed")
            backoff = FIRST_BACKOFF
            if not self._uses_standby() or self._started < connected_at + MAX_BACKOFF:
                await asyncio.sleep(self._delay(FIRST_BACKOFF))
                backoff = 2 * FIRST_BACKOFF

    def _join_timeout_over(self) -> bool:
        return not self._had_round() and time.monotonic() - self._started > self._join_timeout

    def _uses_standby(self) -> bool:
        return self._dial_standby is not None and bool(self._standby.host)

    def _delay(self, backoff: float) -> float:
        return backoff * (0.5 + self._jitter() / 2)

    # ---- looking for an active store

    async def _find_store(self, backoff: float) -> ControlLink:
        """Return a link to an active store, or to a standby store that has become active."""
        search = _Search()
        if not self._uses_standby():
            return await self._try(self._dial, search, backoff)
        attempts = self._try(self._dial, search, backoff), self._try_standby(search)
        tasks = [asyncio.ensure_future(attempt) for attempt in attempts]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            search.over = True
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        links = [link for link in ended if not isinstance(link, BaseException)]
        if not links:
            raise next((error for error in ended if isinstance(error, Exception)), asyncio.CancelledError())
        for link in links[1:]:
            link.close()
        return links[0]

    async def _try_standby(self, search: _Search) -> ControlLink:
        """Look for the standby store once the first attempt to reconnect has failed, or has had its head start."""
        assert self._dial_standby is not None  # noqa: S101
        dial = self._dial_standby
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(search.failed.wait(), HEAD_START)
        return await self._try(lambda: dial(self._standby), search, FIRST_BACKOFF)

    async def _try(self, dial: Callable[[], Awaitable[ControlLink]], search: _Search, backoff: float) -> ControlLink:
        """Try until a store that is active, or becomes so, answers. NoCoordinatorError: the join timeout is over."""
        while not search.over:
            try:
                link = await self._open(dial, search)
                if link is not None:
                    return link
                reason, backoff = "the standby store closed the connection", FIRST_BACKOFF
            except (OSError, LinkError, StaleStoreError) as error:
                reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                if reason != self._logged_problem:
                    self._logged_problem = reason
                    log.info("cannot connect to the store, retrying: %s", reason)
            search.failed.set()
            if self._join_timeout_over():
                raise NoCoordinatorError(reason)
            await asyncio.sleep(self._delay(backoff))
            backoff = min(2 * backoff, MAX_BACKOFF)
        raise asyncio.CancelledError

    async def _open(self, dial: Callable[[], Awaitable[ControlLink]], search: _Search) -> ControlLink | None:
        """Return a link to an active store; None if it was to a standby store that stayed passive until it closed."""
        link = await dial()
        try:
            if search.over:
                raise asyncio.CancelledError
            if link.welcome.incarnation < self._newest:
                link.send(NewerStore(self._newest))
                raise StaleStoreError(f"store {link.welcome.incarnation} is older than store {self._newest}")
            if not link.welcome.passive or await self._wait_until_active(link):
                return link
        except BaseException:
            link.close()
            raise
        link.close()
        return None

    async def _wait_until_active(self, link: ControlLink) -> bool:
        """Announce the agent at a passive standby store; return whether the store became active before it closed."""
        log.info("waiting at standby store %d", link.welcome.incarnation)
        older, self._waiting = self._waiting, link
        if older is not None:
            older.close()
        try:
            self._greet(link)
            while (message := await link.receive()) is not None:
                if isinstance(message, StoreActive):
                    return True
        finally:
            if self._waiting is link:
                self._waiting = None
        return False

    # ---- a link to an active store

    def _greet(self, link: ControlLink) -> None:
        for message in self._greeting():
            if isinstance(message, Announce) and self._store_vanished:
                message = replace(message, store_vanished=True)
            link.send(message)

    async def _serve(self, link: ControlLink) -> None:
        """Serve one link to an active store until it closes."""
        try:
            self._newest = link.welcome.incarnation
            self._logged_problem = ""
            log.info("connected to store %d", self._newest)
            if not link.welcome.passive:  # else the agent has announced itself already
                self._greet(link)
            self.link = link
            self._on_link_change(link)
            await self._receive_messages(link)
        except LinkError as error:
            log.info("the connection to the store failed: %s", error)
        finally:
            link.close()
            if self.link is not None:
                self.link = None
                self._store_vanished = link.lost_by_keep_alive
                self._on_link_change(None)

    async def _receive_messages(self, link: ControlLink) -> None:
        while (message := await link.receive()) is not None:
            if isinstance(message, StandbyStore):
                if message.host and message.incarnation != self._standby.incarnation:
                    log.info("store %d is the standby store", message.incarnation)
                self._standby = message
            elif isinstance(message, CoordinatorToAgent):
                self._on_message(message)
            elif not isinstance(message, StoreActive):
                log.warning("ignored a message of type %s: it is not for an agent", type(message).__name__)

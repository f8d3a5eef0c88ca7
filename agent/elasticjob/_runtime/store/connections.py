"""The connections of a store's server: their number, who is authenticated, and which clients are admitted."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from elasticjob._runtime.contract.names import StoreClients
from elasticjob._runtime.store.wire import Limits, WireError
from elasticjob._runtime.system.sockets.ip_addresses import endpoint_text, plain_address

log = logging.getLogger(__name__)

_LOGGED_DROPS = 20
"""Closed connections logged for each reason; later ones are only counted."""


@dataclass
class Counters:
    """Totals since the server's start."""

    connections: int = 0
    requests: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Connections that the server closed, by reason."""


class Peer:
    """One connection as its server counts it, whatever it becomes. The link handler reports its progress here."""

    def __init__(self, connections: Connections, transport: asyncio.Transport) -> None:
        self.transport = transport
        name = transport.get_extra_info("peername")
        self.address = _address_of(name)
        """IP address of the other side."""
        self.name = endpoint_text(self.address, name[1]) if name else "a client"
        self._connections = connections
        self._dropped = self._ended = self._is_agent = False

    def record_drop(self, reason: str, message: str) -> None:
        """Count and log that we close the connection, once. `reason` is a fixed text, for counting."""
        if not self._dropped:
            self._dropped = True
            self._connections.record_drop(reason, self.name, message)

    def drop(self, reason: str, message: str) -> None:
        """Close the connection at once; count and log it."""
        self.record_drop(reason, message)
        self.transport.abort()
        self.end()

    def authenticated(self, *, is_agent: bool = False) -> None:
        """Note that the connection is authenticated. `is_agent`: it is an agent's link, so clients from its address are
        admitted."""
        if self._ended:
            return
        self._connections.unauthenticated.pop(self, None)
        if is_agent:
            self._is_agent = True
            self._connections.add_agent(self.address)

    def end(self) -> None:
        """Note that the connection has ended."""
        if self._ended:
            return
        self._ended = True
        self._connections.open -= 1
        self._connections.unauthenticated.pop(self, None)
        if self._is_agent:
            self._connections.remove_agent(self.address)

    @property
    def is_local(self) -> bool:
        """Whether both sides have the same address."""
        return bool(self.address) and self.address == _address_of(self.transport.get_extra_info("sockname"))


class WaitingClient(Protocol):
    """A client that has sent its first request, and waits for the control link of its agent."""

    peer: Peer

    def admit(self) -> None:
        """Serve the client from now on. It has been taken out of those that wait."""


class Connections:
    """The open connections of a server: how many there are, which are authenticated, and whose clients are admitted."""

    def __init__(self, limits: Limits, clients: StoreClients) -> None:
        self.limits = limits
        self.admits = clients
        self.counters = Counters()
        self.open = 0
        """Number of open connections."""
        self.unauthenticated: OrderedDict[Peer, None] = OrderedDict()
        """Connections that are not authenticated yet, the oldest first."""
        self.waiting: dict[str, set[WaitingClient]] = {}
        """Clients that wait for their agent's control link, by address."""
        self._agents: Counter[str] = Counter()
        """Number of agents' control links, by address."""
        self._expected: set[str] = set()
        """Addresses of agents that are about to open their control links."""
        self._expected_until = -math.inf
        """Until when clients on these addresses are admitted; loop time."""

    def record_drop(self, reason: str, peer: str, message: str) -> None:
        """Count a connection that we close, and log the first `_LOGGED_DROPS` of each reason."""
        self.counters.dropped[reason] += 1
        if self.counters.dropped[reason] <= _LOGGED_DROPS:
            log.warning("closed the connection of %s: %s", peer, message)

    def add(self, peer: Peer) -> None:
        """Count a new connection. One too many closes the oldest one that is not authenticated."""
        limits = self.limits
        self.counters.connections += 1
        self.open += 1
        self.unauthenticated[peer] = None
        if len(self.unauthenticated) > limits.unauthenticated:
            problem = "too-many-unauthenticated", f"{limits.unauthenticated} younger ones are not authenticated either"
        elif self.open > limits.connections:
            problem = "too-many-connections", f"the limit of {limits.connections} connections is reached"
        else:
            return
        next(iter(self.unauthenticated)).drop(*problem)

    def is_admitted(self, peer: Peer) -> bool:
        """Return whether a client may use the store's operations now. WireError: it never may."""
        if self.admits is StoreClients.NONE:
            raise WireError("no-tcpstore", "this store has control links only: its job does not use it as a TCPStore")
        return self.admits is StoreClients.ANY or peer.is_local or self._is_address_of_agent(peer.address)

    def _is_address_of_agent(self, address: str) -> bool:
        if address in self._agents:
            return True
        return address in self._expected and asyncio.get_running_loop().time() < self._expected_until

    def expect_agents(self, addresses: Iterable[str]) -> None:
        """Admit the clients on these addresses, whose agents are about to open their control links.

        They are admitted for `Limits.link_timeout`. The first link from an address ends that for this address, which is
        then admitted while it has a link. A host name has no effect, and neither has an address in another form than
        the kernel's: the clients there wait for the link.
        """
        self._expected = {plain_address(address) for address in addresses} - self._agents.keys()
        self._expected_until = asyncio.get_running_loop().time() + self.limits.link_timeout
        for address in self._expected:
            self._admit_waiting(address)

    def add_agent(self, address: str) -> None:
        """Admit the clients on an agent's address, from which it has opened a control link."""
        self._agents[address] += 1
        self._expected.discard(address)
        self._admit_waiting(address)

    def _admit_waiting(self, address: str) -> None:
        for client in self.waiting.pop(address, ()):
            client.admit()

    def add_waiting(self, client: WaitingClient) -> None:
        """Let a client wait for its agent's control link."""
        self.waiting.setdefault(client.peer.address, set()).add(client)

    def remove_waiting(self, client: WaitingClient) -> None:
        """Forget a client that waited and has ended."""
        others = self.waiting[client.peer.address]
        others.discard(client)
        if not others:
            del self.waiting[client.peer.address]

    def remove_agent(self, address: str) -> None:
        """Note that one of the address's control links has ended: without another one it admits no further client."""
        self._agents[address] -= 1
        if not self._agents[address]:
            del self._agents[address]


def _address_of(name: tuple[str, int] | None) -> str:
    """Return the IP address of a socket's name; an IPv4 address has one form on sockets of both families."""
    return plain_address(name[0]) if name else ""

"""The process-group stores of one agent: of the running round, of the next one, and for a while of the last one."""

from __future__ import annotations

import logging

from elasticjob._runtime.contract.messages import StartRound
from elasticjob._runtime.contract.names import Backend, round_store_clients
from elasticjob._runtime.control_link.link import LinkGate
from elasticjob._runtime.store.open_files import (
    connection_limit,
    too_few_connections,
    unauthenticated_bytes,
    unauthenticated_limit,
)
from elasticjob._runtime.store.server import StoreServer
from elasticjob._runtime.system.sockets.ip_addresses import is_loopback
from elasticjob._runtime.system.sockets.listening_socket import ALL_ADDRESSES

log = logging.getLogger(__name__)


class RoundStores:
    """Stores in the order of their rounds. The last round's store stays up, because agents that stop may use it."""

    def __init__(self) -> None:
        self._stores: list[StoreServer] = []

    @property
    def oldest(self) -> StoreServer:
        return self._stores[0]

    @property
    def newest(self) -> StoreServer:
        """The store of the running round; between rounds, the store of the next one."""
        return self._stores[-1]

    async def start_next(self, address: str, backend: Backend, gate: LinkGate) -> int:
        """Start the process-group store of the next round and return its port.

        `address`: this pod's. `gate` accepts the links that other agents of the round keep to this one.
        """
        store = StoreServer(links=gate.accept, clients=round_store_clients(backend))
        port = await store.start(address if is_loopback(address) else ALL_ADDRESSES)
        self.add(store)
        return port

    def add(self, store: StoreServer) -> None:
        """Keep a store that serves; it is the newest one."""
        self._stores.append(store)

    async def close_older(self, current: StoreServer) -> None:
        """Close the stores that are older than `current`. A later call may have closed `current` already.

        `current` stays open even if its round ends in the meantime and there is a newer store: its agents still use it.
        """
        number = self._stores.index(current) if current in self._stores else 0
        older, self._stores = self._stores[:number], self._stores[number:]
        for store in older:
            await store.close()

    async def close(self) -> None:
        """Close all stores."""
        for store in self._stores:
            await store.close()


def admit_workers(store: StoreServer, start: StartRound, open_files: int) -> None:
    """Make the store accept the connections of all workers of the round. `start` is that of group rank 0.

    `open_files`: how many files this process may open. If they are too few for all workers, a warning is logged.
    """
    workers, nodes = start.world_size, start.group_world_size
    limit, unauthenticated = connection_limit(workers, nodes, open_files), unauthenticated_limit(nodes, workers)
    store.allow_connections(limit, unauthenticated, unauthenticated_bytes(unauthenticated))
    store.expect_agents(start.member_addresses)
    if warning := too_few_connections(limit, workers, nodes):
        log.warning("%s", warning)

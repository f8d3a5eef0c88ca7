"""Prepare the process-group store that a node hosts for a round."""

from __future__ import annotations

import logging

from elasticjob.contract.messages import StartRound
from elasticjob.store.open_files import (
    connection_limit,
    too_few_connections,
    unauthenticated_bytes,
    unauthenticated_limit,
)
from elasticjob.store.server import StoreServer

log = logging.getLogger(__name__)


def admit_workers(store: StoreServer, start: StartRound, open_files: int) -> None:
    """Make the store accept the connections of all workers of the round. `start` is that of group rank 0.

    `open_files`: how many files this process may open. If they are too few for all workers, a warning is logged.
    """
    workers, nodes = start.world_size, start.group_world_size
    limit, unauthenticated = connection_limit(workers, nodes, open_files), unauthenticated_limit(nodes, workers)
    store.allow_connections(limit, unauthenticated, unauthenticated_bytes(unauthenticated))
    store.expect_nodes(start.member_addresses)
    if warning := too_few_connections(limit, workers, nodes):
        log.warning("%s", warning)

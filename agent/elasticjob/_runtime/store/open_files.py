"""Open files and connections that a process with a store needs: each connection is an open file."""

from __future__ import annotations

import resource

from elasticjob._runtime.store.wire import MIB, Limits

CONNECTIONS_PER_WORKER = 64
"""A worker of torch has one connection, and one or two more for each process group that it splits off."""
UNAUTHENTICATED_MEMORY = 128 * MIB
"""Bytes that all connections together may leave unread before they are authenticated. Every pod can open some."""
RESERVED_FILES = 256
"""Open files that a store leaves to the rest of its process: without one, asyncio logs every attempt to accept."""


def raise_open_file_limit() -> tuple[int, int]:
    """Raise the soft limit of open files to the hard one; return both limits as they were before.

    The usual soft limit of 1024 is too low for the connections of a store.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    return limits


def connection_limit(workers: int, nodes: int, open_files: int) -> int:
    """Return how many connections the store of a round accepts, as `Limits.connections`.

    `open_files`: how many files this process may open.
    """
    wanted = max(Limits.connections, CONNECTIONS_PER_WORKER * workers + nodes)
    if open_files == resource.RLIM_INFINITY:
        return wanted
    return min(wanted, max(open_files // 2, open_files - RESERVED_FILES))


def unauthenticated_limit(nodes: int, workers: int = 0) -> int:
    """Return how many connections the store of a job or a round of this size authenticates at once.

    All agents and workers may come at the same moment, and again before the store has seen that their last attempts
    ended. `workers`: those that use the store as a TCPStore.
    """
    return max(Limits.unauthenticated, 2 * (nodes + workers))


def unauthenticated_bytes(connections: int) -> int:
    """Return how many bytes each connection may leave unread while so many of them may be unauthenticated.

    A worker of torch sends 10 bytes and waits for the answer. 4096 agents of 8 workers may leave 1.8 KB each.
    """
    return min(Limits.unauthenticated_bytes, UNAUTHENTICATED_MEMORY // connections)


def too_few_connections(limit: int, workers: int, nodes: int) -> str:
    """Return a log line if the limit is below one connection for each worker and agent, else ""."""
    if limit >= workers + nodes:
        return ""
    return (
        f"the round's store gets {workers + nodes} connections or more, but the limit of open files allows only "
        f"{limit}: raise the container runtime's limit (LimitNOFILE)"
    )

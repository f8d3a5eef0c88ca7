"""Open files and connections that a process with a store needs: each connection is an open file."""

from __future__ import annotations

import resource

from elasticjob.store.wire import Limits

CONNECTIONS_PER_WORKER = 64
"""A worker of torch has one connection, and one or two more for each process group that it splits off."""


def raise_open_file_limit() -> tuple[int, int]:
    """Raise the soft limit of open files to the hard one; return both limits as they were before.

    The usual soft limit of 1024 is too low for the connections of a store.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    return limits


def connection_limit(workers: int, nodes: int) -> int:
    """Return how many connections the store of a round accepts, as `Limits.connections`."""
    return max(Limits.connections, CONNECTIONS_PER_WORKER * workers + nodes)


def too_few_open_files(limits: tuple[int, int], workers: int, nodes: int) -> str:
    """Return a log line if the hard limit of open files is below one connection for each worker and node, else ""."""
    hard, needed = limits[1], workers + nodes
    if hard == resource.RLIM_INFINITY or hard > needed:
        return ""
    return (
        f"the round's store gets {needed} connections or more, but this process may open only {hard} files: "
        "raise the container runtime's limit (LimitNOFILE)"
    )

"""Open files and connections of a process with a store."""

from __future__ import annotations

import resource

import pytest

from elasticjob._runtime.store.open_files import (
    connection_limit,
    raise_open_file_limit,
    too_few_connections,
    unauthenticated_bytes,
    unauthenticated_limit,
)
from elasticjob._runtime.store.wire import Limits


def test_the_soft_limit_becomes_the_hard_one_and_the_old_limits_are_returned() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = (64, before[1])
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, low)
        assert raise_open_file_limit() == low
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    ("workers", "nodes", "open_files", "limit"),
    [
        (1, 1, 1 << 20, Limits.connections),
        (8 * 1820, 1820, 1 << 20, 64 * 14560 + 1820),
        (20_000, 2500, resource.RLIM_INFINITY, 1_282_500),
        (20_000, 2500, 1 << 20, (1 << 20) - 256),
        (1, 1, 4096, 4096 - 256),
        (1, 1, 300, 150),
    ],
)
def test_the_connection_limit_follows_the_size_of_the_round(
    workers: int, nodes: int, open_files: int, limit: int
) -> None:
    assert connection_limit(workers, nodes, open_files) == limit


def test_a_limit_that_is_too_low_is_reported() -> None:
    assert too_few_connections(4500, 4000, 500) == ""
    assert "4500 connections or more, but the limit of open files allows only 4499:" in too_few_connections(
        4499, 4000, 500
    )


@pytest.mark.parametrize(
    ("nodes", "workers", "limit", "size"),
    [(1, 8, 1024, 16384), (129, 1032, 2322, 16384), (4096, 0, 8192, 16384), (4096, 32768, 73728, 1820)],
)
def test_all_nodes_and_workers_of_a_round_may_connect_at_once_with_a_bounded_memory(
    nodes: int, workers: int, limit: int, size: int
) -> None:
    assert (unauthenticated_limit(nodes, workers), unauthenticated_bytes(limit)) == (limit, size)

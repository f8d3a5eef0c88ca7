"""All rows, in the order of the table in docs/contribute/benchmarks.md."""

from __future__ import annotations

from benchmarks import (
    between_addresses,
    cold_start,
    footprint,
    formed_again,
    many_connections,
    process_group,
    recovery,
    rendezvous,
    state_commit,
    state_transfer,
    store_killed,
    store_operations,
    uneven_ends,
)
from benchmarks.row import Row

ROWS: list[Row] = [
    *recovery.ROWS,
    *between_addresses.ROWS,
    *store_killed.ROWS,
    *cold_start.ROWS,
    *rendezvous.ROWS,
    *uneven_ends.ROWS,
    *store_operations.ROWS,
    *process_group.ROWS,
    *many_connections.ROWS,
    *formed_again.ROWS,
    *footprint.ROWS,
    *state_commit.ROWS,
    *state_transfer.ROWS,
]
ORDER = {row.name: position for position, row in enumerate(ROWS)}

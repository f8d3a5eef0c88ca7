"""All rows, in the order of the table."""

from __future__ import annotations

from benchmarks import cold_start, footprint, recovery, rendezvous, store_gone, store_operations
from benchmarks.row import Row

ROWS: list[Row] = [
    *recovery.ROWS,
    *store_gone.ROWS,
    *cold_start.ROWS,
    *rendezvous.ROWS,
    *store_operations.ROWS,
    *footprint.ROWS,
]
ORDER = {row.name: place for place, row in enumerate(ROWS)}

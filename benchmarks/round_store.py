"""Serve the store of one round, as an agent does, and print its port: `python -m benchmarks.round_store`."""

from __future__ import annotations

import asyncio

from elasticjob._runtime.store.open_files import connection_limit, raise_open_file_limit
from elasticjob._runtime.store.server import StoreServer

RANKS = 20_000
"""Size of the round."""


async def main() -> None:
    open_files = raise_open_file_limit()[1]
    store = StoreServer()
    store.allow_connections(connection_limit(RANKS, RANKS, open_files), RANKS)
    print("serving", await store.start("127.0.0.1"), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())

"""The time in which processes start, and their ids are not known to the agent yet."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from elasticjob._runtime.agent.workers.processes.process_table import ProcessTable
from elasticjob._runtime.agent.workers.processes.restartable_workers import RestartableWorkers
from elasticjob._runtime.agent.workers.processes.worker_process import FOR_NEXT_ROUND, IN_ROUND, SPARES


class StartWindow:
    """Between `open` and `close` any process may connect, exit codes of unknown children are kept, and a stop waits."""

    def __init__(self, table: ProcessTable, restartable: RestartableWorkers) -> None:
        self._table = table
        self._restartable = restartable
        self._closed = asyncio.Event()
        self._closed.set()
        self._exit_codes: dict[int, int] = {}

    @property
    def is_open(self) -> bool:
        return not self._closed.is_set()

    def open(self) -> None:
        """Call this before processes start."""
        self._closed.clear()
        self._restartable.allow(None)
        self._exit_codes = {}

    def close(self) -> None:
        """Call this once the processes that have started are in the table: others may not connect any more."""
        self._closed.set()
        self._restartable.allow(self._table.pids(IN_ROUND, FOR_NEXT_ROUND, SPARES))

    def release_waiters(self) -> None:
        """End every `until_closed`, now and later: the agent has failed, and `close` may never be called."""
        self._closed.set()

    async def until_closed(self) -> None:
        await self._closed.wait()

    def keep_exit_code(self, pid: int, code: int) -> None:
        """Keep the exit code of a child that has been reaped and may be a process that has just started."""
        if self.is_open:
            self._exit_codes[pid] = code

    def take_exit_codes(self) -> Mapping[int, int]:
        """Return the exit codes that were kept, and keep them no more."""
        codes, self._exit_codes = self._exit_codes, {}
        return codes

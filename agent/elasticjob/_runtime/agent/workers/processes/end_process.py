"""How the agent ends a process that takes part in no round."""

from __future__ import annotations

import time

from elasticjob._runtime.agent.monitoring.exits.exiting_process import why_new_workers_must_wait
from elasticjob._runtime.agent.processes import kill_with_children
from elasticjob._runtime.agent.workers.processes.process_table import ProcessTable
from elasticjob._runtime.agent.workers.processes.worker_process import ProcessEvent


def kill_process(table: ProcessTable, pid: int) -> None:
    """Kill a process that no new worker has to wait for."""
    before = table.apply(pid, ProcessEvent.KILL)
    kill_with_children(pid)
    before.worker.close()


def discard_process(table: ProcessTable, pid: int) -> None:
    """Kill a process that new workers may have to wait for."""
    before = table.apply(pid, ProcessEvent.DISCARD, now=time.monotonic(), reason_to_wait=why_new_workers_must_wait(pid))
    kill_with_children(pid)
    before.worker.close()

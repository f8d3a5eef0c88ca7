"""Prestart: start processes that run the script up to its function before they have a round."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from dataclasses import replace

from elasticjob._runtime.agent.processes import descendants, kill
from elasticjob._runtime.agent.start_workers.launcher import Launcher, StartError, WorkerStart
from elasticjob._runtime.agent.workers.pod_command.command_process import CommandProcess
from elasticjob._runtime.agent.workers.processes.process_table import ProcessTable
from elasticjob._runtime.agent.workers.processes.restartable_workers import RestartableWorkers
from elasticjob._runtime.agent.workers.processes.worker_process import ProcessEvent, ProcessState
from elasticjob._runtime.agent.workers.worker import Worker
from elasticjob._runtime.agent.workers.worker_files import WorkerFiles
from elasticjob._runtime.contract.messages import StartRound
from elasticjob._runtime.contract.names import PRESTART_ROUND, RoundId

log = logging.getLogger(__name__)


class PrestartLauncher:
    """Launches processes without a round. The caller has opened the `StartWindow`."""

    def __init__(
        self,
        table: ProcessTable,
        launcher: Launcher,
        files: WorkerFiles,
        restartable: RestartableWorkers,
        command: CommandProcess,
    ) -> None:
        self._table = table
        self._launcher = launcher
        self._files = files
        self._restartable = restartable
        self._command = command
        self._launches = 0

    def with_own_files(self, start: StartRound) -> StartRound:
        """Return an assignment with folders and log files of its own: those of a real round may be in use."""
        self._launches += 1
        return replace(start, round=RoundId(*PRESTART_ROUND[:2], self._launches))

    async def launch(
        self, provisional: StartRound, local_ranks: Collection[int], state: ProcessState
    ) -> dict[int, Worker]:
        """Start processes and add them to the table, in this state; {} and a line in the log if they cannot start."""
        if self._command.runs_alone:
            return {}
        prepared: list[tuple[Worker, WorkerStart]] = []
        not_to_kill = descendants(os.getpid())
        try:
            for local_rank in local_ranks:
                prepared.append(self._files.prepare(provisional, local_rank))
            pids = await self._launcher.start([worker_start for _, worker_start in prepared], not_to_kill)
        except (StartError, OSError, RuntimeError) as error:  # RuntimeError: no more threads
            log.info("the script is not run ahead of its round: %s", error)
            kill(self._launcher.without_preforked(descendants(os.getpid(), without=not_to_kill)))
            for worker, _ in prepared:
                worker.close()
            return {}
        else:
            started = {pid: worker for pid, (worker, _) in zip(pids, prepared, strict=True)}
            for pid, worker in started.items():
                self._table.add(pid, worker, state)
                if self._restartable.parked(pid):  # it was faster than the launcher's answer
                    self._table.apply(pid, ProcessEvent.AT_FUNCTION)
            return started
        finally:
            for _, worker_start in prepared:
                worker_start.close()

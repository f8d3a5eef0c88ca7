"""Start processes of a pod's command in a round that runs: the ranks of a launcher, or the command for each rank."""

from __future__ import annotations

import os
import time

from elasticjob._runtime.agent.config import AgentConfig
from elasticjob._runtime.agent.processes import descendants
from elasticjob._runtime.agent.reporting.worker_output import file_identity
from elasticjob._runtime.agent.start_workers.launcher import Launcher, StartError, WorkerStart
from elasticjob._runtime.agent.start_workers.launches.pending_launch import Launch
from elasticjob._runtime.agent.workers.processes.process_table import ProcessTable
from elasticjob._runtime.agent.workers.processes.worker_process import RUNNING
from elasticjob._runtime.agent.workers.round_times import RoundTimes
from elasticjob._runtime.agent.workers.start_window import StartWindow
from elasticjob._runtime.agent.workers.worker import EndedWorker, Worker
from elasticjob._runtime.agent.workers.worker_files import WorkerFiles
from elasticjob._runtime.contract.messages import Failure, FailureClass, StartRound


class RankStarter:
    """Starts processes in addition to those of `RoundStarter`, which has started the round."""

    def __init__(
        self,
        config: AgentConfig,
        table: ProcessTable,
        window: StartWindow,
        files: WorkerFiles,
        launcher: Launcher,
        times: RoundTimes,
    ) -> None:
        self._config = config
        self._table = table
        self._window = window
        self._files = files
        self._launcher = launcher
        self._times = times

    def end_stage(self) -> None:
        """Forget the steps of the ranks of a launcher that ends."""
        self._times.end_stage()

    async def start(self, start: StartRound, ranks: list[int]) -> EndedWorker | None:
        """Start the processes of these local ranks. Return the failure of the round if they cannot start."""
        prepared: list[tuple[Worker, WorkerStart]] = []
        not_to_kill = descendants(os.getpid())
        self._window.open()
        try:
            prepared += [self._files.prepare(start, rank) for rank in ranks]
            self._times.begin_start(ranks)
            pids = await self._launcher.start([worker_start for _, worker_start in prepared], not_to_kill)
        except (StartError, OSError) as error:
            failure = Failure(
                FailureClass.START_ERROR, self._config.pod, time.time(), rank=start.rank, message=str(error)[:1024]
            )
            return EndedWorker(start.round, ranks[0], failure)
        else:
            for pid, (worker, _) in zip(pids, prepared, strict=True):
                self._table.add(pid, worker, RUNNING)
            self._times.new_processes(pids)
            self._times.started(new=True)
            return None
        finally:
            for _, worker_start in prepared:
                worker_start.close()
            self._window.close()


def own_outputs(launch: Launch, command: Worker | None) -> tuple[int | None, int | None]:
    """Return where the ranks' stdout and stderr go if the command has redirected its launcher; else None."""
    if launch.streams is None or command is None:
        return None, None
    stdout, stderr = launch.streams[1:]
    ours = [pipe.identity for pipe in command.pipes]
    return (
        None if file_identity(stdout) in ours else stdout,
        None if file_identity(stderr) in ours else stderr,
    )

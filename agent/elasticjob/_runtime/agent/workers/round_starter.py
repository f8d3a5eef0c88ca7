"""Start the workers of a round.

The processes that were kept for it are called; for one that still runs its script up to its function, the message
waits there. Spare processes take the places of missing ones, and the rest is launched.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from elasticjob._runtime.agent.config import AgentConfig
from elasticjob._runtime.agent.monitoring.exits.stuck_processes import LONGEST_KILL
from elasticjob._runtime.agent.monitoring.progress.worker_progress import WorkerProgress
from elasticjob._runtime.agent.processes import is_stopped
from elasticjob._runtime.agent.reporting.log_options import STDERR, STDOUT
from elasticjob._runtime.agent.reporting.worker_output import Tail
from elasticjob._runtime.agent.shipped_code import CodeError
from elasticjob._runtime.agent.start_workers.launcher import Launcher, StartError, WorkerStart
from elasticjob._runtime.agent.workers.pod_command.pod_command import PodCommand
from elasticjob._runtime.agent.workers.processes.end_process import discard_process, kill_process
from elasticjob._runtime.agent.workers.processes.process_changes import ProcessChanges
from elasticjob._runtime.agent.workers.processes.process_table import ProcessTable
from elasticjob._runtime.agent.workers.processes.restartable_workers import RestartableWorkers
from elasticjob._runtime.agent.workers.processes.worker_process import (
    FOR_NEXT_ROUND,
    LOADING,
    RUNNING,
    SPARE,
    SPARES,
    ProcessEvent,
)
from elasticjob._runtime.agent.workers.round_times import RoundTimes
from elasticjob._runtime.agent.workers.spares.prestart import PrestartLauncher
from elasticjob._runtime.agent.workers.spares.spares import Spares
from elasticjob._runtime.agent.workers.start_window import StartWindow
from elasticjob._runtime.agent.workers.stop_sequence import STATE_COPY_TIMEOUT, StopSequence
from elasticjob._runtime.agent.workers.worker import Worker
from elasticjob._runtime.agent.workers.worker_files import WorkerFiles
from elasticjob._runtime.contract.messages import Failure, FailureClass, StartRound

log = logging.getLogger(__name__)

FAILED_CALLS = 2
"""Calls of a function in a row that fail before their first step, after which its process is replaced: what is broken
in it may stay, such as a library's state. One alone may be chance."""
SET_UP_NOTE = 300.0
"""Seconds between two lines in the log about a prestarted script that has not reached its function."""


class RoundStarter:
    """Starts workers, in a round and before one. The caller has opened the `StartWindow`; each start closes it."""

    def __init__(
        self,
        config: AgentConfig,
        table: ProcessTable,
        changes: ProcessChanges,
        window: StartWindow,
        launcher: Launcher,
        restartable: RestartableWorkers,
        progress: WorkerProgress,
        times: RoundTimes,
        files: WorkerFiles,
        prestarts: PrestartLauncher,
        spares: Spares,
        stop_sequence: StopSequence,
        command: PodCommand,
    ) -> None:
        self.on_end: Callable[[], None] = lambda: None
        """Called when processes were prestarted: some may have ended before their ids were known."""
        self._config = config
        self._table = table
        self._changes = changes
        self._window = window
        self._launcher = launcher
        self._restartable = restartable
        self._progress = progress
        self._times = times
        self._files = files
        self._prestarts = prestarts
        self._spares = spares
        self._stop_sequence = stop_sequence
        self._command = command
        self._code = config.code
        self._is_first = True
        """Whether no workers of a round were started before."""

    async def start(self, start: StartRound) -> Failure | None:
        """As `WorkerGroup.start`; None also if the round ends before its code is here: nothing runs then.

        After a failure the processes that were called are still CALLED: the stop that follows kills them.
        """
        prepared: list[tuple[Worker, WorkerStart]] = []
        called: dict[int, Worker] = {}
        self._is_first = False
        try:
            self._progress.begin_round(start.round)
            self._times.begin_round()
            if not await self._unpack_code(start.code):
                return None  # the round ends already
            await self._discard_unusable(start)
            for local_rank in range(self._config.processes):
                self._files.folder(start, local_rank)  # if this fails, all processes are parked still
            called |= self._call(start, self._table.workers(FOR_NEXT_ROUND))
            missing = self.missing_ranks(called.values())
            self._spares.discard_loading(missing)
            if missing and (failure := await self._stop_sequence.until_replaceable()):
                return failure
            called |= self._call(start, self._spares.ready_for(missing))
            missing = self.missing_ranks(called.values())
            if starts_alone := self._command.starts_alone:
                # The command has ended while this waited: the round has failed, and its stop kills what was called.
                self._discard_all_waiting()
                called, missing = {}, [0]
                prepared.append(self._command.prepare(start))
            else:
                for local_rank in missing:
                    prepared.append(self._files.prepare(start, local_rank))
            not_to_kill = {*called, *self._table.pids(SPARES), *self._command.process.left_running}
            self._times.begin_start(missing)
            pids = await self._launcher.start([worker_start for _, worker_start in prepared], not_to_kill)
        except (StartError, CodeError) as error:
            return self._start_error(start, str(error))
        except OSError as error:  # no descriptor or no space left
            return self._start_error(start, f"cannot prepare the workers: {error}")
        else:
            for pid, (worker, _) in zip(pids, prepared, strict=True):
                self._table.add(pid, worker, RUNNING)
                if starts_alone:
                    self._command.started(pid, worker)
            self._command.ranks_started()
            self._table.apply_to_all(called, ProcessEvent.START_OVER)
            self._times.new_processes(pids)
            for pid in (*called, *pids):
                self._restartable.repeat(pid)  # what it has reported since it was called
            self._times.started(new=bool(prepared))
            return None
        finally:
            for _, worker_start in prepared:
                worker_start.close()
            self._window.close()
            # A round starts only once all workers have ended, so the evidence in the other folders has been read.
            in_table = (process.worker for process in self._table.processes())
            waiting = filter(None, [self._command.process.worker])
            self._files.delete_folders((*in_table, *waiting, *(worker for worker, _ in prepared)))

    async def _discard_unusable(self, start: StartRound) -> None:
        """Kill the processes of earlier rounds that this one cannot use. StartError: the command does not end."""
        await self._discard_failing()
        if not start.state_known:
            self._discard_outdated()
        if self._command.kill_if_at_other_launcher():
            await self._changes.until(lambda: not self._command.process.pid, LONGEST_KILL)
            if self._command.process.pid:
                raise StartError("the command of the round before does not end")
            self._command.forget_if_ended()
        if self._command.starts_alone:
            self._discard_all_waiting()

    async def prestart(self, provisional: StartRound) -> Failure | None:
        """As `WorkerGroup.prestart`."""
        self._spares.discard_overdue()
        self._spares.take_places()
        failure = await self._stop_sequence.until_replaceable()
        if failure is None and (missing := self.missing_ranks(self._table.workers(FOR_NEXT_ROUND).values())):
            own = provisional if self._is_first else self._prestarts.with_own_files(provisional)
            await self._prestarts.launch(own, missing, LOADING)
        self._window.close()
        self.on_end()  # for what has ended before its process id was known
        while not await self._changes.until(lambda: not self._table.pids({LOADING}), SET_UP_NOTE):
            log.info("the script still runs up to its function, ahead of the next round; the others do not wait for it")
        return failure

    def missing_ranks(self, workers: Iterable[Worker]) -> list[int]:
        """Return the local ranks of a round that are not those of these workers."""
        return sorted(set(range(self._config.processes)) - {worker.local_rank for worker in workers})

    def ranks_to_start(self) -> list[int]:
        """Return the local ranks for which no process waits at its function, or will."""
        return self.missing_ranks(self._table.workers(FOR_NEXT_ROUND, {SPARE}).values())

    def _call(self, start: StartRound, waiting: dict[int, Worker]) -> dict[int, Worker]:
        """Call the functions of these processes in the round; return those that were reached, and kill the rest."""
        called: dict[int, Worker] = {}
        for pid, before in waiting.items():
            error_file = str(self._files.folder(start, before.local_rank) / "error.json")
            tails = (Tail(), Tail())
            rank = start.rank + before.local_rank
            worker = replace(
                before, round=start.round, rank=rank, error_file=error_file, tails=tails,
                was_prestarted=before.was_prestarted or before.round.is_prestarted,
            )  # fmt: skip
            watch = self._files.watch(start.round, before.local_rank)
            for stream, pipe, tail in zip((STDOUT, STDERR), before.pipes, tails, strict=True):
                pipe.begin_round(self._files.line_prefix(before.local_rank, rank, stream), tail, watch)
            self._table.set_worker(pid, worker)
            if self._restartable.call_again(pid, start.round, self._files.worker_env(start, worker)):
                self._table.apply(pid, ProcessEvent.CALL)
                called[pid] = worker
            else:
                kill_process(self._table, pid)
        return called

    async def _unpack_code(self, digest: str) -> bool:
        """Unpack the code that the round names; return False if the round ends before the code is there.

        Processes that wait have run a part of the old script, so they end; the pod's memory has their state.
        """
        if not self._code.differs(digest):
            return True
        await self._discard_with_state(self._table.workers(FOR_NEXT_ROUND))
        self._discard_all_waiting()
        taken = await self._code.update(digest, lambda: self._stop_sequence.stopping)
        if taken:
            log.info("the code is %s now", digest[:12])
        return taken

    async def _discard_failing(self) -> None:
        """Kill parked processes that fail again and again, once the pod's memory has the state that they hold."""
        broken = {pid: w for pid, w in self._table.workers(FOR_NEXT_ROUND).items() if w.failed_calls >= FAILED_CALLS}
        for worker in broken.values():
            text = "rank %d failed %d times in a row before its first step: a new process takes its place"
            log.warning(text, worker.rank, worker.failed_calls)
        await self._discard_with_state(broken)

    async def _discard_with_state(self, waiting: Collection[int]) -> None:
        """Kill parked processes, once the pod's memory has the state that they hold."""
        for pid in waiting:
            if not is_stopped(pid):
                self._restartable.end(pid, at_once=True)
        await self._changes.until(
            lambda: self._stop_sequence.stopping or not any(map(self._restartable.copying_state, waiting)),
            STATE_COPY_TIMEOUT,
        )
        for pid in set(waiting) & self._table.pids(FOR_NEXT_ROUND):  # others have ended since
            discard_process(self._table, pid)

    def _discard_outdated(self) -> None:
        """Kill the processes that have run the script ahead of this round: what they have read may be outdated."""
        prestarted = {
            pid: worker
            for pid, worker in self._table.workers(FOR_NEXT_ROUND).items()
            if worker.round.is_prestarted or worker.was_prestarted
        }
        for pid, worker in (prestarted | self._table.workers(SPARES)).items():
            text = "no pod has a training state, and process %d of local rank %d may have read an old one: it ends"
            log.info(text, pid, worker.local_rank)
            discard_process(self._table, pid)

    def _discard_all_waiting(self) -> None:
        """Kill the processes of the next round and the spare ones, waiting or still loading: the whole command runs
        again."""
        for pid in self._table.pids(FOR_NEXT_ROUND, SPARES):
            discard_process(self._table, pid)

    def _start_error(self, start: StartRound, message: str) -> Failure:
        return Failure(FailureClass.START_ERROR, self._config.pod, time.time(), rank=start.rank, message=message[:1024])

"""The spare processes of this pod: each waits at the function, and takes the place of its rank's process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import replace

from elasticjob._runtime.agent.monitoring.exits.worker_exits import signal_name
from elasticjob._runtime.agent.monitoring.progress.hangs import describe_place, dump_stacks
from elasticjob._runtime.agent.processes import MAX_OOM_SCORE, is_stopped, oom_score, set_oom_score
from elasticjob._runtime.agent.workers.processes.end_process import discard_process, kill_process
from elasticjob._runtime.agent.workers.processes.process_changes import ProcessChanges
from elasticjob._runtime.agent.workers.processes.process_table import ProcessTable
from elasticjob._runtime.agent.workers.processes.worker_process import (
    FOR_NEXT_ROUND,
    IN_ROUND,
    SPARE,
    SPARE_LOADING,
    SPARES,
    ProcessEvent,
)
from elasticjob._runtime.agent.workers.round_times import RoundTimes
from elasticjob._runtime.agent.workers.spares.prestart import PrestartLauncher
from elasticjob._runtime.agent.workers.spares.spare_decisions import describe_spare_wait, first_note
from elasticjob._runtime.agent.workers.start_window import StartWindow
from elasticjob._runtime.agent.workers.worker import Worker
from elasticjob._runtime.contract.messages import StartRound
from elasticjob._runtime.system.loop_errors import background_task

log = logging.getLogger(__name__)

SPARE_INTERVAL = 1.0
"""Seconds between two checks whether the workers have made a step, and spare processes may take processor time: a step
does not wake the agent."""


class Spares:
    """Starts spare processes while the workers of a round train, and gives them to ranks that lose their process."""

    def __init__(
        self,
        processes: int,
        table: ProcessTable,
        changes: ProcessChanges,
        window: StartWindow,
        prestarts: PrestartLauncher,
        times: RoundTimes,
    ) -> None:
        """`processes`: how many processes a round has in this pod."""
        self.round_goes_on: Callable[[], bool] = lambda: True
        """Whether the present round is not about to end."""
        self.on_started: Callable[[], None] = lambda: None
        """Called when spare processes have started: others may have ended meanwhile."""
        self._processes = processes
        self._table = table
        self._changes = changes
        self._window = window
        self._prestarts = prestarts
        self._times = times
        self._last_start: StartRound | None = None
        self._may_have_spares = True
        """False once a script has ended before its function outside of a round, and once this pod leaves."""
        self._paused = False
        self._reached_function = False
        """Whether any spare process has reached its function."""
        self._announced = False
        """Whether the log has a line in this round about spare processes that may not start yet."""
        self._overdue: set[int] = set()
        """Spare processes that have not reached their function in time: something that does not end holds them up."""
        self._timer: asyncio.TimerHandle | None = None
        """Runs while the round's workers need spare processes that may not start yet."""
        self._starting: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        """Writes to the log what spare processes wait for that are not at their function."""

    # ---- start ---------------------------------------------------------------------------------------------------

    def begin_round(self, start: StartRound) -> None:
        self._last_start, self._announced = start, False

    def want(self) -> None:
        """Start spare processes for the workers of this round without one, once all workers train."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SPARE_INTERVAL, self._start_if_due)

    def pause(self, reason: str) -> None:
        """End all spare processes, and start none until `resume`."""
        self._paused = True
        self.discard_all(reason)

    def resume(self) -> None:
        self._paused = False

    def _start_if_due(self) -> None:
        self._timer = None
        ranks = [worker.local_rank for worker in self._table.workers(IN_ROUND).values()]
        if not ranks or not self.round_goes_on() or not self._may_start:
            return  # the next round asks for them again
        spare_ranks = {worker.local_rank for worker in self._table.workers(SPARES).values()}
        if not (missing := sorted(set(range(self._processes)) - spare_ranks)):
            return
        if not self._window.is_open and self._times.all_train(ranks):
            self._starting = background_task(self._start(missing))
            return
        if not self._announced:
            self._announced = True
            log.info("%s", describe_spare_wait(missing, self._times.longest_script))
        self.want()

    @property
    def _may_start(self) -> bool:
        return self._may_have_spares and not self._paused

    async def _start(self, local_ranks: Collection[int]) -> None:
        assert self._last_start is not None  # noqa: S101
        provisional = replace(self._prestarts.with_own_files(self._last_start), master_addr="", master_port=0)
        self._window.open()
        try:
            begun = await self._prestarts.launch(provisional, local_ranks, SPARE_LOADING)
        finally:
            self._window.close()
        for pid, worker in begun.items():
            set_oom_score(pid, MAX_OOM_SCORE)  # without memory for all, the kernel must not choose a worker
            log.info("process %d starts as the spare of local rank %d", pid, worker.local_rank)
        if self._watching is None or self._watching.done():
            self._watching = background_task(self._watch())
        if not self._may_start:
            self.discard_all()
        self.on_started()

    async def _watch(self) -> None:
        """Write to the log what spare processes wait for that are not at their function, until none is left."""
        begun, seconds = time.monotonic(), first_note(self._times.longest_script)
        while not await self._changes.until(lambda: not self._table.pids({SPARE_LOADING}), seconds):
            late = self._table.workers({SPARE_LOADING})
            self._overdue |= late.keys()
            stacks = await dump_stacks({pid: worker.stack_dump_file for pid, worker in late.items()})
            for pid, worker in late.items():
                text = "process %d, the spare of local rank %d, is not at its function after %.0f s: %s"
                seconds = time.monotonic() - begun
                log.warning(text, pid, worker.local_rank, seconds, describe_place(stacks[pid], pid))

    def at_function(self, pid: int, worker: Worker) -> None:
        """Record that a spare process has reached its function."""
        self._reached_function = True
        log.info("process %d waits at its function, as the spare of local rank %d", pid, worker.local_rank)

    # ---- use -----------------------------------------------------------------------------------------------------

    def ready_for(self, local_ranks: Collection[int]) -> dict[int, Worker]:
        """Return the spare processes of these local ranks that can call their functions now; the caller calls them."""
        found = {}
        for pid, worker in self._table.workers({SPARE}).items():
            if worker.local_rank in local_ranks and not is_stopped(pid):
                set_oom_score(pid, oom_score())
                log.info("process %d, the spare of local rank %d, takes its place", pid, worker.local_rank)
                found[pid] = worker
        return found

    def take_places(self) -> None:
        """Let spare processes of ranks without a process take their places, also those that are not at the function."""
        present = {worker.local_rank for worker in self._table.workers(FOR_NEXT_ROUND).values()}
        for pid, worker in self._table.workers(SPARES).items():
            if worker.local_rank not in present:
                self._table.apply(pid, ProcessEvent.TAKE_PLACE)
                set_oom_score(pid, oom_score())

    # ---- end -----------------------------------------------------------------------------------------------------

    def discard_loading(self, local_ranks: Collection[int]) -> None:
        """Kill spare processes of these local ranks that are not at the function: they would compete with new workers
        for locks, ports and memory. New workers wait for their end."""
        for pid, worker in self._table.workers({SPARE_LOADING}).items():
            if worker.local_rank in local_ranks:
                text = "process %d, the spare of local rank %d, is not at its function: it ends, and a new one starts"
                log.info(text, pid, worker.local_rank)
                discard_process(self._table, pid)

    def discard_overdue(self) -> None:
        """As `discard_loading`, for ranks whose spare process has not reached its function in time."""
        late = self._table.workers(SPARES)
        self.discard_loading({worker.local_rank for pid, worker in late.items() if pid in self._overdue})

    def discard_all(self, reason: str = "no round follows in this pod", *, for_good: bool = False) -> None:
        """Kill all spare processes, and start no more if `for_good`. They have trained nothing: nothing is kept."""
        self._may_have_spares = self._may_have_spares and not for_good
        for pid, worker in self._table.workers(SPARES).items():
            log.info("process %d, the spare of local rank %d, ends: %s", pid, worker.local_rank, reason)
            kill_process(self._table, pid)
        self._changes.notify()  # `_watch` has none left to watch

    def ended(self, worker: Worker, code: int) -> None:
        """Record that a spare process has ended by itself.

        If none has reached its function so far, the script cannot run up to it outside of a round: no other one starts.
        """
        self._may_have_spares = self._may_have_spares and self._reached_function
        end = signal_name(-code) if code < 0 else f"exit code {code}"
        again = "the next round starts another one" if self._may_have_spares else "no other one starts"
        log.info("the spare process of local rank %d ended (%s): %s", worker.local_rank, end, again)
        worker.close()

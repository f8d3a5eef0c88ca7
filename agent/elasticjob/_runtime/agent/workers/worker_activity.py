"""What the round's workers show while they run: steps, time-outs of their process groups, and stacks."""

from __future__ import annotations

import logging
import time

from elasticjob._runtime.agent.monitoring.progress.hang_guard import HangGuard, guard_of
from elasticjob._runtime.agent.monitoring.progress.hangs import StackDump, dump_stacks, farthest_behind
from elasticjob._runtime.agent.monitoring.progress.worker_progress import ProgressReport, WorkerProgress
from elasticjob._runtime.agent.reporting.log_watch import LogWatch
from elasticjob._runtime.agent.workers.processes.process_table import ProcessTable
from elasticjob._runtime.agent.workers.processes.worker_process import IN_ROUND
from elasticjob._runtime.agent.workers.round_times import RoundTimes
from elasticjob._runtime.contract.messages import Failure, StartRound
from elasticjob._runtime.contract.restart_messages import Guarded

log = logging.getLogger(__name__)


class WorkerActivity:
    """Call `begin_round` when a round starts."""

    def __init__(
        self, pod: str, table: ProcessTable, progress: WorkerProgress, times: RoundTimes, log_watch: LogWatch
    ) -> None:
        self._pod = pod
        self._table = table
        self._progress = progress
        self._times = times
        self._log_watch = log_watch
        self._has_hang_policy = False
        self._guarded: dict[int, Guarded] = {}
        """What the round's workers have reported of time-outs on which torch does not act, by process id."""

    def begin_round(self, start: StartRound) -> None:
        self._has_hang_policy, self._guarded = start.progress_timeout > 0, {}
        self._log_watch.begin_round(start)

    def guard_reported(self, pid: int, message: Guarded) -> None:
        """Record a worker's report of such a time-out; `guard` may change."""
        self._guarded[pid] = message

    @property
    def guard(self) -> HangGuard | None:
        """What ends a hang of the round, if torch does not and the job has no hangPolicy; None if nothing has to."""
        return guard_of(self._guarded.values(), hang_policy=self._has_hang_policy)

    def heartbeats(self) -> tuple[ProgressReport, ...]:
        """Return the last heartbeat of every running worker that has made a step."""
        running = {worker.local_rank for worker in self._table.workers(IN_ROUND).values()}
        return tuple(heartbeat for heartbeat in self._progress.heartbeats() if heartbeat.local_rank in running)

    def last_steps(self) -> tuple[float, ...]:
        """Return when each worker that is monitored for hangs made its last step, as `ProgressReport.time`.

        A worker is monitored from its first step on. A process that trained before is so from the start of a later
        round: it gets as much time to begin as the longest of all starts so far, and has made a step then.

        Where no worker has any of these, the time of the last step in the output of all of them (`spec.logRules`).
        """
        last = {heartbeat.local_rank: heartbeat.time for heartbeat in self.heartbeats()}
        if self._times.longest_start is not None:
            begins = self._times.started_at + self._times.longest_start
            for rank in (w.local_rank for w in self._table.workers(IN_ROUND).values() if w.trained):
                if not self._progress.made_step(rank) and self._progress.began(rank) is None:
                    last[rank] = begins
        if not last and self._log_watch.last_step is not None and self._table.workers(IN_ROUND):
            return (self._log_watch.last_step.time,)
        return tuple(last.values())

    async def dump_stacks(self) -> Failure | None:
        """Log the stacks of all workers; return a HANG failure of the worker farthest behind, None without workers."""
        last, now = {heartbeat.local_rank: heartbeat for heartbeat in self.heartbeats()}, time.monotonic()
        workers = self._table.workers(IN_ROUND)
        running = {self._progress.pid(worker.local_rank) or pid: worker for pid, worker in workers.items()}
        stacks = await dump_stacks({pid: worker.stack_dump_file for pid, worker in running.items()})
        in_log = self._log_watch.last_step
        dumps = []
        for pid, worker in running.items():
            heartbeat = last.get(worker.local_rank)
            since = heartbeat.time if heartbeat else in_log.time if in_log else self._times.started_at
            step, age, log_step = heartbeat.step if heartbeat else None, now - since, in_log.step if in_log else None
            dumps.append(StackDump(worker.rank, step, age, stacks[pid], log_step))
            text = stacks[pid].rstrip() or "(no stack dump: the process is stopped, or does not handle the signal)"
            log.info("rank %d, %.1f s after step %s:\n%s", worker.rank, age, "-" if step is None else step, text)
        behind = farthest_behind(dumps)
        cause = self.guard.cause if self.guard else ""
        return behind.failure(self._pod, time.time(), cause) if behind else None

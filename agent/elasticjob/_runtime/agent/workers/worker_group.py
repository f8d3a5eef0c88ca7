"""The workers of one node: start, watch and stop them, forward their output, find out why they ended."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from elasticjob._runtime.agent.config import AgentConfig
from elasticjob._runtime.agent.monitoring.exits.exiting_process import may_still_write, reason_to_wait
from elasticjob._runtime.agent.monitoring.exits.fast_exit import EarlyExits
from elasticjob._runtime.agent.monitoring.exits.memory_headroom import memory_limit
from elasticjob._runtime.agent.monitoring.exits.stuck_processes import (
    LONGEST_KILL,
    LOOK_INTERVAL,
    BlockedThreads,
    blocked_threads,
    held_resources,
    kill_timeout,
)
from elasticjob._runtime.agent.monitoring.exits.worker_exits import (
    OomCounter,
    WorkerExit,
    failure_of,
    left_at,
    read_error_file,
    read_torchrun_report,
    reported_exception,
    script_succeeded,
    signal_name,
)
from elasticjob._runtime.agent.monitoring.progress.hang_guard import HangGuard, guard_of
from elasticjob._runtime.agent.monitoring.progress.hangs import StackDump, describe_place, dump_stacks, farthest_behind
from elasticjob._runtime.agent.monitoring.progress.start_times import StartTimes
from elasticjob._runtime.agent.monitoring.progress.worker_progress import ProgressReport, WorkerProgress
from elasticjob._runtime.agent.processes import (
    MAX_OOM_SCORE,
    cleaners,
    descendants,
    has_ended,
    is_stopped,
    kill,
    kill_with_children,
    oom_score,
    reap,
    set_oom_score,
    signal_group,
    signal_one,
)
from elasticjob._runtime.agent.reporting.log_options import STDERR, STDOUT
from elasticjob._runtime.agent.reporting.worker_output import (
    FILE_TIMEOUT,
    TORCHRUN_FAILED,
    FileSink,
    OutputSink,
    Tail,
    WorkerPipe,
    wait_for_files,
)
from elasticjob._runtime.agent.start_workers.fork_fallback import fails_at_once
from elasticjob._runtime.agent.start_workers.launcher import Launcher, StartError, WorkerStart
from elasticjob._runtime.agent.start_workers.worker_environment import rendezvous_id, torchrun_env, worker_env
from elasticjob._runtime.agent.workers.restartable_workers import Reported, RestartableWorkers
from elasticjob._runtime.agent.workers.spare_processes import RankInRound, describe_spare_wait, first_note, may_start
from elasticjob._runtime.contract.failures.failure_text import MAX_MESSAGE
from elasticjob._runtime.contract.messages import Failure, FailureClass, NewProcesses, StartRound
from elasticjob._runtime.contract.names import BEFORE_ROUNDS, Backend, RoundId
from elasticjob._runtime.contract.restart_messages import Calling, CollectiveFailed, Guarded, Kept, Parked, Raised
from elasticjob._runtime.system.loop_errors import background_task

log = logging.getLogger(__name__)

CLEANUP_TIMEOUT = 10.0
"""Seconds after the workers' end in which helpers may remove what the workers left in shared memory. They end by
themselves once the workers have; one that has just been started on a busy machine takes seconds to get there."""
LOAD_TIMEOUT = 1.0
"""Seconds after which a process is killed although its program is not loaded. It may be a helper that removes what is
in shared memory; those run the workers' own Python, which is in memory, and take 30 ms on a busy machine."""
LEAVE_TIMEOUT = 10.0
"""Seconds from the end of the grace in which a worker that has left its function may end its process groups. The abort
of many nccl groups and the end of large objects take seconds. A function that goes on does not get this time."""
HOLD_TIMEOUT = 600.0
"""Seconds from the end of the grace in which a worker that counts no step any more waits until no other node counts
one. The store answers as soon as it can. While there is none, no node trains, and the worker has the newest state."""
KEEP_TIMEOUT = 120.0
"""Seconds in which a process that ends for good may copy its state to the memory of the node: 100 GB at 1 GB/s. The
grace begins once it has."""
LEAVE_GRACE = 1.0
"""Seconds that a function has to be left at least, if the grace is shorter: a grace of 0 is meant for processes that
handle SIGTERM, and a process that stays has the newest state."""
FAILED_CALLS = 2
"""Calls of a function in a row that fail before their first step, after which its process is replaced: what is broken
in it may stay, such as a library's state. One alone may be chance."""
SPARE_INTERVAL = 1.0
"""Seconds between two looks at whether the workers have made a step, and spare processes may take processor time: a
step does not wake the agent."""
SET_UP_NOTE = 300.0
"""Seconds between two lines in the log about a script that has not reached its function ahead of a round."""
LOOK_AGAIN = 0.01
"""Seconds between two looks at what nothing reports: that a program is loaded, and the end of the processes that an
exiting worker has started, which are not this process's children until it has ended."""
NOTABLE_EXIT = 0.2
"""Seconds that the end of a process takes if the log has a line about it."""
FILE_TIME_LAG = 0.02
"""Seconds by which the time of a file may be behind the clock."""


_ENDED_PARKED = "rank %d ended while it waited for the next round"
_ENDED_AHEAD = "rank %d has not reached its function ahead of the next round: its script starts again in that round"


@dataclass(frozen=True)
class EndedWorker:
    """A worker that ended."""

    round: RoundId
    local_rank: int
    failure: Failure | None
    """None: the worker exited 0, or the agent stopped it."""
    as_planned: bool = False
    """The worker stopped at the last step of a planned end; its exit code does not matter then."""


@dataclass(frozen=True)
class _Worker:
    round: RoundId
    local_rank: int
    rank: int
    error_file: str
    stack_dump_file: str
    pipes: tuple[WorkerPipe, WorkerPipe]
    """Of stdout and stderr, as `tails`."""
    tails: tuple[Tail, Tail]
    failed_calls: int = 0
    """How many calls of its function in a row have failed by an error of their own before they made a step."""
    trained: bool = False
    """Whether an earlier call of its function made a step, as far as the script reports steps; see `_trains`."""
    ran_ahead: bool = False
    """Whether it ran its script ahead of a round, and has been called since but made no step."""

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()


@dataclass(frozen=True)
class _Exiting:
    """A worker whose program has ended and that holds memory, files or devices."""

    rank: int
    since: float
    """Monotonic time."""
    reason: str = ""
    """Why the next workers wait for its end; empty: they do not wait."""

    def log_end(self) -> None:
        seconds = time.monotonic() - self.since
        if self.reason and seconds > NOTABLE_EXIT:
            text = "the kernel took %.1f s to end the process of rank %d; new workers waited for it: %s"
            log.info(text, seconds, self.rank, self.reason)


class WorkerGroup:
    """The workers of the current round. Workers of two rounds never run at the same time."""

    def __init__(
        self, config: AgentConfig, launcher: Launcher, scratch: Path, stdout: OutputSink, stderr: OutputSink
    ) -> None:
        self._config = config
        self._launcher = launcher
        self._scratch = scratch
        self.progress = WorkerProgress(scratch, config.local_world_size)
        self.restartable = RestartableWorkers(scratch)
        self.restartable.on_message = self._restartable_message
        self.on_end: Callable[[], None] = lambda: None
        """Called when `reap` has something to return although no child has ended."""
        self.on_call: Callable[[], None] = lambda: None
        """Called when a worker calls a function that can be called again."""
        self.on_guard: Callable[[], None] = lambda: None
        """Called when `guard` may have changed."""
        self.on_overdue: Callable[[], None] = lambda: None
        """Called when a collective of the round's workers has exceeded its time-out, on which torch does not act."""
        self.on_results_ended: Callable[[], None] = lambda: None
        """Called once in a stop in which workers wait for `break_collectives`, when none counts a step any more."""
        self._guarded: dict[int, Guarded] = {}
        """What the round's workers have reported of such time-outs, by process id."""
        self._sinks = (stdout, stderr)
        self._oom = OomCounter()
        self._running: dict[int, _Worker] = {}
        self._early_exits = EarlyExits(self._exits)
        launcher.on_fork = self._early_exits.watch
        self._exiting: dict[int, _Exiting] = {}
        """Workers by process id that run no more and whose memory the kernel still frees; `reap` returns them before
        they are reaped. A stop does not wait for them."""
        self._round: tuple[_Worker, ...] = ()
        self._parked: dict[int, _Worker] = {}
        """Workers by process id that wait for the next round."""
        self._late_spares: set[int] = set()
        """Spare processes that have not come to their function in time: something that does not end holds them up."""
        self._spares: dict[int, _Worker] = {}
        """Spare processes by process id: they wait at the function, or run the script up to it."""
        self._spare_timer: asyncio.TimerHandle | None = None
        """Runs while the round's workers need spare processes that may not start yet."""
        self._starting_spares: asyncio.Task[None] | None = None
        self._watching_spares: asyncio.Task[None] | None = None
        """Writes to the log what spare processes wait for that are not at their function."""
        self._spare_starts = 0
        self._announced_spares = False
        """Whether the log has a line in this round about spare processes that may not start yet."""
        self._called: dict[int, float] = {}
        """When each worker called its function in this round, by local rank; monotonic time."""
        self._new_workers: set[int] = set()
        """Process ids of the workers whose program was started for this round."""
        self._launched_at = 0.0
        """When the start of these began; monotonic time."""
        self._script_seconds = 0.0
        """Most seconds from such a start to the function so far."""
        self._may_have_spares = True
        """False once a script has ended before its function outside of a round, and once this node leaves."""
        self._reached_function = False
        """Whether any spare process has come to its function."""
        self._frozen = False
        self._last_start: StartRound | None = None
        self._loading: set[int] = set()
        """Process ids of what the workers have started and the kernel still loads, while the workers are killed."""
        self._interrupted: set[int] = set()
        """Process ids of workers that were asked to leave their function, and have not yet."""
        self._results_ended = False
        """Whether `on_results_ended` was called in this stop."""
        self._may_break = False
        """Whether `break_collectives` was called in this stop."""
        self._discards_state = False
        """Whether what is in the memory of the node is not used after this stop."""
        self._succeeded = set[tuple[RoundId, int]]()
        """Rounds and ranks of workers that have ended with success by themselves."""
        self._ends: list[EndedWorker] = []
        """Workers whose function has ended by itself, or that exit, for the next `reap`."""
        self._unknown_exits: dict[int, int] = {}
        """Exit codes by process id of children that ended before `Launcher.start` returned their ids."""
        self._started = asyncio.Event()
        self._started.set()
        self._started_at = 0.0
        """When the last workers were started; monotonic time."""
        self._times = StartTimes()
        self._longest_start: float | None = None
        """Most seconds from a start to `State.sync` so far; None if no worker has called it."""
        self._start_recorded = False
        """Whether the launcher knows how that start went."""
        self._child_ended = asyncio.Event()
        self._grace_skipped = False
        self._grace_limit: asyncio.TimerHandle | None = None
        self._stopping_since: float | None = None
        """Unix seconds; None while no stop is in progress."""
        self._killed_at = 0.0
        """When the last stop began to send SIGKILL; loop time."""
        self._folders: set[Path] = set()
        """Folders of workers, of this round and of processes that stay."""
        self._files: list[FileSink] = []
        """Log files that are not written completely yet, and those of the running workers."""
        self.non_workers: set[int] = set()
        """Process ids of the agent's children that are no workers, such as health checks."""

    @property
    def stopping(self) -> bool:
        return self._stopping_since is not None

    # ---- start -----------------------------------------------------------------------------------------------------

    def expect_start(self) -> None:
        """Make a `stop` from now on wait for the `start` or `start_ahead` that follows."""
        self._started.clear()
        self.restartable.allow(None)
        self._unknown_exits = {}
        self._frozen = False
        self._succeeded.clear()
        self._oom.reset()

    def expect_no_start(self) -> None:
        """Make no `stop` wait any more: the agent has failed, and the start may never come."""
        self._started.set()

    async def start(self, start: StartRound) -> Failure | None:
        """Start the round's workers; return a START_ERROR failure if the node cannot start them.

        A parked process becomes the worker of its local rank. The others are started.
        """
        workers: list[tuple[_Worker, WorkerStart]] = []
        try:
            self._last_start = start
            self._guarded, self._called, self._announced_spares = {}, {}, False
            self.progress.begin_round(start.round)
            self._times.begin_round()
            await self._end_broken()
            if not start.state_known:
                self._end_outdated()
            called = self._call_parked(start)
            self._round = tuple(called.values())
            missing = self._missing(called)
            self._end_slow_spares(missing)
            if missing and (failure := await self._until_replaceable()):
                return failure
            called |= self._call_spares(start, missing)
            self._round = tuple(called.values())
            for local_rank in self._missing(called):
                workers.append(self._prepare(start, local_rank))
                self._round = (*called.values(), *(worker for worker, _ in workers))
            keep = {*called, *self._spares}
            self._launched_at = time.monotonic()
            self._times.begin_start(self._missing(called))
            pids = await self._launcher.start([worker_start for _, worker_start in workers], keep)
        except StartError as error:
            return self._start_error(start, str(error))
        except OSError as error:  # no descriptor or no space left
            return self._start_error(start, f"cannot prepare the workers: {error}")
        else:
            self._running = called | {pid: worker for pid, (worker, _) in zip(pids, workers, strict=True)}
            self._new_workers = set(pids)
            for pid in self._running:
                self.restartable.repeat(pid)  # of a function that has ended since `_call_parked`
            self._started_at, self._start_recorded = time.monotonic(), not workers
            return None
        finally:
            for _, worker_start in workers:
                os.close(worker_start.stdout)
                os.close(worker_start.stderr)
            self._started.set()
            self._allow_known()
            self._delete_old_folders()  # the evidence in them has been read: a round starts once all have ended

    async def start_ahead(self, provisional: StartRound) -> Failure | None:
        """Start workers ahead of a round; return once each waits at its function, has ended before it, or is stopped.

        Those that wait are called in the next round. If the others had a reason to end, they show it again there.
        Processes that wait already stay. Return a failure of this node if what its last processes hold does not end.
        """
        self._end_slow_spares({w.local_rank for pid, w in self._spares.items() if pid in self._late_spares})
        self._take_spares()
        failure = await self._until_replaceable()
        if failure is None and (missing := self._missing(self._parked)):
            started = await self._launch_ahead(self._ahead_of_round(provisional), missing)
            self._parked |= started
        self._started.set()
        self._allow_known()
        self.on_end()  # for what has ended before its process id was known
        while not await self._until(lambda: all(map(self.restartable.parked, self._parked)), SET_UP_NOTE):
            log.info("the script still runs up to its function, ahead of the next round; the others do not wait for it")
        return failure

    def _ahead_of_round(self, provisional: StartRound) -> StartRound:
        """Return an assignment with folders and log files of its own, if this node started workers before."""
        if self._last_start is None:
            return provisional
        self._spare_starts += 1
        return replace(provisional, round=RoundId(*BEFORE_ROUNDS[:2], self._spare_starts))

    def _take_spares(self) -> None:
        """Let spare processes of ranks without a process take their places, also those that are not at the function."""
        missing = self._missing(self._parked)
        for pid in [pid for pid, worker in self._spares.items() if worker.local_rank in missing]:
            self._parked[pid] = self._spares.pop(pid)
            set_oom_score(pid, oom_score())

    async def _launch_ahead(self, provisional: StartRound, local_ranks: Collection[int]) -> dict[int, _Worker]:
        """Start workers that run the script up to the function; return them by process id, {} if they cannot start."""
        workers: list[tuple[_Worker, WorkerStart]] = []
        keep = descendants(os.getpid())
        try:
            for local_rank in local_ranks:
                workers.append(self._prepare(provisional, local_rank))
            pids = await self._launcher.start([worker_start for _, worker_start in workers], keep)
        except (StartError, OSError, RuntimeError) as error:  # RuntimeError: no more threads
            log.info("the script is not run ahead of its round: %s", error)
            kill(self._launcher.without_preforked(descendants(os.getpid(), without=keep)))
            for worker, _ in workers:
                worker.close()
            return {}
        else:
            return {pid: worker for pid, (worker, _) in zip(pids, workers, strict=True)}
        finally:
            for _, worker_start in workers:
                os.close(worker_start.stdout)
                os.close(worker_start.stderr)

    def _allow_known(self) -> None:
        """Refuse processes that are no workers."""
        self.restartable.allow({*self._running, *self._parked, *self._spares})

    # ---- spare processes -------------------------------------------------------------------------------------------

    def _want_spares(self) -> None:
        """Start spare processes for the workers of this round without one, once all workers train."""
        if self._spare_timer is None:
            self._spare_timer = asyncio.get_running_loop().call_later(SPARE_INTERVAL, self._look_for_spares)

    def _look_for_spares(self) -> None:
        self._spare_timer = None
        ranks = [worker.local_rank for worker in self._running.values()]
        if not ranks or self.stopping or self.progress.ending or not self._may_start_spares:
            return  # the next round asks for them again
        if not (missing := self._missing(self._spares)):
            return
        found = [RankInRound(self.progress.made_step(rank), self._called.get(rank)) for rank in ranks]
        if self._started.is_set() and may_start(found, self._script_seconds, time.monotonic()):
            self._starting_spares = background_task(self._start_spares(missing))
            return
        if not self._announced_spares:
            self._announced_spares = True
            log.info("%s", describe_spare_wait(missing, self._script_seconds))
        self._want_spares()

    @property
    def _may_start_spares(self) -> bool:
        return self._may_have_spares and not self._frozen

    async def _start_spares(self, local_ranks: Collection[int]) -> None:
        assert self._last_start is not None  # noqa: S101
        self._spare_starts += 1  # each start has folders and log files of its own
        round_id = RoundId(*BEFORE_ROUNDS[:2], self._spare_starts)
        self._started.clear()
        self._unknown_exits = {}
        self.restartable.allow(None)
        try:
            provisional = replace(self._last_start, round=round_id, master_addr="", master_port=0)
            begun = await self._launch_ahead(provisional, local_ranks)
            self._spares |= begun
        finally:
            self._started.set()
            self._allow_known()
        for pid, worker in begun.items():
            set_oom_score(pid, MAX_OOM_SCORE)  # without memory for all, the kernel must not choose a worker
            log.info("process %d starts as the spare of local rank %d", pid, worker.local_rank)
        if self._watching_spares is None or self._watching_spares.done():
            self._watching_spares = background_task(self._watch_spares())
        if not self._may_start_spares:
            self.end_spares()
        self.on_end()  # for what has ended meanwhile

    def _spares_on_their_way(self) -> dict[int, _Worker]:
        return {pid: worker for pid, worker in self._spares.items() if not self.restartable.parked(pid)}

    async def _watch_spares(self) -> None:
        """Write to the log what spare processes wait for that are not at their function, until none is left."""
        begun, seconds = time.monotonic(), first_note(self._script_seconds)
        while not await self._until(lambda: not self._spares_on_their_way(), seconds):
            late = self._spares_on_their_way()
            self._late_spares |= late.keys()
            stacks = await dump_stacks({pid: worker.stack_dump_file for pid, worker in late.items()})
            for pid, worker in late.items():
                text = "process %d, the spare of local rank %d, is not at its function after %.0f s: %s"
                seconds = time.monotonic() - begun
                log.warning(text, pid, worker.local_rank, seconds, describe_place(stacks[pid], pid))

    def _call_spares(self, start: StartRound, local_ranks: Collection[int]) -> dict[int, _Worker]:
        """Let the spare processes of these local ranks call their functions; return those that do, by process id."""
        called: dict[int, _Worker] = {}
        for pid, worker in tuple(self._spares.items()):
            if worker.local_rank in local_ranks and self.restartable.parked(pid) and not is_stopped(pid):
                del self._spares[pid]
                set_oom_score(pid, oom_score())
                log.info("process %d, the spare of local rank %d, takes its place", pid, worker.local_rank)
                called |= self._call(start, pid, worker)
        return called

    def _end_slow_spares(self, local_ranks: Collection[int]) -> None:
        """Kill spare processes of these local ranks that are not at the function: they would compete with new workers
        for locks, ports and memory. New workers wait for their end."""
        for pid, worker in tuple(self._spares.items()):
            if worker.local_rank in local_ranks and not self.restartable.parked(pid):
                del self._spares[pid]
                text = "process %d, the spare of local rank %d, is not at its function: it ends, and a new one starts"
                log.info(text, pid, worker.local_rank)
                self._discard(pid, worker)

    def _end_outdated(self) -> None:
        """Kill the processes that have run the script ahead of this round: what they have read may be outdated."""
        ahead = [pid for pid, worker in self._parked.items() if worker.round.is_ahead or worker.ran_ahead]
        outdated = {pid: self._parked.pop(pid) for pid in ahead} | self._spares
        self._spares = {}
        for pid, worker in outdated.items():
            text = "no node has a training state, and process %d of local rank %d may have read an old one: it ends"
            log.info(text, pid, worker.local_rank)
            self._discard(pid, worker)

    def end_spares(self, reason: str = "no round follows on this node", *, for_good: bool = False) -> None:
        """Kill all spare processes, and start no more if `for_good`. They have trained nothing: nothing is kept."""
        self._may_have_spares = self._may_have_spares and not for_good
        for pid, worker in self._spares.items():
            log.info("process %d, the spare of local rank %d, ends: %s", pid, worker.local_rank, reason)
            kill_with_children(pid)
            worker.close()
        self._spares = {}
        self._child_ended.set()  # `_watch_spares` has none left to watch

    def _spare_ended(self, pid: int, code: int) -> bool:
        """Forget a spare process that has ended; return False if it is none."""
        worker = self._spares.pop(pid, None)
        if worker is None:
            return False
        if code == -signal.SIGKILL and self._oom.unclaimed:
            self._oom.claim()  # no worker has ended by this
        self._may_have_spares = self._may_have_spares and self._reached_function
        end = signal_name(-code) if code < 0 else f"exit code {code}"
        again = "the next round starts another one" if self._may_have_spares else "no other one starts"
        log.info("the spare process of local rank %d ended (%s): %s", worker.local_rank, end, again)
        worker.close()
        return True

    async def _until_replaceable(self) -> Failure | None:
        """Wait for the exiting workers that hold what new workers may need; return a failure if they do not end.

        The wait ends when a stop begins: that ends the workers which start then.
        """

        def needed() -> set[int]:
            return {pid for pid, exiting in self._exiting.items() if exiting.reason}

        self._killed_at = asyncio.get_running_loop().time()
        replaceable = await self._until(lambda: self.stopping or not needed(), LONGEST_KILL)
        return None if replaceable else self._abandon(needed())

    def _call_parked(self, start: StartRound) -> dict[int, _Worker]:
        """Let all parked processes call their functions in the round; return those that do, by process id."""
        called: dict[int, _Worker] = {}
        for local_rank in range(self._config.processes):
            self._folder(start, local_rank)  # if this fails, all processes are parked still
        while self._parked:
            pid, before = self._parked.popitem()
            called |= self._call(start, pid, before)
        return called

    def _missing(self, called: Mapping[int, _Worker]) -> list[int]:
        return sorted(set(range(self._config.processes)) - {worker.local_rank for worker in called.values()})

    def _call(self, start: StartRound, pid: int, before: _Worker) -> dict[int, _Worker]:
        """Let a process that waits call its function; return it by process id, {} if it has ended."""
        error_file = str(self._folder(start, before.local_rank) / "error.json")
        tails = (Tail(), Tail())
        rank = start.rank + before.local_rank
        ran_ahead = before.ran_ahead or before.round.is_ahead
        worker = replace(before, round=start.round, rank=rank, error_file=error_file, tails=tails, ran_ahead=ran_ahead)
        for pipe, tail in zip(before.pipes, tails, strict=True):
            pipe.begin_round(self._prefix(before.local_rank, rank), tail)
        if self.restartable.call_again(pid, start.round, self._worker_env(start, worker)):
            return {pid: worker}
        kill_with_children(pid)
        worker.close()
        return {}

    async def _end_broken(self) -> None:
        """Kill parked processes that fail again and again, once the node's memory has the state that they hold."""
        broken = {pid: worker for pid, worker in self._parked.items() if worker.failed_calls >= FAILED_CALLS}
        for pid, worker in broken.items():
            text = "rank %d failed %d times in a row before its first step: a new process takes its place"
            log.warning(text, worker.rank, worker.failed_calls)
            if not is_stopped(pid):
                self.restartable.end(pid, at_once=True)
        await self._until(lambda: self.stopping or not any(map(self.restartable.keeping, broken)), KEEP_TIMEOUT)
        for pid in broken.keys() & self._parked.keys():  # others have ended since
            self._discard(pid, self._parked.pop(pid))

    def _discard(self, pid: int, worker: _Worker) -> None:
        """Kill a process that new workers may have to wait for."""
        self._exiting[pid] = _Exiting(worker.rank, time.monotonic(), reason_to_wait(pid))
        kill_with_children(pid)
        worker.close()

    def _prepare(self, start: StartRound, local_rank: int) -> tuple[_Worker, WorkerStart]:
        rank = start.rank + local_rank
        directory = self._folder(start, local_rank)
        (out_read, out_write), (err_read, err_write) = _two_pipes()
        tails = (Tail(), Tail())
        pipes = (
            self._pipe(start.round, local_rank, rank, STDOUT, out_read, tails[0]),
            self._pipe(start.round, local_rank, rank, STDERR, err_read, tails[1]),
        )
        files = (str(directory / "error.json"), str(directory / "stacks"))
        worker = _Worker(start.round, local_rank, rank, *files, pipes, tails)
        own_agent = self._config.backend is Backend.C10D
        env = self._torchrun_env(start, worker) if own_agent else self._worker_env(start, worker)
        return worker, WorkerStart(env, out_write, err_write)

    def _folder(self, start: StartRound, local_rank: int) -> Path:
        """Return the folder of a worker's files, which exists then."""
        folder = self._scratch / f"{start.round}-{local_rank}"
        folder.mkdir(exist_ok=True)
        self._folders.add(folder)
        return folder

    def _delete_old_folders(self) -> None:
        """Delete the folders of workers that have ended. Those of a process that stays are of several rounds."""
        workers = (*self._round, *self._running.values(), *self._parked.values(), *self._spares.values())
        needed = {Path(path).parent for worker in workers for path in (worker.error_file, worker.stack_dump_file)}
        for folder in self._folders - needed:
            shutil.rmtree(folder, ignore_errors=True)
        self._folders &= needed

    def _worker_env(self, start: StartRound, worker: _Worker) -> dict[str, str]:
        return worker_env(
            start,
            local_rank=worker.local_rank,
            local_world_size=self._config.local_world_size,
            role=self._config.role,
            run_id=self._config.run_id,
            error_file=worker.error_file,
            agent_socket=self.progress.path,
            restart_socket=self.restartable.path,
            stack_dump_file=worker.stack_dump_file,
            base=self._config.env,
        )

    def _torchrun_env(self, start: StartRound, worker: _Worker) -> dict[str, str]:
        return torchrun_env(
            start,
            local_world_size=self._config.local_world_size,
            role=self._config.role,
            address=self._config.address,
            endpoint=self._config.endpoint,
            run_id=self._config.run_id,
            join_timeout=self._config.join_timeout,
            error_file=worker.error_file,
            base=self._config.env,
        )

    def _pipe(
        self, round_id: RoundId, local_rank: int, rank: int, stream: int, descriptor: int, tail: Tail
    ) -> WorkerPipe:
        config, logs = self._config, self._config.logs
        sink = self._sinks[stream == STDERR] if logs.to_console(local_rank, stream) else None
        file = None
        if logs.to_file(local_rank, stream):
            file = FileSink(logs.path(config.pod, str(round_id), local_rank, stream))
            self._files = [*(other for other in self._files if other.writing), file]
        return WorkerPipe(descriptor, self._prefix(local_rank, rank), sink, tail, file)

    def _prefix(self, local_rank: int, rank: int) -> str:
        """Return what stands before each line of a worker's output."""
        host = socket.gethostname()
        return self._config.logs.line_prefix(role=self._config.role, local_rank=local_rank, rank=rank, hostname=host)

    def _start_error(self, start: StartRound, message: str) -> Failure:
        return Failure(FailureClass.START_ERROR, self._config.pod, time.time(), rank=start.rank, message=message[:1024])

    # ---- watch -----------------------------------------------------------------------------------------------------

    def reap(self) -> list[EndedWorker]:
        """Reap all children that have ended; return the workers among them, the likely root cause before its effects.

        Workers without a failure come first.
        """
        codes = self._unknown_exits | dict(reap())
        self._unknown_exits = {}
        found, self._ends = self._ends, []
        for pid, code in codes.items():
            torchrun_worker_env = self._launcher.child_ended(pid, code)
            self._early_exits.forget(pid)
            if exiting := self._exiting.pop(pid, None):
                exiting.log_end()
                continue
            if worker := self._running.pop(pid, None):
                found += self._ended_worker(worker, pid, code)
            elif parked := self._parked.pop(pid, None):
                if parked.round.is_ahead:
                    self._times.ended_ahead()
                log.info(_ENDED_AHEAD if parked.round.is_ahead else _ENDED_PARKED, parked.rank)
                parked.close()
            elif self._spare_ended(pid, code):
                pass
            elif torchrun_worker_env is not None:
                found += self._ended_torchrun_worker(torchrun_worker_env, code)
            elif not self._started.is_set():
                self._unknown_exits[pid] = code
        self._child_ended.set()
        self._look_for_results_end()
        return sorted(found, key=_order)

    def _exits(self, pid: int, code: int) -> None:
        """Handle a worker that exits: its program runs no more, and it cannot be reaped yet."""
        if (spare := self._spares.get(pid)) and self._spare_ended(pid, code):
            self._exiting[pid] = _Exiting(spare.rank, time.monotonic(), reason_to_wait(pid))
            return
        worker = self._running.get(pid)
        if worker is None or (may_still_write(pid) and not has_ended(pid)):
            return  # members of the next round may write the same files on other machines
        if code == 0 and not (self.stopping or self.progress.stopped(worker.local_rank)):
            return  # the code may be unknown, and matters
        del self._running[pid]
        exiting = self._exiting[pid] = _Exiting(worker.rank, time.monotonic())
        self._ends += self._ended_worker(worker, pid, code)
        self._announce_ends()  # before the next look: all nodes wait for this report, new workers here for the reason
        if self._exiting.get(pid) is exiting:
            reason = reason_to_wait(pid)
            self._exiting[pid] = replace(exiting, reason="" if has_ended(pid) else reason)

    def _announce_ends(self) -> None:
        self._child_ended.set()
        self._look_for_results_end()
        if self._ends and self._started.is_set():
            self.on_end()

    @property
    def _not_parked_yet(self) -> set[int]:
        """Process ids of the workers that were asked to leave their function in this stop, and run."""
        return self._interrupted & set(self._running)

    def _look_for_results_end(self) -> None:
        interrupted = self._not_parked_yet
        if not self._results_ended and self.restartable.all_results_ended(interrupted):
            self._results_ended = True
            self.on_results_ended()

    def _ended_worker(self, worker: _Worker, pid: int, code: int) -> list[EndedWorker]:
        if self.restartable.parked(pid):
            return []  # its function had ended before, and that was returned then
        if self.progress.stopped(worker.local_rank):
            return [EndedWorker(worker.round, worker.local_rank, None, as_planned=True)]
        if code < 0 and script_succeeded(worker.error_file, pid):
            log.info("rank %d succeeded; its process ended by %s in its clean-up", worker.rank, signal_name(-code))
            code = 0
        self._launcher.record_early_variable(worker.error_file)
        failure = self._failure(worker, code)
        if failure is None and self._ended_by_itself(worker, pid):
            self._succeeded.add((worker.round, worker.rank))
        self._record_start(worker, failure)
        return [EndedWorker(worker.round, worker.local_rank, failure)]

    def find_early_variables(self) -> None:
        """Let the launcher know if a script sets variables that its fork has read before."""
        for worker in self._running.values():
            self._launcher.record_early_variable(worker.error_file)

    def ended_ranks(self, round_id: RoundId) -> tuple[int, ...]:
        """Return the ranks of a round whose workers succeeded before a stop; none for a round before the last one."""
        return tuple(sorted(rank for round_, rank in self._succeeded if round_ == round_id))

    def _ended_by_itself(self, worker: _Worker, pid: int) -> bool:
        """Return whether a worker that has not failed ended before a stop: a handler of SIGTERM may exit with 0 too."""
        if self._stopping_since is None:
            return True
        left = left_at(worker.error_file, pid)
        return left is not None and left < self._stopping_since

    def _restartable_message(self, pid: int, message: Reported) -> None:
        """Handle what a worker says whose function can be called again; None: it says no more."""
        worker = self._running.get(pid)
        if worker is None:
            self._child_ended.set()  # `start_ahead` waits for a message of a worker that is parked
            if isinstance(message, Parked) and message.round.is_ahead:
                self._times.reached_function_ahead()
            if isinstance(message, Parked) and (spare := self._spares.get(pid)):
                self._reached_function = True
                log.info("process %d waits at its function, as the spare of local rank %d", pid, spare.local_rank)
            return
        match message:
            case Calling(spare_process=spare_process):
                self._times.called(worker.local_rank)
                self.on_call()
                self._called[worker.local_rank] = time.monotonic()
                if pid in self._new_workers:
                    self._new_workers.discard(pid)
                    self._script_seconds = max(self._script_seconds, time.monotonic() - self._launched_at)
                if spare_process:
                    self._want_spares()
            case Kept():
                self._child_ended.set()
            case Guarded(round=round_id) | CollectiveFailed(round=round_id) if (
                round_id != worker.round or self.stopping
            ):
                pass
            case Guarded():
                self._guarded[pid] = message
                self.on_guard()
            case CollectiveFailed(message=text, overdue=True):
                log.warning("rank %d: %s", worker.rank, text[:MAX_MESSAGE])
                self.on_overdue()
            case CollectiveFailed(message=text):
                kind, pod = FailureClass.COLLECTIVE_FAILED, self._config.pod
                failure = Failure(kind, pod, time.time(), rank=worker.rank, message=text[:MAX_MESSAGE])
                self._ends.append(EndedWorker(worker.round, worker.local_rank, failure))
            case Raised(exception=exception, message=text):
                if not self.stopping:
                    failure = self._raised(worker, exception, text)
                    self._record_start(worker, failure)
                    self._running[pid] = self._count_failed_call(worker, failure)
                    self._ends.append(EndedWorker(worker.round, worker.local_rank, failure))
            case Parked(at_last_step=True):
                self._ends.append(EndedWorker(worker.round, worker.local_rank, None, as_planned=True))
            case None if pid in self._interrupted:  # it returned at that moment, or runs another program by now
                signal_group(pid, signal.SIGTERM)
            case _:
                pass
        self._announce_ends()

    def _raised(self, worker: _Worker, exception: str, text: str) -> Failure:
        """Return the failure of a worker whose function raised an exception."""
        for pipe in worker.pipes:
            pipe.drain()
        out, err = worker.tails
        place = err.place if err.exception and err.exception[0] == exception else ""
        evidence = WorkerExit(
            worker.rank, 1, time.time(), exception=(exception, text), lines=err.lines, output=out.lines, place=place
        )
        return failure_of(evidence, self._config.pod)

    def _count_failed_call(self, worker: _Worker, failure: Failure) -> _Worker:
        """Return a worker with the number of its failed calls. One that failed because of a peer counts as before."""
        if failure.kind is FailureClass.COLLECTIVE_FAILED:
            return worker
        return replace(worker, failed_calls=0 if self._trains(worker) else worker.failed_calls + 1)

    def _trains(self, worker: _Worker) -> bool:
        """Return whether a worker has made a step in this round, or may have: its script reports none, and it has been
        in its function for long."""
        if self.progress.made_step(worker.local_rank):
            return True
        rank = RankInRound(made_step=False, called=self._called.get(worker.local_rank))
        return not self.progress.has_steps and may_start([rank], self._script_seconds, time.monotonic())

    def _record_start(self, worker: _Worker, failure: Failure | None) -> None:
        """Let the launcher know, by the first worker whose end says so, whether the workers failed at once."""
        if self._start_recorded or self.stopping:
            return
        seconds = time.monotonic() - self._started_at
        failed = fails_at_once(failure, seconds, made_step=self.progress.made_step(worker.local_rank))
        if failed is not None:
            self._start_recorded = True
            self._launcher.record_start(failed_at_once=failed)

    def _ended_torchrun_worker(self, env: Mapping[str, str], code: int) -> list[EndedWorker]:
        """Return the failure of a torchrun's worker before torchrun reports it, unless torchrun restarts the worker.

        torchrun's own report may come 30 s later: it waits that long for workers stuck in a collective. A worker that
        ended by SIGTERM was stopped by torchrun and has not failed.
        """
        if code in (0, -signal.SIGTERM) or env.get("TORCHELASTIC_MAX_RESTARTS") != "0":
            return []
        ended = []
        for torchrun in self._running.values():
            if env.get("TORCHELASTIC_RUN_ID") != rendezvous_id(self._config.run_id, torchrun.round):
                continue  # a worker of an earlier round, or of another torchrun
            worker = replace(torchrun, rank=int(env["RANK"]), error_file=env.get("TORCHELASTIC_ERROR_FILE", ""))
            if failure := self._failure(worker, code):
                ended.append(EndedWorker(worker.round, worker.local_rank, failure))
        return ended

    def _failure(self, worker: _Worker, code: int) -> Failure | None:
        """Return why a worker ended; None when it exited 0, or when the agent's stop ended it."""
        for pipe in worker.pipes:
            pipe.drain()
        if code == 0:
            return None
        out, err = worker.tails
        rank = worker.rank
        if self._config.backend is Backend.C10D:
            rank, code = read_torchrun_report(err.lines) or (rank, code)
        recorded = read_error_file(worker.error_file)
        if recorded is not None and recorded.name == TORCHRUN_FAILED:
            recorded = None
        if self._stopping_since is not None:
            if not (recorded and recorded.time < self._stopping_since - FILE_TIME_LAG):
                return None
            code = 1  # the worker had failed before the stop; the signal that ended it was the agent's
        exception = (recorded.name, recorded.text) if recorded else reported_exception(code, err.exception)
        evidence = WorkerExit(
            rank=rank,
            code=code,
            time=recorded.time if recorded else time.time(),
            exception=exception,
            lines=err.lines,
            output=out.lines,
            oom_killed=self._oom.unclaimed,
            memory_limit=memory_limit(),
            place=recorded.place if recorded else err.place,
        )
        failure = failure_of(evidence, self._config.pod)
        if failure.kind is FailureClass.OOM_KILLED:
            self._oom.claim()
        return failure

    def freeze(self, on: bool) -> None:
        """Send SIGSTOP, or SIGCONT if not `on`, to all processes of the workers, and to those they start meanwhile."""
        self._frozen = on
        if on:
            self.end_spares("this node is cut off")  # the script must not write up to its function either
        signalled = set[int]()
        while left := self._processes() - signalled:
            for pid in left:
                signal_one(pid, signal.SIGSTOP if on else signal.SIGCONT)
            signalled |= left

    def heartbeats(self) -> tuple[ProgressReport, ...]:
        """Return the last heartbeat of every running worker that has made a step."""
        running = {worker.local_rank for worker in self._running.values()}
        return tuple(heartbeat for heartbeat in self.progress.heartbeats() if heartbeat.local_rank in running)

    def last_steps(self) -> tuple[float, ...]:
        """Return when each worker that is monitored for hangs made its last step, as `ProgressReport.time`.

        A worker is monitored from its first step on. A process that trained before is so from the start of a later
        round: it gets as much time to begin as the longest of all starts so far, and has made a step then.
        """
        last = {heartbeat.local_rank: heartbeat.time for heartbeat in self.heartbeats()}
        if self._longest_start is not None:
            begins = self._started_at + self._longest_start
            for rank in (w.local_rank for w in self._running.values() if w.trained):
                if not self.progress.made_step(rank) and self.progress.began(rank) is None:
                    last[rank] = begins
        return tuple(last.values())

    async def dump_stacks(self) -> Failure | None:
        """Log the stacks of all workers; return a HANG failure of the worker farthest behind, None without workers."""
        last, now = {heartbeat.local_rank: heartbeat for heartbeat in self.heartbeats()}, time.monotonic()
        running = {self.progress.pid(worker.local_rank) or pid: worker for pid, worker in self._running.items()}
        stacks = await dump_stacks({pid: worker.stack_dump_file for pid, worker in running.items()})
        dumps = []
        for pid, worker in running.items():
            heartbeat = last.get(worker.local_rank)
            step, age = (heartbeat.step, now - heartbeat.time) if heartbeat else (None, now - self._started_at)
            dumps.append(StackDump(worker.rank, step, age, stacks[pid]))
            text = stacks[pid].rstrip() or "(no stack dump: the process is stopped, or does not handle the signal)"
            log.info("rank %d, %.1f s after step %s:\n%s", worker.rank, age, "-" if step is None else step, text)
        behind = farthest_behind(dumps)
        cause = self.guard.cause if self.guard else ""
        return behind.failure(self._config.pod, time.time(), cause) if behind else None

    @property
    def guard(self) -> HangGuard | None:
        """What ends a hang of the round, if torch does not and the job has no hangPolicy; None if nothing has to."""
        hang_policy = self._last_start is not None and self._last_start.progress_timeout > 0
        return guard_of(self._guarded.values(), hang_policy=hang_policy)

    @property
    def has_state(self) -> bool:
        """Whether this node may have a training state: in memory, or in a process that has trained and stays."""
        return self.progress.has_copy or any(worker.trained for worker in self._parked.values())

    # ---- stop ------------------------------------------------------------------------------------------------------

    async def stop(
        self,
        grace: float,
        first: signal.Signals = signal.SIGTERM,
        report_hang: Callable[[Failure], None] | None = None,
        *,
        park: bool = False,
        job_goes_on: bool = False,
        at_once: bool = False,
        at_most: float = math.inf,
    ) -> Failure | None:
        """Send the `first` signal, wait for `grace` seconds, SIGKILL the workers and all they have started.

        With a grace of 0 the `first` signal is not sent. `report_hang`: dump the stacks before, and call this with the
        failure of the worker farthest behind. `park`: workers whose function can be called again leave it instead, and
        their processes stay (`has_parked`). `job_goes_on`: processes that wait already run no more of the script.
        `at_once`: only SIGKILL. `at_most`: seconds after which SIGKILL follows, also to a process that copies its
        state. Return a failure of this node if processes survive SIGKILL, else None.
        """
        self._stopping_since, self._grace_skipped = time.time(), False
        self._results_ended = self._may_break = False
        self._child_ended.set()
        await self._started.wait()
        if report_hang is not None and (failure := await self.dump_stacks()) is not None:
            report_hang(failure)
        self.progress.release()
        self.limit_grace(at_most)
        park = park and not at_once
        if not at_once:
            self._begin_stop(first if grace > 0 else None, park=park, job_goes_on=job_goes_on)
        else:
            self._take_back_parked(set(self._parked))
            self.end_spares()
        if report_hang is not None:
            kill(filter(is_stopped, self._running))  # nothing that was sent reaches them, and the other nodes wait
        if self._interrupted:  # after a hang the grace is shorter: it is for processes that are lost anyway
            grace = max(grace, self._config.stop_grace, LEAVE_GRACE)
        await self._until(
            lambda: self._grace_skipped or not any(map(self.restartable.keeping, self._running)), KEEP_TIMEOUT
        )
        await self._until(lambda: self._grace_skipped or self._have_ended(park=park), grace)
        self._kill_those_that_count()
        await self._until(lambda: self._grace_skipped or not self._hold(), HOLD_TIMEOUT)
        await self._until(lambda: self._grace_skipped or not self._are_leaving(), LEAVE_TIMEOUT)
        self._interrupted = set()
        all_ended = await self._kill_all()
        if self._discards_state:
            self._discards_state = False
            self.progress.discard_copies()
        self._times.ended(self.progress.began)
        kept = {worker.pipes for worker in self._parked.values()}
        for worker in self._round:
            if worker.pipes not in kept:
                worker.close()
        self._round = ()
        self._stopping_since = None
        if self._grace_limit is not None:
            self._grace_limit.cancel()
            self._grace_limit = None
        return None if all_ended else self._abandon(self._processes())

    @property
    def new_processes(self) -> NewProcesses:
        """What has to be started for the next round, while no worker runs."""
        spares = {pid: worker for pid, worker in self._spares.items() if self.restartable.parked(pid)}
        missing = self._missing(self._parked | spares)
        times = self._times
        return NewProcesses(
            len(missing),
            times.start_seconds,
            times.form_seconds,
            times.may_start_ahead,
            keeps_newest_state=times.synced and not self.progress.has_shard,
        )

    @property
    def has_parked(self) -> bool:
        """Whether processes wait for the next round."""
        return bool(self._parked)

    def _begin_stop(self, first: signal.Signals | None, *, park: bool, job_goes_on: bool) -> None:
        """Interrupt the functions that can be called again if `park`; send the `first` signal to the other workers."""
        # A process that was started ahead of the round, and is not at its function yet, may be stuck.
        self._take_back_parked({pid for pid in self._parked if not (park and self.restartable.parked(pid))})
        if park:
            self._interrupted = {pid for pid in self._running if self.restartable.interrupt(pid)}
            self._look_for_results_end()
        else:
            self.end_spares()
        for pid in set(self._running) - self._interrupted:
            if not self.restartable.end(pid, at_once=job_goes_on) and first is not None:
                signal_group(pid, signal.SIGKILL if job_goes_on else first)

    def _take_back_parked(self, pids: Collection[int]) -> None:
        """Let parked processes end like workers that run."""
        ends = {pid: self._parked.pop(pid) for pid in pids}
        self._round, self._running = (*self._round, *ends.values()), self._running | ends

    def _have_ended(self, *, park: bool) -> bool:
        """Return whether no worker runs. Workers whose function has ended are parked if `park`."""
        if park:
            parked = {
                pid: self._after_call(worker) for pid, worker in self._running.items() if self.restartable.parked(pid)
            }
            self._parked |= parked
            self._running = {pid: worker for pid, worker in self._running.items() if pid not in parked}
        return not (self._running or self._launcher.has_shim_processes)

    def _after_call(self, worker: _Worker) -> _Worker:
        """Return a worker that is parked; note how long its round took to begin."""
        if (began := self.progress.began(worker.local_rank)) is not None:
            self._longest_start = max(self._longest_start or 0.0, began - self._started_at)
        return replace(worker, failed_calls=0, trained=True, ran_ahead=False) if self._trains(worker) else worker

    def _are_leaving(self) -> bool:
        """Return whether a worker has left its function and still ends its process groups; park those that are done."""
        if self._interrupted:
            self._have_ended(park=True)
        has_left, has_ended_results = self.restartable.interrupted, self.restartable.results_ended
        return any(has_left(pid) or has_ended_results(pid) for pid in self._not_parked_yet)

    def _hold(self) -> bool:
        """Return whether a worker waits for `break_collectives`."""
        return not self._may_break and any(map(self.restartable.results_ended, self._not_parked_yet))

    def _kill_those_that_count(self) -> None:
        """Kill workers that have not left in their grace, if others wait until these count no step any more."""
        interrupted = self._not_parked_yet
        if any(map(self.restartable.results_ended, interrupted)):
            for pid in interrupted:
                if not self.restartable.results_ended(pid) and not self.restartable.interrupted(pid):
                    kill_with_children(pid)

    def break_collectives(self) -> None:
        """Let the workers that wait with it break their collectives, and leave their functions."""
        self._may_break = True
        self._child_ended.set()
        for pid in self._not_parked_yet:
            self.restartable.break_collectives(pid)

    def discard_state(self) -> None:
        """During a stop: let nothing be used of what is in the memory of the node, once its workers have ended."""
        self._discards_state = True

    def _abandon(self, processes: set[int]) -> Failure:
        """Stop waiting for processes that survive SIGKILL; the GPU and memory they hold are lost to this node.

        The machine is only suspected: its kernel may free them later.
        """
        stuck = sorted(processes)
        self.non_workers.update(stuck)
        self._running = {}
        self._exiting = {pid: exiting for pid, exiting in self._exiting.items() if pid not in processes}
        self._loading = set()
        state = "in an uninterruptible sleep" if blocked_threads(stuck) else "still alive"
        seconds = asyncio.get_running_loop().time() - self._killed_at
        message = f"processes {state} {seconds:.0f} s after SIGKILL: {', '.join(map(str, stuck))}"
        pod = self._config.pod
        return Failure(FailureClass.DEVICE_UNHEALTHY, pod, time.time(), message=message, suspected=True)

    async def until_gone(self, seconds: float) -> None:
        """Wait up to `seconds` until killed processes that still exit are gone, with the memory and devices they hold.

        A `stop` does not wait for them: their program runs no more.
        """
        await self._until(lambda: not self._exiting, seconds)

    async def finish_log_files(self) -> None:
        """Wait until the workers' log files are written; for at most FILE_TIMEOUT in total, since storage may hang."""
        await asyncio.to_thread(wait_for_files, self._files, FILE_TIMEOUT)

    def limit_grace(self, seconds: float) -> None:
        """End the grace period of a `stop` in progress after `seconds`, unless it ends before; infinite: no limit."""
        loop = asyncio.get_running_loop()
        at = loop.time() + seconds
        if seconds == math.inf or (self._grace_limit is not None and self._grace_limit.when() <= at):
            return
        if self._grace_limit is not None:
            self._grace_limit.cancel()
        self._grace_limit = loop.call_at(at, self._skip_grace)

    def _skip_grace(self) -> None:
        self._grace_skipped = True
        self._child_ended.set()

    def _processes(self) -> set[int]:
        """Return the workers that have not ended, and the live processes they have started.

        Workers that are parked or exit, and spare processes, are left out.
        """
        found = descendants(os.getpid(), without={*self.non_workers, *self._parked, *self._spares})
        return (self._launcher.without_preforked(found) | set(self._running)) - set(self._exiting)

    async def _kill_all(self) -> bool:
        """Kill all processes of the workers, the cleaners among them last; return whether none is left."""
        self._killed_at = asyncio.get_running_loop().time()
        if not self._processes():
            return True
        if not await self._until_killed(self._kill_all_but_cleaners):
            return False
        cleaned_up = await self._until(lambda: not self._processes(), CLEANUP_TIMEOUT)
        return cleaned_up or await self._until_killed(self._kill_rest)

    async def _until_killed(self, killed: Callable[[], bool]) -> bool:
        """Wait until processes have been killed; return False if they are stuck in the kernel."""
        # Once they have got the signal, /proc does not tell any more what they hold.
        timeout = kill_timeout(held_resources(self._processes()))
        blocked = BlockedThreads()
        while not await self._until(killed, timeout):
            blocked, timeout = blocked.look(blocked_threads(self._processes())), LOOK_INTERVAL
            if blocked.stuck or asyncio.get_running_loop().time() - self._killed_at > LONGEST_KILL:
                return False
        return True

    def _kill_all_but_cleaners(self) -> bool:
        """Kill the processes of the workers except the cleaners; return whether none but those was left."""
        left = self._processes()
        below = left - set(self._running)
        kept, self._loading = cleaners(below)
        if asyncio.get_running_loop().time() - self._killed_at < LOAD_TIMEOUT:
            kept |= self._loading
        for pid in kept:
            signal_one(pid, signal.SIGCONT)  # the workers may be frozen
        kill(left - kept)
        return left == kept and not self._loading

    def _kill_rest(self) -> bool:
        """Kill all processes of the workers; return whether none was left."""
        left = self._processes()
        kill(left)
        return not left

    async def _until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait up to `seconds` for a condition that can change when a child ends; return whether it holds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not condition():
            left = deadline - loop.time()
            if left <= 0:
                return False
            self._child_ended.clear()
            with suppress(asyncio.TimeoutError):
                unreported = self._loading or (self._exiting and self.stopping)
                timeout = min(left, LOOK_AGAIN) if unreported else left
                await asyncio.wait_for(self._child_ended.wait(), timeout)
        return True


def _two_pipes() -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (read, write) of two new pipes; OSError, and none is left open, if there is no descriptor left."""
    first = os.pipe()
    try:
        return first, os.pipe()
    except OSError:
        for descriptor in first:
            os.close(descriptor)
        raise


def _order(ended: EndedWorker) -> tuple[bool, bool, float]:
    failure = ended.failure
    if failure is None:
        return (False, False, 0.0)
    return (True, failure.kind is FailureClass.COLLECTIVE_FAILED, failure.time)

"""How the workers of a round are stopped: the grace, the interruption of functions, SIGKILL, and the cleaners last."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from elasticjob._runtime.agent.config import AgentConfig
from elasticjob._runtime.agent.monitoring.exits.stuck_processes import (
    LONGEST_KILL,
    POLL_INTERVAL,
    BlockedThreads,
    blocked_threads,
    held_resources,
    kill_timeout,
)
from elasticjob._runtime.agent.monitoring.progress.worker_progress import WorkerProgress
from elasticjob._runtime.agent.processes import (
    cleaners,
    descendants,
    is_stopped,
    kill,
    kill_with_children,
    signal_group,
    signal_one,
)
from elasticjob._runtime.agent.start_workers.launcher import Launcher
from elasticjob._runtime.agent.workers.pod_command.command_process import CommandProcess
from elasticjob._runtime.agent.workers.processes.process_changes import ProcessChanges
from elasticjob._runtime.agent.workers.processes.process_table import ProcessTable
from elasticjob._runtime.agent.workers.processes.restartable_workers import RestartableWorkers
from elasticjob._runtime.agent.workers.processes.worker_process import (
    CALLED,
    EXITING,
    FOR_NEXT_ROUND,
    IN_ROUND,
    INTERRUPTED,
    KILLED,
    LOADING,
    RETURNED,
    SPARES,
    ProcessEvent,
)
from elasticjob._runtime.agent.workers.round_times import RoundTimes
from elasticjob._runtime.agent.workers.spares.spares import Spares
from elasticjob._runtime.agent.workers.start_window import StartWindow
from elasticjob._runtime.contract.messages import Failure, FailureClass

log = logging.getLogger(__name__)

CLEANUP_TIMEOUT = 10.0
"""Seconds after the workers' end in which helpers may remove what the workers left in shared memory. They end by
themselves once the workers have; one that has just been started on a busy Node takes seconds to get there."""
LOAD_TIMEOUT = 1.0
"""Seconds after which a process is killed although its program is not loaded. It may be a helper that removes what is
in shared memory; those run the workers' own Python, which is in memory, and take 30 ms on a busy Node."""
END_GROUPS_TIMEOUT = 10.0
"""Seconds from the end of the grace in which a worker that has left its function may end its process groups. The abort
of many nccl groups and the end of large objects take seconds. A function that goes on does not get this time."""
BREAK_PERMISSION_TIMEOUT = 600.0
"""Seconds from the end of the grace in which a worker that counts no step any more waits until no other pod counts
one. The store answers as soon as it can. While there is none, no pod trains, and the worker has the newest state."""
STATE_COPY_TIMEOUT = 120.0
"""Seconds in which a process that ends for good may copy its state to the memory of the pod: 100 GB at 1 GB/s. The
grace begins once it has."""
SHORTEST_INTERRUPTION = 1.0
"""Minimum seconds for a restartable function to return, even if stopGraceSeconds is shorter (0 is common): killing it
would throw away the newest state."""

DumpStacksOfWorkers: TypeAlias = Callable[[], Awaitable[Failure | None]]


class StopSequence:
    """Stops the workers of a round. One stop at a time."""

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
        spares: Spares,
        command: CommandProcess,
    ) -> None:
        self.on_results_ended: Callable[[], None] = lambda: None
        """Called once in a stop in which workers wait for `break_collectives`, when none counts a step any more."""
        self.helper_pids: set[int] = set()
        """Process ids of the agent's children that are not workers, such as health checks, or that it has given up."""
        self._config = config
        self._table = table
        self._changes = changes
        self._window = window
        self._launcher = launcher
        self._restartable = restartable
        self._progress = progress
        self._times = times
        self._spares = spares
        self._command = command
        self._since: float | None = None
        self._grace_skipped = False
        self._grace_limit: asyncio.TimerHandle | None = None
        self._has_interrupted = False
        """Whether a worker was asked to leave its function in this stop."""
        self._results_ended = False
        """Whether `on_results_ended` was called in this stop."""
        self._may_break = False
        """Whether `break_collectives` was called in this stop."""
        self._discards_state = False
        """Whether what is in the memory of the pod is not used after this stop."""
        self._killed_at = 0.0
        """When the last stop began to send SIGKILL; loop time."""
        self._loading_programs: set[int] = set()
        """Process ids of what the workers have started and the kernel still loads, while the workers are killed."""
        changes.must_poll = self._must_poll

    @property
    def since(self) -> float | None:
        """When the stop in progress began, Unix seconds; None while no stop is in progress."""
        return self._since

    @property
    def stopping(self) -> bool:
        return self._since is not None

    async def stop(
        self,
        grace: float,
        first: signal.Signals,
        report_hang: Callable[[Failure], None] | None,
        dump_stacks: DumpStacksOfWorkers,
        *,
        park: bool,
        job_goes_on: bool,
        at_once: bool,
        at_most: float,
    ) -> Failure | None:
        """As `WorkerGroup.stop`, but the pipes of the workers stay open.

        1. Wait for a start in progress; if `report_hang` is given (the stop is because of a hang), dump the stacks.
        2. Interrupt functions if `park`; send `first` to the other workers, or SIGKILL if the job goes on without this
           pod (`job_goes_on`).
        3. Wait for the copies of the state, then for the grace.
        4. Kill the workers that still count steps if others wait for these; the others wait for `break_collectives`.
        5. Wait for workers that end their process groups.
        6. Send SIGKILL, last to the cleaners.

        `limit_grace` ends the waits of 3 to 5. `at_once` needs a grace of 0.
        """
        self._since, self._grace_skipped = time.time(), False
        self._results_ended = self._may_break = self._has_interrupted = False
        self._changes.notify()
        await self._window.until_closed()
        if report_hang is not None and (failure := await dump_stacks()) is not None:
            report_hang(failure)
        self._progress.release()
        self.limit_grace(at_most)
        if at_once:
            self._table.apply_to_all(self._table.pids(FOR_NEXT_ROUND), ProcessEvent.JOIN_STOP)
            self._spares.discard_all()
        else:
            self._begin(first if grace > 0 else None, park=park, job_goes_on=job_goes_on)
        if report_hang is not None:  # nothing that was sent reaches stopped processes, and the other pods wait
            kill(filter(is_stopped, self._table.pids(IN_ROUND)))
        if self._has_interrupted:  # after a hang the grace is shorter: it is for processes that are lost anyway
            grace = max(grace, self._config.stop_grace, SHORTEST_INTERRUPTION)
        await self._until_skipped_or(self._state_copies_are_done, STATE_COPY_TIMEOUT)
        await self._until_skipped_or(lambda: self._park_returned(park=park and not at_once), grace)
        self._kill_those_still_counting_steps()
        await self._until_skipped_or(self._may_break_or_none_waits, BREAK_PERMISSION_TIMEOUT)
        await self._until_skipped_or(self._park_returned_and_check_groups, END_GROUPS_TIMEOUT)
        self._table.apply_to_all(self._table.pids({INTERRUPTED}), ProcessEvent.GRACE_OVER)
        all_ended = await self._kill_all()
        if self._discards_state:
            self._discards_state = False
            self._progress.discard_copies()
        self._times.start_times.ended(self._progress.began)
        self._since = None
        if self._grace_limit is not None:
            self._grace_limit.cancel()
            self._grace_limit = None
        return None if all_ended else self._abandon(self.processes())

    def limit_grace(self, seconds: float) -> None:
        """End the grace period of a `stop` in progress after `seconds`, unless it ends before; infinite: no limit."""
        loop = asyncio.get_running_loop()
        at = loop.time() + seconds
        if seconds == math.inf or (self._grace_limit is not None and self._grace_limit.when() <= at):
            return
        if self._grace_limit is not None:
            self._grace_limit.cancel()
        self._grace_limit = loop.call_at(at, self._skip_grace)

    def discard_state(self) -> None:
        """During a stop: let nothing be used of what is in the memory of the pod, once its workers have ended."""
        self._discards_state = True

    def freeze(self, on: bool) -> None:
        """Send SIGSTOP, or SIGCONT if not `on`, to all processes of the workers, and to those they start meanwhile."""
        if on:  # the script must not write up to its function either
            self._spares.pause("this pod is cut off")
        else:
            self._spares.resume()
        signalled = set[int]()
        while left := self.processes() - signalled:
            for pid in left:
                signal_one(pid, signal.SIGSTOP if on else signal.SIGCONT)
            signalled |= left

    def break_collectives(self) -> None:
        """Let the workers that wait with it break their collectives, and leave their functions."""
        self._may_break = True
        self._changes.notify()
        for pid in self._table.pids({INTERRUPTED}):
            self._restartable.break_collectives(pid)

    def report_results_end(self) -> None:
        """Call `on_results_ended` if it is time. Call this when a worker has ended or has reported something."""
        if not self._results_ended and self._restartable.all_results_ended(self._table.pids({INTERRUPTED})):
            self._results_ended = True
            self.on_results_ended()

    def processes(self) -> set[int]:
        """Return the workers that have not ended, and the live processes they have started.

        Workers that are parked or exit, and spare processes, are left out.
        """
        found = descendants(
            os.getpid(),
            without={*self.helper_pids, *self._command.left_running, *self._table.pids(FOR_NEXT_ROUND, SPARES)},
        )
        return (self._launcher.without_preforked(found) | self._table.pids(IN_ROUND)) - self._table.pids({EXITING})

    # ---- the grace -------------------------------------------------------------------------------------------------

    def _begin(self, first: signal.Signals | None, *, park: bool, job_goes_on: bool) -> None:
        """Interrupt the functions that can be called again if `park`; send the `first` signal to the other workers."""
        # A prestarted process that is not at its function yet may be stuck.
        self._table.apply_to_all(self._table.pids({LOADING} if park else FOR_NEXT_ROUND), ProcessEvent.JOIN_STOP)
        interrupted: set[int] = set()
        if park:
            interrupted = {pid for pid in self._table.pids(IN_ROUND) if self._restartable.interrupt(pid)}
            self._table.apply_to_all(interrupted, ProcessEvent.INTERRUPT)
            self._has_interrupted = bool(interrupted)
            self.report_results_end()
        else:
            self._spares.discard_all()
        for pid in self._table.pids(IN_ROUND) - interrupted:
            if not self._restartable.end(pid, at_once=job_goes_on) and first is not None:
                signal_group(pid, signal.SIGKILL if job_goes_on else first)
        if self._command.ends_with_stop and self._command.pid and first is not None:
            signal_group(self._command.pid, signal.SIGKILL if job_goes_on else first)

    async def _until_skipped_or(self, condition: Callable[[], bool], seconds: float) -> None:
        await self._changes.until(lambda: self._grace_skipped or condition(), seconds)

    def _state_copies_are_done(self) -> bool:
        """Return whether all state copies are done. A process copies its state when no round follows for it."""
        return not any(map(self._restartable.copying_state, self._table.pids(IN_ROUND)))

    def _park_returned(self, *, park: bool) -> bool:
        """If `park`, park the workers whose function has ended. Return whether no worker runs."""
        if park:
            for pid, worker in self._table.workers({RETURNED}).items():
                self._table.apply(pid, ProcessEvent.PARK)
                self._table.set_worker(pid, self._times.after_call(worker))
        command_runs = self._command.ends_with_stop and self._command.pid != 0
        return not (self._table.pids(IN_ROUND) or command_runs or self._launcher.has_shim_processes)

    def _kill_those_still_counting_steps(self) -> None:
        """If others wait until no worker counts a step: kill those that do not leave their function in the grace."""
        interrupted = self._table.pids({INTERRUPTED})
        if any(map(self._restartable.results_ended, interrupted)):
            for pid in interrupted:
                if not self._restartable.results_ended(pid) and not self._restartable.interrupted(pid):
                    kill_with_children(pid)

    def _may_break_or_none_waits(self) -> bool:
        """Return whether no worker waits for `break_collectives`: it was called, or none needs it."""
        return self._may_break or not any(map(self._restartable.results_ended, self._table.pids({INTERRUPTED})))

    def _park_returned_and_check_groups(self) -> bool:
        """Park the interrupted workers that are done. Return whether none still ends its process groups."""
        if self._has_interrupted:
            self._park_returned(park=True)
        has_left, has_ended_results = self._restartable.interrupted, self._restartable.results_ended
        return not any(has_left(pid) or has_ended_results(pid) for pid in self._table.pids({INTERRUPTED}))

    def _skip_grace(self) -> None:
        self._grace_skipped = True
        self._changes.notify()

    def _must_poll(self) -> bool:
        return bool(self._loading_programs or (self.stopping and self._table.pids({EXITING})))

    # ---- SIGKILL ---------------------------------------------------------------------------------------------------

    async def _kill_all(self) -> bool:
        """Kill all processes of the workers, the cleaners among them last; return whether none is left."""
        self._killed_at = asyncio.get_running_loop().time()
        if not self.processes():
            return True
        if not await self._until_killed(self._kill_all_but_cleaners):
            return False
        cleaned_up = await self._changes.until(lambda: not self.processes(), CLEANUP_TIMEOUT)
        return cleaned_up or await self._until_killed(self._kill_rest)

    async def _until_killed(self, killed: Callable[[], bool]) -> bool:
        """Wait until processes have been killed; return False if they are stuck in the kernel."""
        # Once they have got the signal, /proc does not tell any more what they hold.
        timeout = kill_timeout(held_resources(self.processes()))
        blocked = BlockedThreads()
        while not await self._changes.until(killed, timeout):
            blocked, timeout = blocked.poll(blocked_threads(self.processes())), POLL_INTERVAL
            if blocked.stuck or asyncio.get_running_loop().time() - self._killed_at > LONGEST_KILL:
                return False
        return True

    def _kill_all_but_cleaners(self) -> bool:
        """Kill the processes of the workers except the cleaners; return whether none but those was left."""
        left = self.processes()
        below = left - self._table.pids(IN_ROUND)
        spared, self._loading_programs = cleaners(below)
        if asyncio.get_running_loop().time() - self._killed_at < LOAD_TIMEOUT:
            spared |= self._loading_programs
        for pid in spared:
            signal_one(pid, signal.SIGCONT)  # the workers may be frozen
        kill(left - spared)
        return left == spared and not self._loading_programs

    def _kill_rest(self) -> bool:
        """Kill all processes of the workers; return whether none was left."""
        left = self.processes()
        kill(left)
        return not left

    async def until_replaceable(self) -> Failure | None:
        """Wait for the exiting workers that hold what new workers may need; return a failure if they do not end.

        The wait ends when a stop begins: that ends the workers which start then.
        """

        def needed() -> set[int]:
            return {process.pid for process in self._table.processes() if process.reason_to_wait}

        self._killed_at = asyncio.get_running_loop().time()
        replaceable = await self._changes.until(lambda: self.stopping or not needed(), LONGEST_KILL)
        return None if replaceable else self._abandon(needed())

    async def until_all_ended(self, seconds: float) -> None:
        """Wait up to `seconds` until the exiting processes have ended, and the kernel has freed what they hold.

        A `stop` does not wait for them: their program runs no more.
        """
        await self._changes.until(lambda: not self._table.pids({EXITING}), seconds)

    def _abandon(self, processes: set[int]) -> Failure:
        """Stop waiting for processes that survive SIGKILL; the GPU and memory they hold are lost to this pod.

        The Node is only suspected: its kernel may free them later.
        """
        stuck = sorted(processes)
        self.helper_pids.update(stuck)
        abandoned = self._table.pids(IN_ROUND) | (self._table.pids({EXITING, KILLED, CALLED}) & processes)
        self._table.apply_to_all(abandoned, ProcessEvent.ABANDON)
        self._loading_programs = set()
        state = "in an uninterruptible sleep" if blocked_threads(stuck) else "still alive"
        seconds = asyncio.get_running_loop().time() - self._killed_at
        message = f"processes {state} {seconds:.0f} s after SIGKILL: {', '.join(map(str, stuck))}"
        pod = self._config.pod
        return Failure(FailureClass.DEVICE_UNHEALTHY, pod, time.time(), message=message, suspected=True)

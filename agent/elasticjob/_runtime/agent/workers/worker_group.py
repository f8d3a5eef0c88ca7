"""The workers of one pod: start, watch and stop them, forward their output, find out why they ended."""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable
from pathlib import Path

from elasticjob._runtime.agent.config import AgentConfig
from elasticjob._runtime.agent.monitoring.exits.exiting_process import may_still_write, why_new_workers_must_wait
from elasticjob._runtime.agent.monitoring.exits.fast_exit import FastExits
from elasticjob._runtime.agent.monitoring.exits.worker_exits import script_succeeded, signal_name
from elasticjob._runtime.agent.monitoring.progress.hang_guard import HangGuard
from elasticjob._runtime.agent.monitoring.progress.worker_progress import WorkerProgress
from elasticjob._runtime.agent.processes import has_ended, reap, signal_group
from elasticjob._runtime.agent.reporting.log_watch import LogWatch
from elasticjob._runtime.agent.reporting.worker_output import OutputSink
from elasticjob._runtime.agent.start_workers.launcher import Launcher
from elasticjob._runtime.agent.workers.pod_command.pod_command import PodCommand
from elasticjob._runtime.agent.workers.processes.exit_evidence import ExitEvidence, likely_cause_first
from elasticjob._runtime.agent.workers.processes.process_changes import ProcessChanges
from elasticjob._runtime.agent.workers.processes.process_log import log_end_between_rounds, log_long_exit
from elasticjob._runtime.agent.workers.processes.process_table import ProcessTable, WorkerProcess
from elasticjob._runtime.agent.workers.processes.restartable_workers import Reported, RestartableWorkers
from elasticjob._runtime.agent.workers.processes.worker_process import (
    CALLED,
    EXITING,
    FOR_NEXT_ROUND,
    IN_ROUND,
    INTERRUPTED,
    RETURNED,
    SPARES,
    ProcessEvent,
)
from elasticjob._runtime.agent.workers.round_starter import RoundStarter
from elasticjob._runtime.agent.workers.round_times import RoundTimes
from elasticjob._runtime.agent.workers.separate_worlds import SeparateWorlds
from elasticjob._runtime.agent.workers.spares.prestart import PrestartLauncher
from elasticjob._runtime.agent.workers.spares.spares import Spares
from elasticjob._runtime.agent.workers.start_window import StartWindow
from elasticjob._runtime.agent.workers.stop_sequence import StopSequence
from elasticjob._runtime.agent.workers.worker import EndedWorker, Worker
from elasticjob._runtime.agent.workers.worker_activity import WorkerActivity
from elasticjob._runtime.agent.workers.worker_files import WorkerFiles
from elasticjob._runtime.contract.failures.failure_text import MAX_MESSAGE
from elasticjob._runtime.contract.messages import Failure, NewProcesses, StartRound
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.contract.restart_messages import Calling, CollectiveFailed, Guarded, Parked, Raised

log = logging.getLogger(__name__)


class WorkerGroup:
    """The workers of the current round. Workers of two rounds never run at the same time.

    `table` has their processes, each with its state (`worker_process`). Here are the events that come from the
    processes and the kernel; `RoundStarter`, `StopSequence` and `Spares` have the agent's own.
    """

    def __init__(
        self, config: AgentConfig, launcher: Launcher, scratch: Path, stdout: OutputSink, stderr: OutputSink
    ) -> None:
        self._config = config
        self._launcher = launcher
        self.progress = WorkerProgress(scratch, config.local_world_size)
        self.log_watch = LogWatch(config.pod)
        self.restartable = RestartableWorkers(scratch)
        self.restartable.on_message = self._reported
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
        self.table = ProcessTable()
        self._changes = ProcessChanges()
        self._window = StartWindow(self.table, self.restartable)
        self._times = RoundTimes(self.progress)
        self._evidence = ExitEvidence(config)
        self._activity = WorkerActivity(config.pod, self.table, self.progress, self._times, self.log_watch)
        self.heartbeats, self.last_steps = self._activity.heartbeats, self._activity.last_steps
        self.dump_stacks = self._activity.dump_stacks
        sinks = (stdout, stderr)
        self._files = WorkerFiles(config, scratch, sinks, self.progress.path, self.restartable.path, self.log_watch)
        self.command = PodCommand(
            config, scratch / "launches", self.table, self._window, self._files, launcher, self._evidence, self._times
        )
        prestarts = PrestartLauncher(self.table, launcher, self._files, self.restartable, self.command.process)
        self._spares = Spares(config.processes, self.table, self._changes, self._window, prestarts, self._times)
        self._stop_sequence = StopSequence(
            config, self.table, self._changes, self._window, launcher, self.restartable, self.progress, self._times,
            self._spares, self.command.process,
        )  # fmt: skip
        self.separate_worlds = SeparateWorlds(self.table, self.helper_pids)
        self._starter = RoundStarter(
            config, self.table, self._changes, self._window, launcher, self.restartable, self.progress, self._times,
            self._files, prestarts, self._spares, self._stop_sequence, self.command,
        )  # fmt: skip
        self._spares.round_goes_on = lambda: not (self.stopping or self.progress.stops_at_step)
        self._spares.on_started = self._starter.on_end = lambda: self.on_end()
        self.command.is_stopping = lambda: self.stopping
        self.command.discard_spares = self._spares.discard_all
        self.command.report = lambda ended: self._ends.append(ended)
        self.command.on_started = lambda: self.on_end()
        self._stop_sequence.on_results_ended = lambda: self.on_results_ended()
        self._fast_exits = FastExits(self.process_exits)
        launcher.on_fork = self._fast_exits.watch
        self._ends: list[EndedWorker] = []
        """Workers whose function has ended by itself, or that exit, for the next `reap`."""

    # ---- start and stop ----------------------------------------------------------------------------------------------

    def expect_start(self) -> None:
        """Make a `stop` from now on wait for the `start` or `prestart` that follows."""
        self._window.open()
        self._spares.resume()
        self._evidence.begin_round()

    def expect_no_start(self) -> None:
        """Make no `stop` wait any more: the agent has failed, and the start may never come."""
        self._window.release_waiters()

    async def start(self, start: StartRound) -> Failure | None:
        """Start the round's workers; return a START_ERROR failure if the pod cannot start them.

        A parked process becomes the worker of its local rank. The others are started.
        """
        self._activity.begin_round(start)
        self._spares.begin_round(start)
        self.command.begin_round(start)
        return await self._starter.start(start)

    async def prestart(self, provisional: StartRound) -> Failure | None:
        """Start workers before a round; return once each waits at its function, has ended before it, or is stopped.

        Those that wait are called in the next round. If the others had a reason to end, they show it again there.
        Processes that wait already stay. Return a failure of this pod if what its last processes hold does not end.
        """
        return await self._starter.prestart(provisional)

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

        With a grace of 0 the `first` signal is not sent. `report_hang`: dump the stacks before, and call this
        with the failure of the worker farthest behind. `park`: workers whose function can be called again leave
        it instead, and their processes stay for the next round. `job_goes_on`: processes that wait between rounds
        exit at once, without the rest of the script. `at_once`: only SIGKILL, no process stays and none copies its
        state; `grace` must be 0. `at_most`: seconds after which SIGKILL follows, also to a process that copies its
        state. Return a failure of this pod if processes survive SIGKILL, else None.
        """
        self.command.begin_stop(round_follows=park and not at_once)
        failure = await self._stop_sequence.stop(
            grace, first, report_hang, self.dump_stacks,
            park=park, job_goes_on=job_goes_on, at_once=at_once, at_most=at_most,
        )  # fmt: skip
        self.command.forget_if_ended()
        waiting = filter(None, [self.command.process.worker])
        self._files.close_pipes((*self.table.workers(FOR_NEXT_ROUND, SPARES).values(), *waiting))
        return failure

    @property
    def stopping(self) -> bool:
        return self._stop_sequence.stopping

    @property
    def helper_pids(self) -> set[int]:
        """Process ids of the agent's children that are no workers, such as health checks; the caller may add some."""
        return self._stop_sequence.helper_pids

    def limit_grace(self, seconds: float) -> None:
        """End the grace period of a `stop` in progress after `seconds`, unless it ends before; infinite: no limit."""
        self._stop_sequence.limit_grace(seconds)

    def break_collectives(self) -> None:
        """Let the workers that wait with it break their collectives, and leave their functions."""
        self._stop_sequence.break_collectives()

    def discard_state(self) -> None:
        """During a stop: let nothing be used of what is in the memory of the pod, once its workers have ended."""
        self._stop_sequence.discard_state()

    async def until_all_ended(self, seconds: float) -> None:
        """Wait up to `seconds` until the kernel has freed what exiting processes hold. `stop` does not wait for it."""
        await self._stop_sequence.until_all_ended(seconds)

    def discard_spares(self, *, for_good: bool) -> None:
        """Kill all spare processes, and start no more if `for_good`."""
        self._spares.discard_all(for_good=for_good)

    def close(self) -> None:
        """Close the sockets on which workers and launchers connect."""
        self.command.close()
        self.progress.close()
        self.restartable.close()

    async def finish_log_files(self) -> None:
        """Wait until the workers' log files are written; not for long, since storage may hang."""
        await self._files.finish_logs()

    def freeze(self, on: bool) -> None:
        """Send SIGSTOP, or SIGCONT if not `on`, to all processes of the workers, and to those they start meanwhile."""
        self._stop_sequence.freeze(on)

    # ---- what the kernel and the processes report --------------------------------------------------------------------

    def reap(self) -> list[EndedWorker]:
        """Reap all children that have ended; return the workers among them, in the order of `likely_cause_first`."""
        codes = {**self._window.take_exit_codes(), **dict(reap())}
        found, self._ends = self._ends, []
        for pid, code in codes.items():
            torchrun_worker_env = self._launcher.child_ended(pid, code)
            self._fast_exits.forget(pid)
            state = self.table.state(pid)
            if state is CALLED and self._window.is_open:
                self._window.keep_exit_code(pid, code)  # its end is reported once the round has started
            elif state is not None:
                found += self._reaped(self.table.apply(pid, ProcessEvent.REAPED), code)
            elif torchrun_worker_env is not None:
                torchruns = self.table.workers(IN_ROUND).values()
                since = self._stop_sequence.since
                found += self._evidence.torchrun_worker(torchrun_worker_env, code, torchruns, since)
            else:
                found += self.command.reaped(pid, code)
                self._window.keep_exit_code(pid, code)
        self.command.end_stage_if_over()
        self._changes.notify()
        self._stop_sequence.report_results_end()
        return likely_cause_first(found)

    def _reaped(self, process: WorkerProcess, code: int) -> list[EndedWorker]:
        """Return the end of a worker, as `reap`, if it was not known before. `process`: as it was before."""
        worker = process.worker
        if process.state in IN_ROUND:
            return self._ended_worker(process, code)
        if process.state in SPARES:
            self._spare_ended(worker, code)
        elif process.state in FOR_NEXT_ROUND:
            if worker.round.is_prestarted:
                self._times.start_times.prestart_ended()
            log_end_between_rounds(process)
            worker.close()
        elif process.state is EXITING:
            log_long_exit(process)
        return []

    def process_exits(self, pid: int, code: int) -> None:
        """Handle a child that exits: its program runs no more, and it cannot be reaped yet."""
        process = self.table.get(pid)
        if process is None:
            return
        now, worker = time.monotonic(), process.worker
        if process.state in SPARES:
            self._spare_ended(worker, code)
            self.table.apply(pid, ProcessEvent.EXITS, now=now, reason_to_wait=why_new_workers_must_wait(pid))
            return
        if process.state not in IN_ROUND or (may_still_write(pid) and not has_ended(pid)):
            return  # members of the next round may write the same files in other pods
        if code == 0 and not (self.stopping or self.progress.stopped(worker.local_rank)):
            return  # the code may be unknown, and matters
        self.table.apply(pid, ProcessEvent.EXITS, now=now)
        self._ends += self._ended_worker(process, code)
        # All pods wait for this report, and new workers here for the reason, which takes time to find.
        self._announce_ends()
        if self.table.state(pid) is EXITING and (reason := why_new_workers_must_wait(pid)) and not has_ended(pid):
            self.table.set_reason_to_wait(pid, reason)

    def _announce_ends(self) -> None:
        self._changes.notify()
        self._stop_sequence.report_results_end()
        if self._ends and not self._window.is_open:
            self.on_end()

    def _spare_ended(self, worker: Worker, code: int) -> None:
        self._evidence.spare_ended(code)
        self._spares.ended(worker, code)

    def _ended_worker(self, process: WorkerProcess, code: int) -> list[EndedWorker]:
        """Return the end of a worker of the round, [] if it has been returned before. `process`: before its end."""
        worker, pid, since = process.worker, process.pid, self._stop_sequence.since
        if process.state is RETURNED:
            return []  # that its function had ended was returned then
        if self.progress.stopped(worker.local_rank):
            return self.command.outcome_of_end(
                pid, EndedWorker(worker.round, worker.local_rank, None, as_planned=True), code
            )
        if code < 0 and script_succeeded(worker.error_file, pid):
            log.info("rank %d succeeded; its process ended by %s in its clean-up", worker.rank, signal_name(-code))
            code = 0
        self._launcher.record_early_variable(worker.error_file)
        failure = self._evidence.failure(worker, code, since)
        if failure is None:
            self._evidence.succeeded(worker, pid, since)
        self._record_start(worker, failure)
        return self.command.outcome_of_end(pid, EndedWorker(worker.round, worker.local_rank, failure), code)

    def _record_start(self, worker: Worker, failure: Failure | None) -> None:
        """Let the launcher know, by the first worker whose end says so, whether the workers failed at once."""
        if not self.stopping and (failed := self._times.failed_at_once(worker, failure)) is not None:
            self._launcher.record_start(failed_at_once=failed)

    def _reported(self, pid: int, message: Reported) -> None:
        """Handle a message from a restartable worker; None means that it closed the connection."""
        process = self.table.get(pid)
        if process is not None and isinstance(message, Parked | Calling | None):
            parked = isinstance(message, Parked)
            self.table.apply(pid, ProcessEvent.AT_FUNCTION if parked else ProcessEvent.NOT_AT_FUNCTION)
        if process is not None and process.state in IN_ROUND:
            self._reported_in_round(pid, process, message)
            self._announce_ends()
            return
        self._changes.notify()  # `prestart` waits for it
        if isinstance(message, Parked) and message.round.is_prestarted:
            self._times.start_times.prestart_reached_function()
        if isinstance(message, Parked) and process is not None and process.state in SPARES:
            self._spares.at_function(pid, process.worker)

    def _reported_in_round(self, pid: int, process: WorkerProcess, message: Reported) -> None:
        worker = process.worker
        match message:
            case Calling(spare_process=spare_process):
                self._times.start_times.called(worker.local_rank)
                self.on_call()
                self._times.called(pid, worker.local_rank)
                if spare_process:
                    self._spares.want()
            case Guarded(round=round_id) | CollectiveFailed(round=round_id) if (
                round_id != worker.round or self.stopping
            ):
                pass
            case Guarded():
                self._activity.guard_reported(pid, message)
                self.on_guard()
            case CollectiveFailed(message=text, overdue=True):
                log.warning("rank %d: %s", worker.rank, text[:MAX_MESSAGE])
                self.on_overdue()
            case CollectiveFailed(message=text):
                failure = self._evidence.collective_failed(worker, text)
                self._ends.append(EndedWorker(worker.round, worker.local_rank, failure))
            case Raised(exception=exception, message=text):
                if not self.stopping:
                    failure = self._evidence.raised(worker, exception, text)
                    self._record_start(worker, failure)
                    self.table.set_worker(pid, self._times.count_failed_call(worker, failure))
                    self._ends.append(EndedWorker(worker.round, worker.local_rank, failure))
            case Parked(at_last_step=True):
                self._ends.append(EndedWorker(worker.round, worker.local_rank, None, as_planned=True))
            case None if process.state is INTERRUPTED:  # it returned at that moment, or runs another program by now
                signal_group(pid, signal.SIGTERM)
            case _:
                pass

    def find_early_variables(self) -> None:
        """Let the launcher know if a script sets variables that its fork has read before."""
        for worker in self.table.workers(IN_ROUND).values():
            self._launcher.record_early_variable(worker.error_file)

    def ended_ranks(self, round_id: RoundId) -> tuple[int, ...]:
        """Return the ranks of a round whose workers succeeded before a stop; none for a round before the last one."""
        return self._evidence.succeeded_ranks(round_id)

    # ---- state -------------------------------------------------------------------------------------------------------

    @property
    def guard(self) -> HangGuard | None:
        """What ends a hang of the round, if torch does not and the job has no hangPolicy; None if nothing has to."""
        return self._activity.guard

    @property
    def has_processes_for_next_round(self) -> bool:
        """Whether processes wait for the next round, or run their script up to where they wait."""
        return bool(self.table.pids(FOR_NEXT_ROUND))

    @property
    def has_state(self) -> bool:
        """Whether this pod may have a training state: in memory, or in a process that has trained and stays."""
        return self.progress.has_copy or any(worker.trained for worker in self.table.workers(FOR_NEXT_ROUND).values())

    @property
    def new_processes(self) -> NewProcesses:
        """What has to be started for the next round, while no worker runs."""
        times, count = self._times.start_times, len(self._starter.ranks_to_start())
        has_newest_state = times.synced and not self.progress.has_shard
        return NewProcesses(count, times.start_seconds, times.form_seconds, times.may_start_ahead, has_newest_state)

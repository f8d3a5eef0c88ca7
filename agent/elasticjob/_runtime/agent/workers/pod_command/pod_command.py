"""A command that starts launchers runs once in its pod: their ranks are the pod's workers, and the command waits.

The first local rank's process of the command starts alone. What it reaches decides:

- a launcher: it hands its ranks over. They are the processes of the round, and a failure restarts them in place, while
  the command waits. Once all have ended with success, in all pods, the launcher ends, and the command goes on.
- a process that acts as a rank: the command runs once for each rank, from now on.
- its end: likewise, if it has succeeded.

Launchers that follow each other are stages of the job (`rendezvous.rounds.stages`). A command that starts when some of
them are finished passes these: they return 0 at once.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from pathlib import Path

from elasticjob._runtime.agent.config import AgentConfig
from elasticjob._runtime.agent.processes import kill_with_children, signal_group
from elasticjob._runtime.agent.reporting.log_options import with_launcher_options
from elasticjob._runtime.agent.start_workers.in_workers.one_world import SeparateWorldError, record_refusal
from elasticjob._runtime.agent.start_workers.launcher import Launcher, WorkerStart
from elasticjob._runtime.agent.start_workers.launches.launch_server import LaunchServer
from elasticjob._runtime.agent.start_workers.launches.pending_launch import REFUSED, Launch, RefusedLaunchError
from elasticjob._runtime.agent.workers.pod_command.command_process import CommandProcess, CommandState
from elasticjob._runtime.agent.workers.pod_command.rank_starter import RankStarter, own_outputs
from elasticjob._runtime.agent.workers.pod_command.stage import (
    OTHER_ATTRIBUTES,
    RANK_WITHOUT_LAUNCHER,
    TWO_AT_ONCE,
    FinishedStages,
    Stage,
    has_own_attributes,
    launcher_name,
)
from elasticjob._runtime.agent.workers.processes.exit_evidence import ExitEvidence
from elasticjob._runtime.agent.workers.processes.process_table import ProcessTable
from elasticjob._runtime.agent.workers.processes.worker_process import CALLED, IN_ROUND, RUNNING, ProcessEvent
from elasticjob._runtime.agent.workers.round_times import RoundTimes
from elasticjob._runtime.agent.workers.start_window import StartWindow
from elasticjob._runtime.agent.workers.worker import EndedWorker, Worker
from elasticjob._runtime.agent.workers.worker_files import WorkerFiles
from elasticjob._runtime.contract.messages import StartRound
from elasticjob._runtime.contract.names import Backend, Env, RoundId
from elasticjob._runtime.system.loop_errors import background_task

log = logging.getLogger(__name__)

NOTE_AFTER = 60.0
"""Seconds after which the log says that the other ranks wait for what the command does first."""
_ENDING = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGKILL}
"""Signals of a launcher after which the end of its ranks is not a failure."""


class PodCommand:
    """Serves the launchers of the command (`Launches`), and starts and counts their ranks."""

    def __init__(
        self,
        config: AgentConfig,
        socket_path: Path,
        table: ProcessTable,
        window: StartWindow,
        files: WorkerFiles,
        launcher: Launcher,
        evidence: ExitEvidence,
        times: RoundTimes,
    ) -> None:
        """`socket_path`: where launchers connect; a file in a folder of the agent's."""
        may_run_once = launcher.may_start_launcher and config.backend is Backend.ELASTICJOB
        self.process = CommandProcess(CommandState.ENDED if may_run_once else CommandState.OFF)
        self.is_stopping: Callable[[], bool] = lambda: False
        self.discard_spares: Callable[[str], None] = lambda _reason: None
        self.report: Callable[[EndedWorker], None] = lambda _ended: None
        """Called with the failure of a start, or of the command, that no process of the round has reported."""
        self.on_stage_over: Callable[[RoundId, int], None] = lambda _round, _stage: None
        """Called when all ranks of a launcher have ended, with its number; `finish_stages` answers."""
        self.on_stage_begun: Callable[[RoundId, int, str], None] = lambda _round, _stage, _launcher: None
        """Called when its ranks start for the first time, with its number and name."""
        self.on_started: Callable[[], None] = lambda: None
        """Called when processes have started: some may have ended before their ids were known."""
        self._config = config
        self._socket_path = socket_path
        self._table = table
        self._window = window
        self._files = files
        self._launcher = launcher
        self._evidence = evidence
        self._ranks = RankStarter(config, table, window, files, launcher, times)
        self._start: StartRound | None = None
        self._finished = FinishedStages()
        self._stage: Stage | None = None
        self._tasks = set[asyncio.Task[None]]()
        self._server = LaunchServer(socket_path, self) if may_run_once else None
        launcher.launches = self if may_run_once else None

    # ---- rounds ------------------------------------------------------------------------------------------------------

    def begin_round(self, start: StartRound) -> None:
        """Begin a round: the processes of the one before have ended, except for a launcher that waits."""
        self._start = start
        self._finished.add(start.finished_stages, start.launchers)

    def kill_if_at_other_launcher(self) -> bool:
        """Kill a command that waits at another launcher than that of the round. Return whether the command is ending.

        It has ended once `process.pid` is 0; then call `forget_if_ended`.
        """
        if self.process.is_elsewhere(self._finished.number):
            text = "the command waits at launcher %d, and %d are finished in all pods: it starts again"
            log.info(text, self.process.stage, self._finished.number)
            self.process.ends_with_stop = True
            self._kill_command()
        return self.process.ends_with_stop

    @property
    def starts_alone(self) -> bool:
        """Whether the next start is that of the command itself, once in this pod."""
        return self.process.runs_alone

    def prepare(self, start: StartRound) -> tuple[Worker, WorkerStart]:
        """Return the process of the command, which does not run yet; see `WorkerFiles.prepare`."""
        worker, worker_start = self._files.prepare(start, 0, "command")
        return worker, replace(worker_start, env={**worker_start.env, Env.LAUNCHES: str(self._socket_path)})

    def started(self, pid: int, worker: Worker) -> None:
        """Record that the command runs."""
        process = self.process
        process.state, process.ends_with_stop = CommandState.ALONE, False
        process.pid, process.worker, process.stage = pid, worker, 0
        if self._config.processes > 1:
            asyncio.get_running_loop().call_later(NOTE_AFTER, self._note_wait, pid)

    def _note_wait(self, pid: int) -> None:
        if self.process.state is CommandState.ALONE and self.process.pid == pid:
            text = "the command runs once so far, for %.0f s: the other ranks start when it reaches them"
            log.info(text, NOTE_AFTER)

    def ranks_started(self) -> None:
        """Record that the ranks of the round run: once all have ended with success, their launcher ends."""
        if self._stage is None:
            return
        if self._stage.over:
            text = "the ranks of launcher %d run again: its round ended before those of all pods had ended"
            log.warning(text, self.process.stage)
        self._stage.broken = self._stage.over = False

    def begin_stop(self, *, round_follows: bool) -> None:
        """Let the command end with the processes of the round, unless the next round restarts its launcher's ranks."""
        self._break_stage()
        if self.process.waits and not round_follows:
            self.process.ends_with_stop = True

    def forget_if_ended(self) -> None:
        """Forget the command if it has ended with the round."""
        if self.process.ends_with_stop or self.process.state in (CommandState.ALONE, CommandState.GOES_ON):
            self._forget()

    def close(self) -> None:
        """Serve no launcher any more."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        self._forget()

    def _forget(self) -> None:
        self._end_stage()
        self.process.pid, self.process.worker, self.process.ends_with_stop = 0, None, False
        if not self.process.is_off:
            self.process.state = CommandState.ENDED
        self._finished.release()

    # ---- what the command reaches ------------------------------------------------------------------------------------

    async def runs_for_each_rank(self) -> bool:
        """As `Launches.runs_for_each_rank`."""
        await self._is_current()
        return self.process.is_off

    async def rank_begins(self) -> None:
        """As `Launches.rank_begins`."""
        if await self._is_current() and self.process.state is CommandState.ALONE:
            await self._start_others("has a process that acts as a rank")
        if not self.process.is_off:
            raise self._refused(RANK_WITHOUT_LAUNCHER)

    def rank_connected(self) -> None:
        """Handle a process that reports its progress: it is a rank."""
        if self.process.state is CommandState.ALONE:
            self._spawn(self._start_others("has a process that reports progress"))

    async def begin(self, launch: Launch) -> asyncio.Future[int] | None:
        """As `Launches.begin`."""
        never = asyncio.get_running_loop().create_future()
        current = await self._is_current()
        if self.process.is_off:
            return None
        if not current:
            return never  # its command ends
        if self.process.waits:
            raise self._refused(TWO_AT_ONCE)
        name = launcher_name(launch)
        if (number := self._finished.stage_of(name, self.process.stage)) <= self._finished.number:
            return self._pass(number)
        try:
            logs = with_launcher_options(self._config.logs, launch.log_options)
        except ValueError as error:
            raise self._refused(f"the launcher's options of logs: {error}") from None
        if has_own_attributes(launch):
            if self.process.state is CommandState.ALONE:
                await self._start_others("starts a launcher with other users, processors or namespaces than its own")
                return None if self.process.is_off else never
            raise self._refused(OTHER_ATTRIBUTES)
        stage = self._stage = Stage(launch, asyncio.get_running_loop().create_future())
        self.process.stage, self.process.state = number, CommandState.WAITS
        self._table.apply(self.process.pid, ProcessEvent.HAND_OVER)
        self._launcher.stage = launch
        self._files.use_launcher(launch.role, logs, own_outputs(launch, self.process.worker), self.process.stage)
        text = "launcher %d of the command waits, and the ranks of this pod run %s; nodes and rendezvous have no effect"
        log.info(text, self.process.stage, " ".join(launch.command.argv)[:500])
        assert self._start is not None  # noqa: S101
        self.on_stage_begun(self._start.round, number, name)
        await self._start_ranks(range(self._config.processes))
        return stage.code

    def _pass(self, number: int) -> asyncio.Future[int]:
        """Let a launcher end at once whose stage is finished."""
        self.process.stage, self.process.state = number, CommandState.GOES_ON
        log.info("launcher %d of the command ends at once: it is finished in all pods", number)
        (passed := asyncio.get_running_loop().create_future()).set_result(0)
        return passed

    def signal(self, launch: Launch, number: int) -> None:
        """As `Launches.signal`."""
        stage = self._stage
        if stage is None or stage.launch is not launch or self.is_stopping() or self.process.ends_with_stop:
            return
        if number not in signal.valid_signals():
            return
        stage.signalled = stage.signalled or number in _ENDING
        for pid in self._table.pids(IN_ROUND):
            signal_group(pid, signal.Signals(number))

    def lost(self, launch: Launch) -> None:
        """As `Launches.lost`."""
        stage = self._stage
        if stage is None or stage.launch is not launch or stage.code.done() or stage.lost:
            return
        stage.lost = True
        log.warning("launcher %d of the command has ended before its ranks: they end too", self.process.stage)
        if stage.over and not stage.broken and self._start is not None and not self.is_stopping():
            self._go_on(stage, self._start)
        elif self._table.pids(IN_ROUND) and not (self.is_stopping() or self._window.is_open):
            self.signal(launch, signal.SIGKILL)
        elif not self.process.ends_with_stop:  # between two rounds no rank runs whose end would let the command go on
            self._kill_command()

    def refuse(self, message: str, exception: str = REFUSED) -> None:
        """As `Launches.refuse`."""
        worker = self.process.worker
        if worker is None or self.process.is_off:
            return
        record_refusal(worker.error_file, message, exception)
        if self._stage is not None:
            self._stage.lost = True  # the refusal is reported, and the launcher's end need not be
        self._kill_command()

    def _refused(self, message: str) -> RefusedLaunchError:
        self.refuse(message, SeparateWorldError.__name__)
        return RefusedLaunchError(message)

    def _kill_command(self) -> None:
        if self.process.pid:
            kill_with_children(self.process.pid)

    async def _is_current(self) -> bool:
        """Wait until no processes start. Return False if the command that runs now has ended by then, or ends."""
        pid = self.process.pid
        while self._window.is_open or (self._stage is not None and self._stage.lost):
            if self._window.is_open:
                await self._window.until_closed()
            elif self._stage is not None:  # the command goes on once the ranks of its last launcher have ended
                await asyncio.wait({self._stage.code})
        if self.process.state is CommandState.GOES_ON:  # if that launcher was killed, other pods may still be at it
            await self._finished.until(self.process.stage)
        return self.process.pid == pid and not (self.is_stopping() or self.process.ends_with_stop)

    # ---- start -------------------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = background_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start_others(self, reason: str) -> None:
        """Run the command once for each rank, from now on."""
        if not await self._is_current() or self.process.state is not CommandState.ALONE:
            return
        self.process.state = CommandState.OFF
        if others := range(1, self._config.processes):
            log.info("the command %s: it runs once for each rank", reason)
            await self._start_ranks(others)

    async def _start_ranks(self, local_ranks: Iterable[int]) -> None:
        assert self._start is not None  # noqa: S101
        if (failed := await self._ranks.start(self._start, list(local_ranks))) is None:
            self.ranks_started()
        else:
            self._break_stage()
            self.report(failed)
        self.on_started()

    # ---- the end -----------------------------------------------------------------------------------------------------

    def outcome_of_end(self, pid: int, ended: EndedWorker, code: int) -> list[EndedWorker]:
        """Return what the end of a process of the round means for the round; `code` is its exit code."""
        if self.is_stopping() or self.process.state in (CommandState.OFF, CommandState.ENDED):
            return [ended]
        if pid == self.process.pid:
            return self._command_ended(ended)
        return [ended] if self._stage is None else self._stage.rank_ended(ended, code)

    def _command_ended(self, ended: EndedWorker) -> list[EndedWorker]:
        if ended.failure is not None:
            self._forget()
            return [ended]
        if self.process.state is CommandState.ALONE and self._config.processes > 1:
            self._spawn(self._start_others("has ended and started no launcher"))
            return [ended]
        self._forget()
        return [replace(ended, local_rank=rank) for rank in range(self._config.processes)]

    def _break_stage(self) -> None:
        if self._stage is not None:
            self._stage.broken = True

    def reaped(self, pid: int, code: int) -> list[EndedWorker]:
        """Handle the end of a child that is not in the table; return the failure of the round, if it is one."""
        process, worker, start = self.process, self.process.worker, self._start
        if pid != process.pid or not process.waits or worker is None or start is None:
            return []
        if process.ends_with_stop:
            process.pid = 0
            return []
        worker = replace(worker, round=start.round, rank=start.rank)
        failure = self._evidence.failure(worker, code, None) or self._evidence.raised(
            worker, "CommandEndedError", "the command has ended before the ranks of its launcher: let it wait for them"
        )
        self._break_stage()
        self._forget()
        return [] if self.is_stopping() else [EndedWorker(start.round, 0, failure)]

    def end_stage_if_over(self) -> None:
        """Report that all ranks of the launcher have ended with success, if they have. Call this after each `reap`."""
        stage, process, start = self._stage, self.process, self._start
        if stage is not None and process.ends_with_stop and not self._table.pids(IN_ROUND):
            self._end_stage(-signal.SIGTERM)  # a shell handles the signal that it has got once its launcher ends
            return
        if (
            stage is None
            or stage.broken
            or stage.over
            or self.is_stopping()
            or process.ends_with_stop
            or self._window.is_open
        ):
            return
        if self._table.pids(IN_ROUND, {CALLED}) or start is None:
            return
        stage.over = True
        self.discard_spares("the ranks of its launcher have ended")
        self.on_stage_over(start.round, process.stage)
        if stage.lost and self._stage is stage:  # the command goes on, up to its next launcher
            self._go_on(stage, start)

    def finish_stages(self, finished: int) -> None:
        """Record how many launchers are finished in all pods, and let the command go on if one of them waits."""
        self._finished.add(finished)
        stage, start, is_over = self._stage, self._start, self.process.stage <= self._finished.number
        if stage is None or start is None or not stage.over or stage.broken or not is_over:
            return
        if not (self.is_stopping() or self.process.ends_with_stop):
            self._go_on(stage, start)

    def _go_on(self, stage: Stage, start: StartRound) -> None:
        process = self.process
        assert process.worker is not None  # noqa: S101
        process.state = CommandState.GOES_ON
        process.worker = replace(process.worker, round=start.round, rank=start.rank)
        self._table.add(process.pid, process.worker, RUNNING)
        self._ranks.end_stage()
        log.info("launcher %d of the command ends, and the command goes on", process.stage)
        self._end_stage(stage.exit_code)

    def _end_stage(self, code: int | None = None) -> None:
        """End the stage. The launcher gets the exit code, if there is one, once what its ranks have written is out."""
        stage, self._stage, self._launcher.stage = self._stage, None, None
        if stage is None:
            return
        outputs = self._files.use_launcher("", self._config.logs, (None, None), 0)
        self._spawn(stage.answer(outputs, code))

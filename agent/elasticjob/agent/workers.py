"""The workers of one node: start, watch and end them; their output and what they leave behind."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from elasticjob.agent.config import AgentConfig
from elasticjob.agent.monitoring.hangs import StackDump, dump_stacks, farthest_behind
from elasticjob.agent.monitoring.worker_exits import (
    OomCounter,
    WorkerExit,
    failure_of,
    read_error_file,
    read_torchrun_report,
)
from elasticjob.agent.monitoring.worker_progress import ProgressReport, WorkerProgress
from elasticjob.agent.processes import descendants, kill, reap, signal_group, signal_one
from elasticjob.agent.reporting.log_options import STDERR, STDOUT
from elasticjob.agent.reporting.worker_output import TORCHRUN_FAILED, FileSink, OutputSink, Tail, WorkerPipe
from elasticjob.agent.start_workers.launcher import Launcher, StartError, WorkerStart
from elasticjob.agent.worker_environment import rendezvous_id, torchrun_env, worker_env
from elasticjob.contract.messages import Failure, FailureClass, StartRound
from elasticjob.contract.names import Backend, RoundId

log = logging.getLogger(__name__)

KILL_TIMEOUT = 10.0
"""Seconds after SIGKILL until a process that is stuck in the kernel is given up: freeing memory takes some."""
FILE_CLOCK = 0.02
"""Seconds by which the time of a file may be behind the clock."""


@dataclass(frozen=True)
class EndedWorker:
    """A worker that ended; no failure: exit 0, or ended by a stop."""

    round: RoundId
    local_rank: int
    failure: Failure | None
    on_plan: bool = False
    """It stopped at the last step of a round that ends on plan; how it ended after that does not matter."""


@dataclass(frozen=True)
class _Worker:
    round: RoundId
    local_rank: int
    rank: int
    error_file: str
    stacks_file: str
    streams: tuple[WorkerPipe, WorkerPipe]
    tails: tuple[Tail, Tail]

    def close(self) -> None:
        for stream in self.streams:
            stream.close()


class WorkerGroup:
    """All workers of the running round; at most one round's at a time."""

    def __init__(
        self, config: AgentConfig, launcher: Launcher, scratch: Path, stdout: OutputSink, stderr: OutputSink
    ) -> None:
        self._config = config
        self._launcher = launcher
        self._scratch = scratch
        self.progress = WorkerProgress(scratch)
        self._sinks = (stdout, stderr)
        self._oom = OomCounter()
        self._running: dict[int, _Worker] = {}
        self._round: tuple[_Worker, ...] = ()
        self._early: dict[int, int] = {}
        self._started = asyncio.Event()
        self._started.set()
        self._changed = asyncio.Event()
        self._hurried = False
        self._stopping_since: float | None = None
        """Unix seconds."""
        self.non_workers: set[int] = set()
        """Children of the agent that are no workers."""

    @property
    def stopping(self) -> bool:
        return self._stopping_since is not None

    # ---- start -----------------------------------------------------------------------------------------------------

    def expect_start(self) -> None:
        """`start` follows: a `stop` from now on waits for it."""
        self._started.clear()
        self._early = {}
        self._oom.reset()

    async def start(self, start: StartRound) -> Failure | None:
        """Start the round's workers; a START_ERROR failure where the command cannot be executed."""
        self.progress.begin_round(start.round)
        workers = [self._prepare(start, local_rank) for local_rank in range(self._config.processes)]
        self._round = tuple(worker for worker, _ in workers)
        try:
            pids = await self._launcher.start([wanted for _, wanted in workers])
        except StartError as error:
            return self._not_started(start, str(error))
        else:
            self._running = dict(zip(pids, self._round, strict=True))
            return None
        finally:
            for _, wanted in workers:
                os.close(wanted.stdout)
                os.close(wanted.stderr)
            self._started.set()

    def _prepare(self, start: StartRound, local_rank: int) -> tuple[_Worker, WorkerStart]:
        rank = start.rank + local_rank
        directory = self._scratch / f"{start.round}-{local_rank}"
        directory.mkdir(exist_ok=True)
        (out_read, out_write), (err_read, err_write) = os.pipe(), os.pipe()
        tails = (Tail(), Tail())
        streams = (
            self._stream(start.round, local_rank, rank, STDOUT, out_read, tails[0]),
            self._stream(start.round, local_rank, rank, STDERR, err_read, tails[1]),
        )
        files = (str(directory / "error.json"), str(directory / "stacks"))
        worker = _Worker(start.round, local_rank, rank, *files, streams, tails)
        own_agent = self._config.backend is Backend.C10D
        env = self._torchrun_env(start, worker) if own_agent else self._worker_env(start, worker)
        return worker, WorkerStart(env, out_write, err_write)

    def _worker_env(self, start: StartRound, worker: _Worker) -> dict[str, str]:
        return worker_env(
            start,
            local_rank=worker.local_rank,
            local_world_size=self._config.local_world_size,
            role=self._config.role,
            run_id=self._config.run_id,
            error_file=worker.error_file,
            agent_socket=self.progress.path,
            stacks=worker.stacks_file,
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

    def _stream(
        self, round_id: RoundId, local_rank: int, rank: int, kind: int, descriptor: int, tail: Tail
    ) -> WorkerPipe:
        config, logs = self._config, self._config.logs
        prefix = logs.line_prefix(role=config.role, local_rank=local_rank, rank=rank, hostname=socket.gethostname())
        sink = self._sinks[kind == STDERR] if logs.shown(local_rank, kind) else None
        file = None
        if logs.kept(local_rank, kind):
            path = logs.file(config.pod, str(round_id), local_rank, kind)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                file = FileSink(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644))
            except OSError as error:
                log.warning("no log file: %s", error)
        return WorkerPipe(descriptor, prefix, sink, tail, file)

    def _not_started(self, start: StartRound, why: str) -> Failure:
        return Failure(FailureClass.START_ERROR, self._config.pod, time.time(), rank=start.rank, message=why[:1024])

    # ---- watch -----------------------------------------------------------------------------------------------------

    def reap(self) -> list[EndedWorker]:
        """Collect every child that has ended; the workers among them, the one to blame first of those that failed."""
        ended = reap()
        codes = self._early | dict(ended)
        self._early = {}
        found: list[EndedWorker] = []
        for pid, code in codes.items():
            of_torchrun = self._launcher.child_ended(pid, code)
            if worker := self._running.pop(pid, None):
                found.append(self._judged(worker, code))
            elif of_torchrun is not None:
                found += self._judged_before_torchrun(of_torchrun, code)
            elif not self._started.is_set():
                self._early[pid] = code  # faster than the answer that names it
        self._changed.set()
        return sorted(found, key=_order)

    def _judged(self, worker: _Worker, code: int) -> EndedWorker:
        if self.progress.stopped(worker.local_rank):
            return EndedWorker(worker.round, worker.local_rank, None, on_plan=True)
        return EndedWorker(worker.round, worker.local_rank, self._judge(worker, code))

    def _judged_before_torchrun(self, env: Mapping[str, str], code: int) -> list[EndedWorker]:
        """A worker's failure, if its torchrun will not start it again: that may be long in saying so.

        It gives those that are stuck in a collective 30 s to end. What it stops itself is not to blame.
        """
        if code in (0, -signal.SIGTERM) or env.get("TORCHELASTIC_MAX_RESTARTS") != "0":
            return []
        ended = []
        for torchrun in self._running.values():
            if env.get("TORCHELASTIC_RUN_ID") != rendezvous_id(self._config.run_id, torchrun.round):
                continue  # of a round that has ended, or of another torchrun
            worker = replace(torchrun, rank=int(env["RANK"]), error_file=env.get("TORCHELASTIC_ERROR_FILE", ""))
            if failure := self._judge(worker, code):
                ended.append(EndedWorker(worker.round, worker.local_rank, failure))
        return ended

    def _judge(self, worker: _Worker, code: int) -> Failure | None:
        for stream in worker.streams:
            stream.drain()
        if code == 0:
            return None
        out, err = worker.tails
        rank = worker.rank
        if self._config.backend is Backend.C10D:
            rank, code = read_torchrun_report(err.lines) or (rank, code)
        recorded = read_error_file(worker.error_file)
        if recorded is not None and recorded[0] == TORCHRUN_FAILED:
            recorded = None
        if self._stopping_since is not None:
            if not (recorded and recorded[2] < self._stopping_since - FILE_CLOCK):
                return None
            code = 1  # the signal was ours
        exception = recorded[:2] if recorded else err.exception if code > 0 else None
        evidence = WorkerExit(
            rank=rank,
            code=code,
            time=recorded[2] if recorded else time.time(),
            exception=exception,
            lines=err.lines or out.lines,
            oom_killed=self._oom.unclaimed,
        )
        failure = failure_of(evidence, self._config.pod)
        if failure.kind is FailureClass.OOM_KILLED:
            self._oom.claim()
        return failure

    def freeze(self, on: bool) -> None:
        """Stop every process of the workers where it is, those too that they start meanwhile; or let them go on."""
        done = set[int]()
        while left := self._left() - done:
            for pid in left:
                signal_one(pid, signal.SIGSTOP if on else signal.SIGCONT)
            done |= left

    # ---- stop ------------------------------------------------------------------------------------------------------

    def heartbeats(self) -> tuple[ProgressReport, ...]:
        """The last sign of life of every worker that runs and has given one."""
        running = {worker.local_rank for worker in self._running.values()}
        return tuple(sign for sign in self.progress.heartbeats() if sign.local_rank in running)

    async def dump_stacks(self) -> Failure | None:
        """Log the stacks of all workers; the failure of the one that is farthest behind, if any ever made a step."""
        signs, now = {sign.local_rank: sign for sign in self.heartbeats()}, time.monotonic()
        running = {self.progress.process(worker.local_rank) or pid: worker for pid, worker in self._running.items()}
        stacks = await dump_stacks({pid: worker.stacks_file for pid, worker in running.items()})
        standing = []
        for pid, worker in running.items():
            sign = signs.get(worker.local_rank)
            age = now - sign.time if sign else 0.0
            standing.append(StackDump(worker.rank, sign.step if sign else None, age, stacks[pid]))
            said = stacks[pid].rstrip() or "(no answer)"
            log.info("rank %d, %.1f s after step %s:\n%s", worker.rank, age, sign.step if sign else "-", said)
        behind = farthest_behind(standing)
        return behind.failure(self._config.pod, time.time()) if behind else None

    async def stop(
        self, grace: float, first: signal.Signals = signal.SIGTERM, stood: Callable[[Failure], None] | None = None
    ) -> Failure | None:
        """The `first` signal, `grace` seconds, SIGKILL; then whatever else the workers left running.

        None is left after this, but for those that even SIGKILL does not end: a failure of this node then.
        `stood`: ask them first where they stand, and tell it.
        """
        self._stopping_since, self._hurried = time.time(), False
        await self._started.wait()
        if stood is not None and (failure := await self.dump_stacks()) is not None:
            stood(failure)
        self.progress.release()
        ending = dict(self._running)
        for pid in ending if grace > 0 else ():
            signal_group(pid, first)
        await self._until(lambda: self._hurried or not (self._running or self._launcher.has_shim_processes), grace)
        for pid in ending:
            signal_group(pid, signal.SIGKILL)
        ended = await self._until(self._kill_rest, KILL_TIMEOUT)
        for worker in self._round:
            worker.close()
        self._round = ()
        self._stopping_since = None
        return None if ended else self._abandon()

    def _abandon(self) -> Failure | None:
        """Nobody waits for them again, here or at the agent's end; what they hold of GPU and memory is lost."""
        stuck = sorted(self._left())
        self.non_workers.update(stuck)
        self._running = {}
        message = f"processes stuck in the kernel, {KILL_TIMEOUT:g} s after SIGKILL: {', '.join(map(str, stuck))}"
        return Failure(FailureClass.DEVICE_UNHEALTHY, self._config.pod, time.time(), message=message)

    def skip_grace(self) -> None:
        """Do not wait for the grace of a `stop` under way."""
        self._hurried = True
        self._changed.set()

    def _left(self) -> set[int]:
        """What the round's workers are or have left, until it is reaped."""
        left = descendants(os.getpid(), without=self.non_workers)
        return self._launcher.without_preforked(left) | set(self._running)

    def _kill_rest(self) -> bool:
        left = self._left()
        kill(left)
        return not left

    async def _until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait for a condition that changes when children end."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not condition():
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), deadline - loop.time())
            except asyncio.TimeoutError:
                return condition()
        return True


def _order(ended: EndedWorker) -> tuple[bool, bool, float]:
    failure = ended.failure
    if failure is None:
        return (False, False, 0.0)
    return (True, failure.kind is FailureClass.COLLECTIVE_FAILED, failure.time)

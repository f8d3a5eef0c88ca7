"""What a worker needs before it starts: its folder, the pipes of its output, its log files and its environment."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from elasticjob._runtime.agent.config import AgentConfig
from elasticjob._runtime.agent.reporting.log_options import STDERR, STDOUT, LogOptions
from elasticjob._runtime.agent.reporting.log_watch import LogWatch
from elasticjob._runtime.agent.reporting.worker_output import (
    FILE_TIMEOUT,
    DescriptorSink,
    FileSink,
    OutputLine,
    OutputSink,
    Tail,
    WorkerPipe,
    wait_for_files,
)
from elasticjob._runtime.agent.start_workers.launcher import WorkerStart
from elasticjob._runtime.agent.start_workers.worker_environment import torchrun_env, worker_env
from elasticjob._runtime.agent.workers.worker import Worker
from elasticjob._runtime.contract.messages import StartRound
from elasticjob._runtime.contract.names import Backend, RoundId


class WorkerFiles:
    """Prepares workers, and deletes what they needed."""

    def __init__(
        self, config: AgentConfig, scratch: Path, sinks: tuple[OutputSink, OutputSink], agent_socket: str,
        restart_socket: str, log_watch: LogWatch,
    ) -> None:  # fmt: skip
        """`sinks`: for stdout and stderr. The sockets: where a worker reports its progress, and where it is called."""
        self._config = config
        self._scratch = scratch
        self._sinks = sinks
        self._agent_socket = agent_socket
        self._restart_socket = restart_socket
        self._log_watch = log_watch
        self._folders: set[Path] = set()
        """Folders of workers, of this round and of processes that stay."""
        self._open: list[Worker] = []
        """Workers whose pipes may be open."""
        self._log_options = config.logs
        self._role = config.role
        self._launcher_sinks: tuple[DescriptorSink | None, DescriptorSink | None] = (None, None)
        """Where a launcher's stdout and stderr lead, if not to the agent."""
        self._stage = ""
        """A part of the folders' names: a second launcher of a command has workers in the same round."""
        self._logs: list[FileSink] = []
        """Log files that are not written completely yet, and those of the running workers."""

    def use_launcher(
        self, role: str, logs: LogOptions, outputs: tuple[int | None, int | None], stage: int
    ) -> list[DescriptorSink]:
        """Prepare the ranks of a launcher from now on; return what those of the one before wrote to.

        `role`: empty for the job's. `outputs`: descriptors to which stdout and stderr of the ranks go, unless to the
        agent's own. `stage`: the number of the launcher.
        """
        before = [sink for sink in self._launcher_sinks if sink is not None]
        stdout, stderr = (None if number is None else DescriptorSink(os.dup(number)) for number in outputs)
        self._launcher_sinks, self._log_options = (stdout, stderr), logs
        self._role, self._stage = role or self._config.role, f"-{stage}" if stage > 1 else ""
        return before

    def prepare(self, start: StartRound, local_rank: int, name: str = "") -> tuple[Worker, WorkerStart]:
        """Return a worker that does not run yet, and how to start it; OSError if there is no descriptor or space left.

        The caller closes the descriptors of the `WorkerStart`. `name`: of the worker's folder, if not its local rank.
        """
        rank = start.rank + local_rank
        directory = self.folder(start, local_rank, name)
        (out_read, out_write), (err_read, err_write) = _two_pipes()
        tails = (Tail(), Tail())
        pipes = (
            self._pipe(start.round, local_rank, rank, STDOUT, out_read, tails[0]),
            self._pipe(start.round, local_rank, rank, STDERR, err_read, tails[1]),
        )
        files = (str(directory / "error.json"), str(directory / "stacks"))
        worker = Worker(start.round, local_rank, rank, *files, pipes, tails)
        self._open.append(worker)
        own_agent = self._config.backend is Backend.C10D
        env = self._torchrun_env(start, worker) if own_agent else self.worker_env(start, worker)
        return worker, WorkerStart(env, out_write, err_write)

    def folder(self, start: StartRound, local_rank: int, name: str = "") -> Path:
        """Return the folder of a worker's files, which exists then. `name`: as in `prepare`."""
        folder = self._scratch / f"{start.round}-{name or f'{local_rank}{self._stage}'}"
        folder.mkdir(exist_ok=True)
        self._folders.add(folder)
        return folder

    def close_pipes(self, needed_by: Iterable[Worker]) -> None:
        """Close the pipes of all other workers."""
        needed = {worker.pipes for worker in needed_by}
        for worker in self._open:
            if worker.pipes not in needed:
                worker.close()
        self._open = [worker for worker in self._open if worker.pipes in needed]
        self._log_watch.log_unmatched()

    def delete_folders(self, needed_by: Iterable[Worker]) -> None:
        """Delete the folders of all other workers. Those of a process that stays are of several rounds."""
        needed = {Path(path).parent for worker in needed_by for path in (worker.error_file, worker.stack_dump_file)}
        for folder in self._folders - needed:
            shutil.rmtree(folder, ignore_errors=True)
        self._folders &= needed

    def worker_env(self, start: StartRound, worker: Worker) -> dict[str, str]:
        """Return the environment of a worker in a round."""
        return worker_env(
            start,
            local_rank=worker.local_rank,
            local_world_size=self._config.local_world_size,
            role=self._config.role,
            run_id=self._config.run_id,
            error_file=worker.error_file,
            agent_socket=self._agent_socket,
            restart_socket=self._restart_socket,
            stack_dump_file=worker.stack_dump_file,
            base=self._config.env,
        )

    def line_prefix(self, local_rank: int, rank: int, stream: int) -> str:
        """Return what stands before each line of a worker's output: nothing where the command redirects its launcher,
        as with torchrun, unless that has `--tee`."""
        host, options = socket.gethostname(), self._log_options
        if self._launcher_sinks[stream == STDERR] is not None and not options.has_tee(local_rank, stream):
            return ""
        return options.line_prefix(role=self._role, local_rank=local_rank, rank=rank, hostname=host)

    def watch(self, round_id: RoundId, local_rank: int) -> Callable[[Sequence[OutputLine]], None]:
        """Return what takes the lines that a worker writes in this round."""
        return partial(self._log_watch.feed, round_id, local_rank)

    async def finish_logs(self) -> None:
        """Wait until the workers' log files are written; for at most FILE_TIMEOUT in total, since storage may hang."""
        await asyncio.to_thread(wait_for_files, self._logs, FILE_TIMEOUT)

    def _torchrun_env(self, start: StartRound, worker: Worker) -> dict[str, str]:
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
        config, logs = self._config, self._log_options
        own = self._launcher_sinks[stream == STDERR] or self._sinks[stream == STDERR]
        sink = own if logs.to_console(local_rank, stream) else None
        file = None
        if logs.to_file(local_rank, stream):
            file = FileSink(logs.path(config.pod, str(round_id), local_rank, stream))
            self._logs = [*(other for other in self._logs if other.writing), file]
        prefix, watch = self.line_prefix(local_rank, rank, stream), self.watch(round_id, local_rank)
        return WorkerPipe(descriptor, prefix, sink, tail, file, watch)


def _two_pipes() -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (read, write) of two new pipes; OSError, and none is left open, if there is no descriptor left."""
    first = os.pipe()
    try:
        return first, os.pipe()
    except OSError:
        for descriptor in first:
            os.close(descriptor)
        raise

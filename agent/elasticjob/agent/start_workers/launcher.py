"""Starting workers: by a fork of the warm process where the command is Python and the trial went well, else by exec."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticjob.agent.processes import descendants, die_with_parent, kill, outside_session
from elasticjob.agent.start_workers.command import PythonCommand, UserCommand, is_torchrun
from elasticjob.agent.start_workers.fork_server_client import ForkServerClient, ForkServerError, program_fields
from elasticjob.agent.start_workers.libuv import WITHOUT_LIBUV, has_libuv
from elasticjob.agent.start_workers.shim_callers import PYTHON_EXEC, RunInFork, ShimCaller
from elasticjob.agent.start_workers.shim_server import CannotForkError, ShimServer, likely_python

log = logging.getLogger(__name__)

_TORCHRUN = ("torch.distributed.launcher.api",)
"""What torchrun imports, but for the module that is torchrun."""


class StartError(Exception):
    """A command that cannot be executed; the message is the operating system's."""


@dataclass(frozen=True)
class WorkerStart:
    """One worker to start: environment to add, and where its output goes (descriptors of the caller)."""

    env: Mapping[str, str]
    stdout: int
    stderr: int


class Launcher:
    """`prepare` once, then `start` as often as wanted. `env` is what all workers have in common."""

    def __init__(
        self,
        command: UserCommand,
        env: Mapping[str, str],
        preload: Sequence[str],
        output: int,
        workers: int = 1,
        scratch: Path | None = None,
        torchruns_workers: int = 0,
    ) -> None:
        """`workers`: how many each `start` asks for; `output`: where the warm process writes (a descriptor).

        `scratch`: a directory; without it, Python that the command starts is not warm. `torchruns_workers`: how many
        a torchrun of the command's own will start, where it has an agent of its own.
        """
        self.workers = workers
        self._torchruns_workers = torchruns_workers
        self._command = command
        self._env = dict(env)
        self._preload = tuple(preload)
        self._output = output
        self._scratch = scratch
        self.fork_disabled_reason = ""
        """Why there is no warm process, where the user did not ask for none; at most 256 characters."""
        self._warm: ForkServerClient | None = None
        self._shims: ShimServer | None = None

    @property
    def has_shim_processes(self) -> bool:
        """Whether processes run that are no descendants of the workers, but that these have started."""
        return self._shims is not None and self._shims.has_processes

    @property
    def fork_server_pid(self) -> int | None:
        """The warm process."""
        return self._warm.pid if self._warm else None

    def without_preforked(self, pids: set[int]) -> set[int]:
        """Those that are neither the warm process nor held ready by it: a worker has a session of its own."""
        return outside_session(pids, self._warm.pid) if self._warm else pids

    async def prepare(self) -> str:
        """Make ready to start workers. Returns what is ready, for people."""
        libuv: bool | None = None
        interpreter, command = "", None
        try:
            interpreter, flags, command = self._warmable()
            preload = [*self._preload, *(_TORCHRUN if self._torchruns_workers else ())]
            self._warm = ForkServerClient(
                interpreter, flags, command, self._env, preload, self._output,
                self.workers + self._torchruns_workers, self.workers if command else 1,
            )  # fmt: skip
            verdict = await self._warm.ready()
            libuv, what = verdict["libuv"], f"warm after {verdict['seconds']:.1f} s"
            if verdict["missing"]:
                what += f" (not imported: {'; '.join(verdict['missing'])})"
        except ForkServerError as error:
            what = self._cold(str(error))
        if libuv is None:
            python = self._command.interpreter if isinstance(self._command, PythonCommand) else "python3"
            libuv = await has_libuv(python, self._env)
        if not libuv:
            self._env.setdefault("USE_LIBUV", "0")
            before = self._env.get("PYTHONPATH")
            self._env["PYTHONPATH"] = os.pathsep.join([WITHOUT_LIBUV, *([before] if before else [])])
        if self._warm is not None and command is None:
            what = self._make_shims(interpreter, f"{interpreter} in {self._command.argv[0]} is {what}")
            if self._shims is not None:
                self._env["PATH"] = os.pathsep.join([str(self._shims.folder), self._env.get("PATH", os.defpath)])
        elif self._warm is not None and command is not None and self._torchruns_workers and is_torchrun(command):
            what = self._warm_torchruns_workers(command, what)
        return what

    async def start(self, workers: Sequence[WorkerStart]) -> list[int]:
        """Start all; their process ids, each the leader of its own session and a child of this process.

        `StartError` where the command cannot be executed: then none runs.
        """
        if self._warm is not None and isinstance(command := self._command, PythonCommand):
            common = {
                **(self._env if is_torchrun(command) else self._libuv_env()),
                **self._workers_python(command, self._env),
            }
            wanted: list[dict[str, Any]] = [{"env": {**common, **w.env}, "descriptors": [1, 2]} for w in workers]
            try:
                return await self._warm.fork(wanted, [d for w in workers for d in (w.stdout, w.stderr)])
            except ForkServerError as error:
                log.warning("%s", self._cold(str(error)))
                kill(descendants(os.getpid()))  # it may have started some of them
        return [self._exec(worker) for worker in workers]

    def child_ended(self, pid: int, code: int) -> Mapping[str, str] | None:
        """A child of this process was reaped; it may have been the warm process, or what a shim stands for.

        Its environment, if it was a worker of a torchrun.
        """
        if self._warm is not None and pid == self._warm.pid:
            self._warm.mark_lost()
        return self._shims.child_ended(pid, code) if self._shims is not None else None

    def _cold(self, why: str) -> str:
        """From now on workers start by exec. Returns it for people."""
        self.stop_fork_server()
        self.fork_disabled_reason = why[:256] if self._preload else ""
        return f"workers start by exec: {why}"

    def stop_fork_server(self) -> None:
        if self._warm is not None:
            self._warm.close()
            self._warm = None

    def close(self) -> None:
        """Start nothing any more."""
        self.stop_fork_server()
        if self._shims is not None:
            self._shims.close()

    def _libuv_env(self) -> dict[str, str]:
        return {"USE_LIBUV": self._env["USE_LIBUV"]} if "USE_LIBUV" in self._env else {}

    def _workers_python(self, command: PythonCommand, env: Mapping[str, str]) -> dict[str, str]:
        """For a torchrun, the shim that its workers are to run, unless the user has named it something else.

        Only for one that runs warm: then it has the interpreter that the shim stands for.
        """
        if self._shims is None or PYTHON_EXEC in env or not is_torchrun(command):
            return {}
        return {PYTHON_EXEC: self._shims.workers_python}

    def _warmable(self) -> tuple[str, tuple[str, ...], PythonCommand | None]:
        """Interpreter and flags of the warm process; and what it runs, None: what shims ask for."""
        command = self._command
        if not self._preload:
            raise ForkServerError("preload is empty")
        if isinstance(command, PythonCommand):
            return command.interpreter, command.flags, command
        python = likely_python(command.argv, self._env) if self._scratch and command.starts_python else None
        if python is None:
            raise ForkServerError(command.reason)
        return python, (), None

    def _warm_torchruns_workers(self, command: PythonCommand, ready: str) -> str:
        """Returns what is ready, for people."""
        if set(command.flags) - {"-u"}:
            return f"{ready}; torchrun's workers start by exec: they do not get its flags, {' '.join(command.flags)}"
        interpreter = shutil.which(command.interpreter, path=self._env.get("PATH")) or command.interpreter
        return self._make_shims(interpreter, f"{ready}, for torchrun and its workers")

    def _make_shims(self, interpreter: str, ready: str) -> str:
        """Returns what is ready, for people."""
        assert self._scratch is not None  # noqa: S101
        own_agent = self._torchruns_workers > 0
        try:
            self._shims = ShimServer(
                self._scratch / "bin", interpreter, dict(self._env), self._fork_for, own_agent=own_agent
            )
        except OSError as error:
            return self._cold(f"no shims for Python: {error}")
        return ready

    async def _fork_for(
        self, caller: ShimCaller, allowed: RunInFork, descriptors: Sequence[int], numbers: Sequence[int]
    ) -> int:
        """A process in the place of one that runs a shim."""
        if self._warm is None:
            raise CannotForkError("the warm process is gone")
        place = {
            "command": program_fields(allowed.command),
            "executable": allowed.executable,
            "env": {**caller.env, **self._libuv_env(), **self._workers_python(allowed.command, caller.env)},
            "directory": caller.directory,
            "umask": caller.umask,
            "ignored": caller.ignored,
            "limits": caller.limits,
            "unbuffered": "-u" in allowed.command.flags or bool(caller.env.get("PYTHONUNBUFFERED")),
        }
        try:
            (pid,) = await self._warm.fork([{"env": {}, "descriptors": list(numbers), "caller": place}], descriptors)
        except ForkServerError as error:
            self._cold(str(error))
            raise CannotForkError(str(error)) from None
        return pid

    def _exec(self, worker: WorkerStart) -> int:
        try:
            process = subprocess.Popen(
                self._command.argv,
                env={**self._env, **worker.env},
                stdin=subprocess.DEVNULL,
                stdout=worker.stdout,
                stderr=worker.stderr,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise StartError(f"{self._command.argv[0]}: {error}") from None
        process.returncode = 0  # the agent reaps; Popen must not
        return process.pid

"""Start workers: as forks of the fork server if the command is Python and the self-test passed, else by exec.

This is not about launchers such as torchrun or deepspeed in your command: those are in `in_workers/launchers.py`.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from elasticjob._runtime.agent.processes import descendants, die_with_parent, kill, outside_session
from elasticjob._runtime.agent.start_workers.command import (
    PYTHON_EXEC,
    PythonCommand,
    UserCommand,
    is_torchrun,
    with_local_rank,
)
from elasticjob._runtime.agent.start_workers.fork_fallback import FAILED_AT_ONCE, USE_EXEC_REASON, ForkFallback
from elasticjob._runtime.agent.start_workers.fork_server_client import ForkServerClient, ForkServerError, program_fields
from elasticjob._runtime.agent.start_workers.fork_server_supervisor import ForkServerSupervisor
from elasticjob._runtime.agent.start_workers.launches.launcher_commands import may_start_launcher
from elasticjob._runtime.agent.start_workers.launches.pending_launch import Launch, Launches
from elasticjob._runtime.agent.start_workers.launches.stage_start import (
    caller_fields,
    null_device,
    rank_environment,
    run_of_rank,
    start_by_exec,
)
from elasticjob._runtime.agent.start_workers.libuv import has_libuv
from elasticjob._runtime.agent.start_workers.shims.shim_callers import RunInFork, ShimCaller
from elasticjob._runtime.agent.start_workers.shims.shim_server import CannotForkError, ShimServer, likely_python
from elasticjob._runtime.contract.names import Env, early_variable_file
from elasticjob._runtime.contract.shared_memory.untrusted_file import read_regular_file
from elasticjob._runtime.contract.text import printable
from elasticjob._runtime.system.code_root import CODE_ROOT, IN_WORKERS
from elasticjob._runtime.system.robust_mutex import HeldMutex

log = logging.getLogger(__name__)

_TORCHRUN_IMPORTS = ("torch.distributed.launcher.api",)
"""The modules that torchrun imports, except torchrun's own module: it must run as `__main__`."""


PATCHES = str(Path(CODE_ROOT) / IN_WORKERS)
"""Folder of the patches of torch; one of them is for a torch that lacks libuv."""


class StartError(Exception):
    """A command that cannot be started; the message says why, mostly in the operating system's words."""


@dataclass(frozen=True)
class WorkerStart:
    """One worker to start."""

    env: Mapping[str, str]
    """Variables to add to the launcher's environment."""
    stdout: int
    """Descriptor of the caller."""
    stderr: int
    """Descriptor of the caller."""

    def close(self) -> None:
        """Close both descriptors. The worker has its own once `Launcher.start` has returned."""
        os.close(self.stdout)
        os.close(self.stderr)


class Launcher:
    """Starts the workers of this pod. Call `prepare` once, then `start` for each round."""

    def __init__(
        self,
        command: UserCommand,
        env: Mapping[str, str],
        preload: Sequence[str],
        output: int,
        workers: int = 1,
        scratch: Path | None = None,
        torchruns_workers: int = 0,
        child_setup: Callable[[], None] = die_with_parent,
    ) -> None:
        """`env`: the environment of all workers; each `WorkerStart` adds to it.

        `preload`: modules that the fork server imports; empty: no fork server.
        `output`: descriptor for the output of the fork server.
        `workers`: how many workers each `start` starts.
        `scratch`: directory for shims. Without it, Python that a shell command starts is not forked.
        `torchruns_workers`: how many workers the command's own torchrun starts; 0: it is not an agent itself.
        `child_setup`: what the fork server and each worker that starts by exec run before their program.
        """
        self.workers = workers
        self.on_fork: Callable[[int, HeldMutex], None] = lambda _pid, _mutex: None
        """Called with each worker that `start` forks, and the mutex that it holds."""
        self.stage: Launch | None = None
        """The launcher of the command whose ranks `start` starts; None: `start` starts the command itself."""
        self.launches: Launches | None = None
        """What serves launchers in a command that may run once; to be set before `prepare`."""
        self._torchruns_workers = torchruns_workers
        self._command = command
        self._env = dict(env)
        self._preload = tuple(preload)
        self._output = output
        self._scratch = scratch
        self._child_setup = child_setup
        self._early_variable = ""
        """Why workers start by exec because of what their script sets; empty while it sets nothing of that kind."""
        self._fallback = ForkFallback()
        self._forked = False
        """Whether workers of the last `start` are forks."""
        self._supervisor = ForkServerSupervisor(wanted=bool(preload))
        self._shims: ShimServer | None = None

    @property
    def may_start_launcher(self) -> bool:
        """Whether the command may start a launcher below itself."""
        return self._scratch is not None and may_start_launcher(self._command, self._env)

    @property
    def fork_disabled_reason(self) -> str:
        """Why workers start by exec, at most 256 characters; empty if they are forks or the user wants no forks."""
        fallback = USE_EXEC_REASON if self._fallback.use_exec else ""
        return self._supervisor.disabled_reason or self._early_variable or fallback

    @property
    def has_shim_processes(self) -> bool:
        """Whether forks run that act for shims. They belong to the workers but are not their descendants."""
        return self._shims is not None and self._shims.has_processes

    @property
    def fork_server_pid(self) -> int | None:
        """Process id of the fork server; None if workers start by exec."""
        server = self._supervisor.server
        return server.pid if server else None

    def without_preforked(self, pids: set[int]) -> set[int]:
        """Return `pids` without the fork server and its pre-forked workers.

        These share one session; a started worker has its own.
        """
        server = self._supervisor.server
        return outside_session(pids, server.pid) if server else pids

    async def prepare(self) -> str:
        """Start the fork server and, for a shell or torchrun, the shims. Return a log line about the result."""
        libuv: bool | None = None
        interpreter, command = "", None
        try:
            interpreter, flags, command = self._fork_server_program()
            preload = [*self._preload, *(_TORCHRUN_IMPORTS if self._torchruns_workers else ())]
            create = partial(
                ForkServerClient, interpreter, flags, command, dict(self._env), preload, self._output,
                self.workers + self._torchruns_workers, self.workers if command else 1, self._child_setup,
            )  # fmt: skip
            result = await self._supervisor.start(create)
            libuv, message = result["libuv"], f"fork server ready after {result['seconds']:.1f} s"
            if result["missing"]:
                message += f" (not imported: {'; '.join(result['missing'])})"
        except ForkServerError as error:
            message = self._supervisor.disable(str(error))
        if libuv is None:
            python = self._command.interpreter if isinstance(self._command, PythonCommand) else "python3"
            libuv = await has_libuv(python, self._env)
        if not libuv:
            self._env.setdefault("USE_LIBUV", "0")
            path = self._env.get("PYTHONPATH", "").split(os.pathsep)
            self._env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([PATCHES, *filter(None, path)]))
        has_server = self._supervisor.server is not None
        if has_server and command is None:
            message = self._make_shims(interpreter, f"{message}, for {interpreter} inside {self._command.argv[0]}")
        elif not has_server and (interpreter := self._torchrun_in_shell()):
            message = self._make_shims(interpreter, message)
        if self._shims is not None:
            self._env["PATH"] = os.pathsep.join([str(self._shims.folder), self._env.get("PATH", os.defpath)])
            self._env[Env.SHIMS] = str(self._shims.folder)
        elif has_server and command is not None and self._torchruns_workers and is_torchrun(command):
            message = self._make_torchrun_shims(command, message)
        return message

    async def start(self, workers: Sequence[WorkerStart], not_to_kill: Collection[int] = ()) -> list[int]:
        """Start all workers and return their process ids.

        Each worker leads its own session and is a child of this process. If the command cannot be executed, this
        raises StartError, and no worker that it has started runs. `not_to_kill`: process ids that stay if the fork
        server is lost during this call. All other descendants of the agent are killed then, because the fork server
        may have started some of the workers.
        """
        if not workers:
            return []
        self._forked = False
        if self.stage is not None:
            return await self._start_stage(self.stage, workers, not_to_kill)
        if (server := self._ready_fork_server) is not None and isinstance(command := self._command, PythonCommand):
            common = {
                **(self._env if is_torchrun(command) else self._libuv_env()),
                **self._torchrun_python_exec(command, self._env),
            }
            requests: list[dict[str, Any]] = [
                {"env": {**common, **w.env}, "descriptors": [1, 2], **_command_of_rank(command, w)} for w in workers
            ]
            try:
                forked = await server.fork(requests, [d for w in workers for d in (w.stdout, w.stderr)])
                self._forked = True
                for pid, mutex in forked:
                    if mutex is not None:
                        self.on_fork(pid, mutex)
                return [worker.pid for worker in forked]
            except ForkServerError as error:
                log.warning("%s", self._supervisor.failed(server, str(error)))
                # The fork server may have started some of the workers.
                kill(self.without_preforked(descendants(os.getpid(), without=not_to_kill)))
        return [self._exec(worker) for worker in workers]

    async def _start_stage(
        self, launch: Launch, workers: Sequence[WorkerStart], not_to_kill: Collection[int]
    ) -> list[int]:
        """As `start`, for the ranks of a launcher that waits for them."""
        decision = self._shims.decide(launch.caller, launch.command) if self._shims is not None else None
        if decision is not None and not isinstance(decision, RunInFork):
            log.info("the ranks start by exec: %s", decision.reason)
        stdin = os.dup(launch.streams[0]) if launch.streams else null_device()
        pids: list[int] = []
        try:
            if isinstance(decision, RunInFork) and (server := self._ready_fork_server) is not None:
                try:
                    for worker in workers:
                        env = {**rank_environment(launch, worker.env), **self._libuv_env()}
                        caller = caller_fields(launch.caller, run_of_rank(launch, decision, env), env)
                        request = {"env": {}, "descriptors": [0, 1, 2], "caller": caller}
                        (forked,) = await server.fork([request], [stdin, worker.stdout, worker.stderr])
                        pids.append(forked.pid)
                        if forked.mutex is not None:
                            self.on_fork(forked.pid, forked.mutex)
                    self._forked = True
                    return pids
                except ForkServerError as error:
                    log.warning("%s", self._supervisor.failed(server, str(error)))
                    kill(self.without_preforked(descendants(os.getpid(), without=not_to_kill)))
                    pids = []
            for worker in workers:
                streams = (stdin, worker.stdout, worker.stderr)
                pids.append(start_by_exec(launch, rank_environment(launch, worker.env), streams, self._child_setup))
            return pids
        except (OSError, subprocess.SubprocessError) as error:
            kill(pids)
            raise StartError(f"{launch.command.argv[0]}: {error}") from None
        finally:
            os.close(stdin)

    def child_ended(self, pid: int, code: int) -> Mapping[str, str] | None:
        """Handle a reaped child of this process: a worker, the fork server, or a fork that acts for a shim.

        Return the child's environment if it was a worker of a torchrun, else None.
        """
        self._supervisor.child_ended(pid, code)
        return self._shims.child_ended(pid, code) if self._shims is not None else None

    def record_start(self, *, failed_at_once: bool) -> None:
        """Record the outcome of the last `start`: forks that fail at once again and again are not used for a start."""
        before = self._fallback
        self._fallback = before.record_start(forked=self._forked, failed_at_once=failed_at_once)
        if self._fallback.use_exec and not before.use_exec:
            text = "%s: the next ones start by exec, which shows whether the fork or the program is to blame"
            log.info(text, FAILED_AT_ONCE)
        elif before.use_exec and not self._fallback.use_exec:
            log.info("a start by exec failed at once too: the program is to blame, and workers are forked again")

    def record_early_variable(self, error_file: str) -> None:
        """Start workers by exec from now on, if the worker with this error file wrote that its script needs it."""
        try:
            reason = printable(read_regular_file(early_variable_file(error_file), 256).data.decode(errors="replace"))
        except OSError:
            return
        if reason and not self._early_variable:
            self._early_variable = reason
            log.warning("workers start by exec: %s", reason)

    @property
    def _ready_fork_server(self) -> ForkServerClient | None:
        use_exec = self._fallback.use_exec or self._early_variable
        return None if use_exec else self._supervisor.ready

    def stop_fork_server(self) -> None:
        """End the fork server for good. Its pre-forked workers end with it; started workers go on."""
        self._supervisor.stop()

    def close(self) -> None:
        """End the fork server and the shims' service."""
        self.stop_fork_server()
        if self._shims is not None:
            self._shims.close()

    def _libuv_env(self) -> dict[str, str]:
        return {"USE_LIBUV": self._env["USE_LIBUV"]} if "USE_LIBUV" in self._env else {}

    def _torchrun_python_exec(self, command: PythonCommand, env: Mapping[str, str]) -> dict[str, str]:
        """Return the variable that makes a torchrun start its workers by the shim; {} if the user has set it.

        Only for a torchrun that runs in a fork: the shim stands for the interpreter of the fork server.
        """
        if self._shims is None or PYTHON_EXEC in env or not is_torchrun(command):
            return {}
        return {PYTHON_EXEC: self._shims.workers_python}

    def _fork_server_program(self) -> tuple[str, tuple[str, ...], PythonCommand | None]:
        """Return the fork server's interpreter, its flags, and the workers' command (None: shims name it)."""
        command = self._command
        if not self._preload:
            raise ForkServerError("preload is empty")
        if isinstance(command, PythonCommand):
            return command.interpreter, command.flags, command
        python = likely_python(command.argv, self._env) if self._scratch and command.starts_python else None
        if python is None:
            raise ForkServerError(command.reason)
        return python, (), None

    def _torchrun_in_shell(self) -> str:
        """Return the interpreter of a torchrun in a shell command whose script runs in its place; else an empty text.

        The shim is needed without a fork server too: each worker would start a torchrun with workers of its own.
        """
        command = self._command
        if isinstance(command, PythonCommand) or not command.starts_python or self._torchruns_workers:
            return ""
        if self._scratch is None or not any("torchrun" in word or "torch.distributed" in word for word in command.argv):
            return ""
        return likely_python(command.argv, self._env) or ""

    def _make_torchrun_shims(self, command: PythonCommand, ready: str) -> str:
        """Make the shims for torchrun's workers. Return a log line that begins with `ready`."""
        if set(command.flags) - {"-u"}:
            flags = " ".join(command.flags)
            return f"{ready}; torchrun's workers start by exec: torchrun does not pass on its interpreter flags {flags}"
        interpreter = shutil.which(command.interpreter, path=self._env.get("PATH")) or command.interpreter
        return self._make_shims(interpreter, f"{ready}, for torchrun and its workers")

    def _make_shims(self, interpreter: str, ready: str) -> str:
        """Write the shims and serve them. Return the log line `ready`, or the reason why workers start by exec."""
        assert self._scratch is not None  # noqa: S101
        own_agent = self._torchruns_workers > 0
        try:
            self._shims = ShimServer(
                self._scratch / "bin",
                interpreter,
                dict(self._env),
                self._fork_for,
                own_agent=own_agent,
                launches=self.launches,
            )
        except OSError as error:
            self._supervisor.replace_no_more()
            return self._supervisor.disable(f"cannot create shims for Python: {error}")
        return ready

    async def _fork_for(
        self, caller: ShimCaller, allowed: RunInFork, descriptors: Sequence[int], numbers: Sequence[int]
    ) -> int:
        """Fork a process that acts for a shim, and return its id."""
        if (server := self._ready_fork_server) is None:
            raise CannotForkError(self.fork_disabled_reason or "the fork server is not running")
        env = {**caller.env, **self._libuv_env(), **self._torchrun_python_exec(allowed.command, caller.env)}
        caller_process = caller_fields(caller, allowed, env)
        try:
            worker = {"env": {}, "descriptors": list(numbers), "caller": caller_process}
            (forked,) = await server.fork([worker], descriptors)
            self._forked = True
        except ForkServerError as error:
            self._supervisor.failed(server, str(error))
            raise CannotForkError(str(error)) from None
        return forked.pid

    def _exec(self, worker: WorkerStart) -> int:
        try:
            process = subprocess.Popen(
                with_local_rank(self._command, worker.env.get("LOCAL_RANK", "")).argv,
                env={**self._env, **worker.env, Env.AGENT_PID: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=worker.stdout,
                stderr=worker.stderr,
                start_new_session=True,
                preexec_fn=self._child_setup,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise StartError(f"{self._command.argv[0]}: {error}") from None
        process.returncode = 0  # the agent reaps; Popen must not
        return process.pid


def _command_of_rank(command: PythonCommand, worker: WorkerStart) -> dict[str, object]:
    """Return the field of a request with the worker's command, if its arguments name its local rank; else {}."""
    if not command.has_macros:
        return {}
    with_rank = with_local_rank(command, worker.env.get("LOCAL_RANK", ""))
    assert isinstance(with_rank, PythonCommand)  # noqa: S101
    return {"command": program_fields(with_rank)}

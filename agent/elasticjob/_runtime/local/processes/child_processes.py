"""Start the processes of a local run: the store and the agents."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elasticjob._runtime.agent.processes import die_with_parent
from elasticjob._runtime.contract import codec
from elasticjob._runtime.contract.commands.python_command import is_python
from elasticjob._runtime.contract.messages import Outcome, Termination
from elasticjob._runtime.contract.names import Env, ExitCode, job_store_clients
from elasticjob._runtime.control_link.link import LinkRole
from elasticjob._runtime.local.manifest.manifest import LocalJob
from elasticjob._runtime.system.code_root import program


@dataclass(frozen=True)
class RunEnvironment:
    """The environment that all processes of one run share. Keys are hexadecimal; `scratch` is the run's own folder."""

    job: LocalJob
    run_id: str
    keys: Mapping[LinkRole, str]
    port: int
    scratch: Path

    async def store(self, output: int, listener: socket.socket | None) -> asyncio.subprocess.Process:
        """Start the job's store. Its output goes to the descriptor `output`.

        It accepts on `listener`, or binds the port if that is None.
        """
        environ = {
            **os.environ,
            Env.JOB: self.job.name,
            Env.RUN_ID: self.run_id,
            Env.NODE_KEY: self.keys[LinkRole.AGENT],
            Env.OPERATOR_KEY: self.keys[LinkRole.OPERATOR],
            Env.EXECUTION_ATTEMPT: "1",
            Env.STORE_INCARNATION: "0",
            Env.PORT: str(self.port),
            Env.STORE_CLIENTS: job_store_clients(self.job.backend).value,
            Env.SETTINGS: codec.dumps(self.job.settings).decode(),
            Env.STATE_DIR: str(self.scratch),
        }
        if listener is None:
            return await _start([*program(), "store"], environ, output)
        environ[Env.LISTEN_FD] = str(listener.fileno())
        return await _start([*program(), "store"], environ, output, inherited=(listener.fileno(),))

    async def agent(self, index: int, incarnation: int, pod: str, output: int | None) -> asyncio.subprocess.Process:
        """Start a pod's agent. `output`: a descriptor, subprocess.PIPE, or None for this process's own output."""
        job, folder = self.job, self._folder(index, incarnation)
        folder.mkdir()
        environ = {
            **command_environment(job),
            Env.JOB: job.name,
            Env.RUN_ID: self.run_id,
            Env.NODE_KEY: self.keys[LinkRole.AGENT],
            Env.EXECUTION_ATTEMPT: "1",
            Env.INDEX: str(index),
            Env.POD_NAME: pod,
            Env.POD_IP: "127.0.0.1",
            Env.INCARNATION: str(incarnation),
            Env.STORE_ENDPOINT: f"127.0.0.1:{self.port}",
            Env.NPROC_PER_NODE: str(job.nproc_per_node),
            Env.NPROC_IS_DEFAULT: str(int(job.nproc_is_default)),
            Env.GPUS: str(job.gpus),
            Env.ROLE: job.role,
            Env.RENDEZVOUS_BACKEND: job.backend.value,
            Env.PRELOAD: ",".join(job.preload),
            Env.STOP_GRACE_SECONDS: str(job.settings.stop_grace),
            Env.GRACEFUL_SHUTDOWN_SECONDS: str(job.settings.graceful_shutdown),
            Env.TRAINER_INTEGRATION: job.trainer_integration.value,
            Env.JOIN_TIMEOUT_SECONDS: str(job.settings.join_timeout),
            Env.KEEP_ALIVE: f"{job.settings.keep_alive_interval:g}x{job.settings.keep_alive_max_attempts}",
            Env.TERMINATION_LOG: str(self._termination_log(pod)),
            Env.SCRATCH_DIR: str(folder),
        }
        return await _start([*program(), "agent", "--", *local_command(job)], environ, output, job.working_dir)

    def remove_files(self, index: int, incarnation: int) -> None:
        """Remove the files of an agent that has ended: one that was killed has left them."""
        shutil.rmtree(self._folder(index, incarnation), ignore_errors=True)

    def outcome(self, pod: str) -> Outcome | None:
        """Return how an agent that has ended says that it ended; None if it failed before it could."""
        with contextlib.suppress(OSError, codec.MessageError):
            return codec.parse(Termination, codec.loads(self._termination_log(pod).read_bytes())).outcome
        return None

    def _folder(self, index: int, incarnation: int) -> Path:
        return self.scratch / f"{index}-{incarnation}"

    def _termination_log(self, pod: str) -> Path:
        return self.scratch / f"{pod}.json"


def command_environment(job: LocalJob) -> dict[str, str]:
    """Return the environment of a job's command, as far as it follows from this process and the manifest."""
    path = search_path(os.environ.get("PATH", os.defpath), job.command, sys.executable)
    return {**os.environ, "PYTHONUNBUFFERED": "1", "PATH": path, **job.env}


def local_command(job: LocalJob) -> Sequence[str]:
    """Return a job's command with the interpreter of this process, unless the manifest chooses one by PATH."""
    return job.command if "PATH" in job.env else with_interpreter(job.command, sys.executable)


def search_path(path: str, command: Sequence[str], interpreter: str) -> str:
    """Return PATH for a command: `python3` and `torchrun` are found beside the interpreter of this process first.

    For Python the path stays, as under torchrun: `with_interpreter` has chosen it already.
    """
    folder = os.path.dirname(interpreter)  # noqa: PTH120
    found = shutil.which("python3", path=path)
    is_first = found is not None and os.path.dirname(found) == folder  # noqa: PTH120
    return path if is_first or is_python(command[0]) else f"{folder}{os.pathsep}{path}"


def with_interpreter(command: Sequence[str], interpreter: str) -> Sequence[str]:
    """Return the command with this interpreter for `python` or `python3`. A path or a version stays."""
    return (interpreter, *command[1:]) if command[0] in ("python", "python3") else command


def describe_exit_code(code: int) -> str:
    """Return a text for a process's return code: the signal, or the exit code and its name."""
    if code < 0:
        return signal.Signals(-code).name
    names = {e.value: e.name.lower() for e in ExitCode}
    return f"exit {code}{', ' + names[code] if code in names else ''}"


async def _start(
    argv: list[str],
    environ: Mapping[str, str],
    output: int | None,
    directory: str | None = None,
    inherited: Sequence[int] = (),
) -> asyncio.subprocess.Process:
    """Start a process that dies with this one. Its own session keeps the terminal's Ctrl-C from it."""
    return await asyncio.create_subprocess_exec(
        *argv,
        env=environ,
        cwd=directory,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=asyncio.subprocess.STDOUT if output == asyncio.subprocess.PIPE else output,
        start_new_session=True,
        preexec_fn=die_with_parent,
        pass_fds=inherited,
    )

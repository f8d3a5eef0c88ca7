"""Start the processes of a local run: the store and the agents."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elasticjob.agent.processes import die_with_parent
from elasticjob.code_root import program
from elasticjob.contract import codec
from elasticjob.contract.names import Env, ExitCode
from elasticjob.control_link.link import LinkRole
from elasticjob.local.manifest import LocalJob


@dataclass(frozen=True)
class RunEnvironment:
    """The environment that all processes of one run share. Keys are hexadecimal; `scratch` is the run's own folder."""

    job: LocalJob
    run_id: str
    keys: Mapping[LinkRole, str]
    port: int
    scratch: Path

    async def store(self, output: int) -> asyncio.subprocess.Process:
        """Start the job's store. Its output goes to the descriptor `output`."""
        environ = {
            **os.environ,
            Env.JOB: self.job.name,
            Env.RUN_ID: self.run_id,
            Env.NODE_KEY: self.keys[LinkRole.NODE],
            Env.OPERATOR_KEY: self.keys[LinkRole.OPERATOR],
            Env.EXECUTION_ATTEMPT: "1",
            Env.STORE_INCARNATION: "0",
            Env.PORT: str(self.port),
            Env.SETTINGS: codec.dumps(self.job.settings).decode(),
            Env.STATE_DIR: str(self.scratch),
        }
        return await _start([*program(), "store"], environ, output)

    async def agent(self, index: int, incarnation: int, pod: str, output: int | None) -> asyncio.subprocess.Process:
        """Start a node's agent. `output`: a descriptor, subprocess.PIPE, or None for this process's own output."""
        job = self.job
        environ = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            **job.env,
            Env.JOB: job.name,
            Env.RUN_ID: self.run_id,
            Env.NODE_KEY: self.keys[LinkRole.NODE],
            Env.EXECUTION_ATTEMPT: "1",
            Env.INDEX: str(index),
            Env.POD_NAME: pod,
            Env.POD_IP: "127.0.0.1",
            Env.INCARNATION: str(incarnation),
            Env.STORE_ENDPOINT: f"127.0.0.1:{self.port}",
            Env.NPROC_PER_NODE: str(job.nproc_per_node),
            Env.GPUS: str(job.gpus),
            Env.ROLE: job.role,
            Env.RENDEZVOUS_BACKEND: job.backend.value,
            Env.PRELOAD: ",".join(job.preload),
            Env.STOP_GRACE_SECONDS: str(job.settings.stop_grace),
            Env.JOIN_TIMEOUT_SECONDS: str(job.settings.join_timeout),
            Env.KEEP_ALIVE: f"{job.settings.keep_alive_interval:g}x{job.settings.keep_alive_max_attempts}",
            Env.TERMINATION_LOG: str(self.scratch / f"{pod}.json"),
        }
        return await _start([*program(), "agent", "--", *job.command], environ, output, job.working_dir)


def describe_exit_code(code: int) -> str:
    """Return a text for a process's return code: the signal, or the exit code and its name."""
    if code < 0:
        return signal.Signals(-code).name
    names = {e.value: e.name.lower() for e in ExitCode}
    return f"exit {code}{', ' + names[code] if code in names else ''}"


async def _start(
    argv: list[str], environ: Mapping[str, str], output: int | None, directory: str | None = None
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
    )

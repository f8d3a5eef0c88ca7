"""Start the ranks of a launcher that waits for them: as forks where a fork can be like the launcher, else by exec."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from elasticjob._runtime.agent.start_workers.command import with_local_rank
from elasticjob._runtime.agent.start_workers.fork_server_client import program_fields
from elasticjob._runtime.agent.start_workers.launches.launch import Launch
from elasticjob._runtime.agent.start_workers.shims.shim_callers import RunInFork, ShimCaller
from elasticjob._runtime.agent.start_workers.worker_environment import NCCL_ERRORS
from elasticjob._runtime.contract.names import Env

LAUNCHED = "ELASTICJOB_LAUNCHED"
"""1 in what a launcher has started: a launcher below it would train apart."""


def rank_environment(launch: Launch, worker: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a rank: that of the launcher, with what the agent assigns to the rank (`worker`)."""
    env = {name: value for name, value in launch.caller.env.items() if name != Env.LAUNCHES}
    assigned = {name: value for name, value in worker.items() if name != NCCL_ERRORS or name not in env}
    role = {"ROLE_NAME": launch.role} if launch.role else {}
    return {**env, **assigned, **role, LAUNCHED: "1"}


def caller_fields(
    caller: ShimCaller, run: RunInFork, env: Mapping[str, str], local_rank: str | None = None
) -> dict[str, Any]:
    """Return the fields of `run_main.CallerProcess`. `local_rank`: for the macros in the command, if it has any."""
    command = run.command if local_rank is None else with_local_rank(run.command, local_rank)
    return {
        "command": program_fields(command),  # type: ignore[arg-type]
        "executable": run.executable,
        "env": env,
        "directory": caller.directory,
        "umask": caller.umask,
        "ignored": caller.ignored,
        "limits": caller.limits,
        "unbuffered": "-u" in run.command.flags or bool(caller.env.get("PYTHONUNBUFFERED")),
    }


def start_by_exec(
    launch: Launch,
    env: Mapping[str, str],
    streams: Sequence[int],
    child_setup: Callable[[], None],
) -> int:
    """Start a rank by exec and return its process id; OSError or subprocess.SubprocessError if that fails."""
    caller = launch.caller

    def set_up() -> None:
        child_setup()
        for number, soft, hard in caller.limits:
            with suppress(OSError, ValueError):
                resource.setrlimit(number, (soft, hard))
        for number in caller.ignored:
            with suppress(OSError):
                signal.signal(number, signal.SIG_IGN)

    process = subprocess.Popen(
        with_local_rank(launch.command, env.get("LOCAL_RANK", "")).argv,
        env=dict(env),
        cwd=caller.directory,
        umask=caller.umask,
        stdin=streams[0],
        stdout=streams[1],
        stderr=streams[2],
        start_new_session=True,
        preexec_fn=set_up,
    )
    process.returncode = 0  # the agent reaps; Popen must not
    return process.pid


def null_device() -> int:
    """Return a descriptor of /dev/null."""
    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

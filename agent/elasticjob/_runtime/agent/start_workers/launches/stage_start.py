"""Start the ranks of a launcher that waits for them: as forks where a fork can be like the launcher, else by exec."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from elasticjob._runtime.agent.start_workers.command import PlainCommand, PythonCommand, UserCommand, with_local_rank
from elasticjob._runtime.agent.start_workers.fork_server_client import program_fields
from elasticjob._runtime.agent.start_workers.launches.pending_launch import Launch
from elasticjob._runtime.agent.start_workers.shims.shim_callers import RunInFork, ShimCaller
from elasticjob._runtime.agent.start_workers.worker_environment import NCCL_ERRORS
from elasticjob._runtime.contract.names import Env
from elasticjob._runtime.system.process_placement import read_placement

LAUNCHED = "ELASTICJOB_LAUNCHED"
"""1 in what a launcher has started: a launcher below it would train apart."""
_VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})", re.ASCII)


def rank_environment(launch: Launch, worker: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a rank: that of the launcher, with what the agent assigns to the rank (`worker`)."""
    env = {name: value for name, value in launch.caller.env.items() if name != Env.LAUNCHES}
    assigned = {name: value for name, value in worker.items() if name != NCCL_ERRORS or name not in env}
    role = {"ROLE_NAME": launch.role} if launch.role else {}
    named = {name: assigned[value] for name, value in launch.variables.items()}
    return {**env, **assigned, **named, **role, LAUNCHED: "1"}


def rank_command(launch: Launch, env: Mapping[str, str]) -> UserCommand:
    """Return what a rank with this environment runs."""
    command = launch.command
    if not launch.expands:
        return with_local_rank(command, env.get("LOCAL_RANK", ""))
    if isinstance(command, PlainCommand):
        return replace(command, argv=(command.argv[0], *(_expanded(word, env) for word in command.argv[1:])))
    return replace(command, args=tuple(_expanded(word, env) for word in command.args))


def run_of_rank(launch: Launch, run: RunInFork, env: Mapping[str, str]) -> RunInFork:
    """Return what a fork runs as the rank with this environment; `run` is the decision about the launcher's command."""
    command = rank_command(launch, env)
    assert isinstance(command, PythonCommand)  # noqa: S101
    return replace(run, command=command)


def _expanded(text: str, env: Mapping[str, str]) -> str:
    """Replace `$NAME` and `${NAME}` as `os.path.expandvars` does: an unknown name stays."""
    return _VARIABLE.sub(lambda found: env.get(found[1].strip("{}"), found[0]), text)


def caller_fields(caller: ShimCaller, run: RunInFork, env: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of `run_main.CallerProcess`."""
    return {
        "command": program_fields(run.command),
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
    is_placed = caller.placement == read_placement(os.getpid())

    def set_up() -> None:
        child_setup()
        if not is_placed:
            caller.placement.apply()
        for number, soft, hard in caller.limits:
            with suppress(OSError, ValueError):
                resource.setrlimit(number, (soft, hard))
        for number in caller.ignored:
            with suppress(OSError):
                signal.signal(number, signal.SIG_IGN)

    process = subprocess.Popen(
        rank_command(launch, env).argv,
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

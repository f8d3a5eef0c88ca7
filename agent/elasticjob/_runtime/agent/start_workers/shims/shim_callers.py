"""Read the attributes of processes that run a shim, and decide whether a fork can take their place."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from elasticjob._runtime.agent.start_workers.command import (
    PYTHON_EXEC,
    PlainCommand,
    PythonCommand,
    UserCommand,
    parse_shell_command,
)
from elasticjob._runtime.system.process_placement import ProcessPlacement, read_placement

_READ_AT_START = (
    *("PYTHON", "LD_", "LANG", "LC_", "GLIBC_", "MALLOC_", "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "NUMEXPR_"),
    *("TORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "PYTORCH_"),
)
"""Prefixes of variables that are read once, when the interpreter starts or a library is loaded."""
_READ_ON_USE = ("TORCH_NCCL_", "TORCH_ELASTIC_", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
"""Exceptions to `_READ_AT_START`: torch reads these on each use. torchrun sets them, for itself and its workers."""
_ANYWHERE = ProcessPlacement()
LIMITS = tuple(sorted(name for name in dir(resource) if name.startswith("RLIMIT_")))


@dataclass(frozen=True)
class ShimCaller:
    """A process that runs a shim, at the moment of its exec. Texts are decoded by `os.fsdecode`."""

    program: tuple[str, ...]
    """The command line that the process asked for."""
    env: Mapping[str, str]
    directory: str
    umask: int
    ignored: tuple[int, ...]
    """Signal numbers."""
    limits: tuple[tuple[int, int, int], ...]
    """(resource, soft, hard)."""
    process_attributes: tuple[object, ...]
    """Attributes that no process of the agent can take over: users, root, namespaces, and some placements."""
    of_torchrun: bool = False
    """Whether the process is a worker of a torchrun."""
    placement: ProcessPlacement = _ANYWHERE
    """A fork cannot take it over, a process that starts by exec can."""


@dataclass(frozen=True)
class ForkServerProcess:
    """The fork server, as far as its forks inherit it."""

    interpreter: str
    """Path."""
    env: Mapping[str, str]
    process_attributes: tuple[object, ...]
    placement: ProcessPlacement = _ANYWHERE


@dataclass(frozen=True)
class ExecInstead:
    """Decision: the shim executes `program`."""

    program: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class RunInFork:
    """Decision: a fork runs `command`, with `executable` as sys.executable."""

    command: PythonCommand
    executable: str


def fork_or_exec(
    caller: ShimCaller,
    fork_server: ForkServerProcess,
    torchrun_python: str,
    parse: Callable[[Sequence[str], str, Mapping[str, str]], UserCommand] = parse_shell_command,
) -> RunInFork | ExecInstead:
    """Decide whether a fork or the shim itself runs the program.

    `torchrun_python` is the interpreter of the caller's `torchrun`; `parse` reads the command line.
    """
    command = parse(caller.program, torchrun_python, caller.env)
    if isinstance(command, PlainCommand):
        return ExecInstead(command.argv, command.reason)
    path = shutil.which(command.interpreter, path=caller.env.get("PATH"))
    if path is None or not _same_interpreter(path, fork_server.interpreter):
        return ExecInstead(command.argv, f"the interpreter is {path}, the fork server runs {fork_server.interpreter}")
    if set(command.flags) - {"-u"}:
        return ExecInstead(command.argv, f"a fork does not support the interpreter flags {' '.join(command.flags)}")
    same = caller.placement == fork_server.placement
    if not same or caller.process_attributes != fork_server.process_attributes:
        return ExecInstead(command.argv, "its user, priority, processors, memory policy, root or namespaces differ")
    if changed := changed_at_start(fork_server.env, caller.env):
        return ExecInstead(command.argv, f"variables that are read only at the start differ: {', '.join(changed)}")
    return RunInFork(command, path)


def changed_at_start(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return the names of changed variables that a fork does not read again."""
    names = (name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return sorted(name for name in names if name.startswith(_READ_AT_START) and not name.startswith(_READ_ON_USE))


def _same_interpreter(path: str, other: str) -> bool:
    """Compare the folder too: virtual environments link to the same file, but each link is another interpreter."""
    return os.path.dirname(path) == os.path.dirname(other) and os.path.realpath(path) == os.path.realpath(other)  # noqa: PTH120


# ---- reading /proc -------------------------------------------------------------------------------------------------


def read_caller(pid: int, workers_python: tuple[str, str]) -> ShimCaller:
    """Return the caller with this process id; OSError or ValueError if it has ended.

    The caller's command line is `INTERPRETER -IS SHIM ARGUMENTS...`.
    `workers_python`: the shim that torchrun gets as PYTHON_EXEC, and the interpreter that the shim stands for.
    """
    proc = Path(f"/proc/{pid}")
    _, _, shim, *args = _split_at_zeros(proc / "cmdline")
    folder, _, name = shim.rpartition("/")
    env = dict(entry.split("=", 1) for entry in _split_at_zeros(proc / "environ") if "=" in entry)
    of_torchrun = shim == workers_python[0]
    if env.get(PYTHON_EXEC) == workers_python[0]:
        del env[PYTHON_EXEC]
    env["PATH"] = os.pathsep.join(entry for entry in env.get("PATH", "").split(os.pathsep) if entry != folder)
    attributes = read_process(pid)
    return replace(
        attributes, program=(workers_python[1] if of_torchrun else name, *args), env=env, of_torchrun=of_torchrun
    )


def read_process(pid: int) -> ShimCaller:
    """Return the attributes of any process, without program and environment; OSError or ValueError if it has ended."""
    proc = Path(f"/proc/{pid}")
    status = _status(proc)
    return ShimCaller(
        (),
        {},
        os.readlink(proc / "cwd"),  # noqa: PTH115
        int(status["Umask"], 8),
        _signals(int(status["SigIgn"], 16)),
        tuple((number, *resource.prlimit(pid, number)) for number in (getattr(resource, name) for name in LIMITS)),
        process_attributes(pid),
        placement=read_placement(pid),
    )


def process_attributes(pid: int) -> tuple[object, ...]:
    """Return `ShimCaller.process_attributes` of a process."""
    proc = Path(f"/proc/{pid}")
    status = _status(proc)
    root = os.stat(proc / "root")  # noqa: PTH116
    namespaces = tuple(os.readlink(proc / "ns" / kind) for kind in ("mnt", "net", "pid", "ipc"))  # noqa: PTH115
    credentials = tuple(status[name] for name in ("Uid", "Gid", "Groups", "CapEff", "NoNewPrivs"))
    placement = read_placement(pid)
    return (*credentials, (root.st_dev, root.st_ino), None if placement.can_be_applied() else placement, namespaces)


def _split_at_zeros(path: Path) -> list[str]:
    """Return the texts of /proc/PID/cmdline or environ."""
    return [os.fsdecode(text) for text in path.read_bytes().split(b"\0")[:-1]]


def _status(proc: Path) -> dict[str, str]:
    """Return the fields of /proc/PID/status."""
    lines = (proc / "status").read_text(errors="replace").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _signals(mask: int) -> tuple[int, ...]:
    """Return the signal numbers of a bit mask of /proc/PID/status."""
    return tuple(number for number in range(1, 65) if mask >> (number - 1) & 1)


def torchrun_interpreter(program: str) -> str:
    """Return the interpreter in the first line of the `torchrun` program; `python3` if there is none."""
    path = shutil.which(program)
    try:
        with open(path or program, "rb") as file:
            first = file.readline(512).decode(errors="replace").split()
    except OSError:
        return "python3"
    if not first or not first[0].startswith("#!") or "python" not in first[-1]:
        return "python3"
    return first[-1] if first[0].endswith("/env") else first[0][2:]

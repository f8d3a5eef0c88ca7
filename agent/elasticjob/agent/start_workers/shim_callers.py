"""Processes that run a shim: what is known of them, and whether a fork of the warm process can stand for one."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elasticjob.agent.start_workers.command import PlainCommand, PythonCommand, UserCommand, parse_command

_AT_IMPORT = (
    *("PYTHON", "LD_", "LANG", "LC_", "GLIBC_", "MALLOC_", "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "NUMEXPR_"),
    *("TORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "PYTORCH_"),
)
"""Variables that are read once, when the interpreter starts or a library is loaded."""
_ANY_TIME = ("TORCH_NCCL_", "TORCH_ELASTIC_", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
"""Of those, what torch reads where it uses it: torchrun has them, and its workers."""
PYTHON_EXEC = "PYTHON_EXEC"
"""The variable that names torchrun the interpreter of its workers."""
LIMITS = tuple(sorted(name for name in dir(resource) if name.startswith("RLIMIT_")))


@dataclass(frozen=True)
class ShimCaller:
    """A process at the moment of its exec. Texts are the operating system's bytes, decoded."""

    program: tuple[str, ...]
    """What it asked for."""
    env: Mapping[str, str]
    directory: str
    umask: int
    ignored: tuple[int, ...]
    """Signals."""
    limits: tuple[tuple[int, int, int], ...]
    """(resource, soft, hard)."""
    process_attributes: tuple[object, ...]
    """What no process can take over from another: users, processors, memory policy, root and namespaces."""
    of_torchrun: bool = False
    """Whether it is a worker of a torchrun."""


@dataclass(frozen=True)
class ForkServerProcess:
    """The warm process that might stand for it."""

    interpreter: str
    """Path."""
    env: Mapping[str, str]
    process_attributes: tuple[object, ...]


@dataclass(frozen=True)
class ExecInstead:
    """To be started by exec, as `program`."""

    program: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class RunInFork:
    """To be run in a fork, as if by the interpreter at `executable`."""

    command: PythonCommand
    executable: str


def fork_or_exec(
    caller: ShimCaller,
    warmth: ForkServerProcess,
    torchrun_python: str,
    read: Callable[[Sequence[str], str], UserCommand] = parse_command,
) -> RunInFork | ExecInstead:
    """What to run in a fork, or why it takes an exec. `torchrun_python`: the interpreter of its `torchrun`."""
    command = read(caller.program, torchrun_python)
    if isinstance(command, PlainCommand):
        return ExecInstead(command.argv, command.reason)
    path = shutil.which(command.interpreter, path=caller.env.get("PATH"))
    if path is None or not _same(path, warmth.interpreter):
        return ExecInstead(command.argv, f"the warm process is {warmth.interpreter}, not {path}")
    if set(command.flags) - {"-u"}:
        return ExecInstead(command.argv, f"flags {' '.join(command.flags)}")
    if caller.process_attributes != warmth.process_attributes:
        return ExecInstead(command.argv, "its user, processors, memory policy or namespaces are others")
    if changed := changed_at_import_only(warmth.env, caller.env):
        return ExecInstead(command.argv, f"read only at the start, and changed: {', '.join(changed)}")
    return RunInFork(command, path)


def changed_at_import_only(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Variables that a fork would not notice."""
    names = (name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return sorted(name for name in names if name.startswith(_AT_IMPORT) and not name.startswith(_ANY_TIME))


def _same(path: str, other: str) -> bool:
    """One environment's interpreter: links to the same file from two environments are two interpreters."""
    return os.path.dirname(path) == os.path.dirname(other) and os.path.realpath(path) == os.path.realpath(other)  # noqa: PTH120


# ---- reading /proc -------------------------------------------------------------------------------------------------


def read_caller(pid: int, workers_python: tuple[str, str]) -> ShimCaller:
    """OSError or ValueError where it is gone. Its command line is `INTERPRETER -IS SHIM ARGUMENTS...`.

    `workers_python`: the shim that torchrun is told of as PYTHON_EXEC, and the interpreter that it stands for.
    """
    proc = Path(f"/proc/{pid}")
    _, _, shim, *args = _words(proc / "cmdline")
    folder, _, name = shim.rpartition("/")
    env = dict(word.split("=", 1) for word in _words(proc / "environ") if "=" in word)
    of_torchrun = shim == workers_python[0]
    if env.get(PYTHON_EXEC) == workers_python[0]:
        del env[PYTHON_EXEC]
    env["PATH"] = os.pathsep.join(entry for entry in env.get("PATH", "").split(os.pathsep) if entry != folder)
    status = _status(proc)
    return ShimCaller(
        (workers_python[1] if of_torchrun else name, *args),
        env,
        os.readlink(proc / "cwd"),  # noqa: PTH115
        int(status["Umask"], 8),
        _signals(int(status["SigIgn"], 16)),
        tuple((number, *resource.prlimit(pid, number)) for number in (getattr(resource, name) for name in LIMITS)),
        process_attributes(pid),
        of_torchrun,
    )


def process_attributes(pid: int) -> tuple[object, ...]:
    """See `Caller.standing`."""
    proc = Path(f"/proc/{pid}")
    status = _status(proc)
    root = os.stat(proc / "root")  # noqa: PTH116
    try:
        memory = tuple((proc / "numa_maps").read_text().split()[1:2])
    except OSError:
        memory = ()  # a kernel without NUMA
    fields = (proc / "stat").read_text().rpartition(")")[2].split()
    namespaces = tuple(os.readlink(proc / "ns" / kind) for kind in ("mnt", "net", "pid", "ipc"))  # noqa: PTH115
    told = tuple(status[name] for name in ("Uid", "Gid", "Groups", "CapEff", "NoNewPrivs", "Cpus_allowed"))
    return (*told, (root.st_dev, root.st_ino), memory, fields[16], namespaces)


def _words(path: Path) -> list[str]:
    return [os.fsdecode(word) for word in path.read_bytes().split(b"\0")[:-1]]


def _status(proc: Path) -> dict[str, str]:
    lines = (proc / "status").read_text(errors="replace").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _signals(mask: int) -> tuple[int, ...]:
    return tuple(number for number in range(1, 65) if mask >> (number - 1) & 1)


def torchrun_interpreter(program: str) -> str:
    """The interpreter in the first line of the `torchrun` program, `python3` where that cannot be read."""
    path = shutil.which(program)
    try:
        with open(path or program, "rb") as file:
            first = file.readline(512).decode(errors="replace").split()
    except OSError:
        return "python3"
    if not first or not first[0].startswith("#!") or "python" not in first[-1]:
        return "python3"
    return first[-1] if first[0].endswith("/env") else first[0][2:]

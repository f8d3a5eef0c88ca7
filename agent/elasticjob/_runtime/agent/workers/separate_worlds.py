"""Find processes below a worker that train in another world than its round, where their Python does not check that.

Each Python below a worker checks it by itself (`start_workers/in_workers`), because that folder comes first on
PYTHONPATH. A command that replaces PYTHONPATH, or a Python with -I, -E or -S, does not load the folder. A launcher
there starts ranks of its own on each node, all write the same checkpoints, and the job succeeds. The ranks are found by
what the kernel shows: their environment names another rank or world size than the one that the coordinator assigned,
they have loaded torch, and they are connected to the store of that other world. Only the last one makes it certain.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elasticjob._runtime.agent.processes import kill
from elasticjob._runtime.agent.start_workers.in_workers.assigned import TRAINS
from elasticjob._runtime.agent.start_workers.in_workers.one_world import ALLOWED, record_refusal
from elasticjob._runtime.contract.commands.python_command import PythonCommand, is_python, parse_python_command
from elasticjob._runtime.contract.names import Env
from elasticjob._runtime.system.code_root import IN_WORKERS

FIRST_POLL, LONGEST_POLL = 1.0, 10.0
"""Seconds until the first search of a round, and most seconds between two: the time between them doubles."""
_WITHOUT_FOLDER = frozenset("IES")
"""Flags with which Python does not load the folder that PYTHONPATH names."""
_ESTABLISHED, _LISTENING = "01", "0A"
"""States in /proc/net/tcp."""


@dataclass(frozen=True)
class SeparateRank:
    """A process that would train, or trains, as another rank than its worker."""

    local_rank: int
    """Of the worker that it belongs to."""
    assigned: str
    """`rank R of N`, as the coordinator assigned it to the worker."""
    own: str
    """`rank R of N`, by the environment of the process."""
    port: int
    """Of the store of its world."""

    @property
    def message(self) -> str:
        return (
            f"a process below {self.assigned} of the job has joined the store of another world as {self.own}: it would"
            " train apart from the others. Its Python cannot take the place of a launcher, because the command replaces"
            " PYTHONPATH or starts Python with -I, -E or -S. Keep the variable (PYTHONPATH=.:$PYTHONPATH) and leave"
            f" the flag out, or set {ALLOWED}=1 in the pod template if this is meant"
        )


def separate_rank(environment: Mapping[str, str], argv: Sequence[str]) -> SeparateRank | None:
    """Return what a process is a rank of by its environment; None if that is its round, or if its Python checks it."""
    given = dict(word.split("=", 1) for word in environment.get(Env.WORLD, "").split() if "=" in word)
    port = environment.get("MASTER_PORT", "")
    if not all(name in given and name in environment for name in ("RANK", "WORLD_SIZE")) or not port.isdigit():
        return None
    if (given["RANK"], given["WORLD_SIZE"]) == (environment["RANK"], environment["WORLD_SIZE"]):
        return None
    if environment.get(ALLOWED) == "1" or TRAINS in environment or _checks_itself(environment, argv):
        return None
    return SeparateRank(
        int(given.get("LOCAL_RANK", "0")),
        f"rank {given['RANK']} of {given['WORLD_SIZE']}",
        f"rank {environment['RANK']} of {environment['WORLD_SIZE']}",
        int(port),
    )


def end_separate_worlds(pids: Iterable[int], workers: Mapping[int, tuple[int, str]]) -> None:
    """End each worker that has one of these processes, if that trains in another world: no restart can mend it.

    `workers`: process id and error file of the running workers, by local rank. The reason is in the file before the
    worker ends, also if the process that trains apart has lost its parent.
    """
    for pid in pids:
        try:
            found = separate_rank(_environment(pid), _texts(pid, "cmdline"))
            if found is None or not _has_torch(pid) or not _is_connected(pid, found.port):
                continue
        except (OSError, ValueError):  # it has ended, or belongs to another user
            continue
        if (worker := workers.get(found.local_rank)) is not None:
            leader, path = worker
            record_refusal(path, found.message)
            kill({leader, pid})


def _checks_itself(environment: Mapping[str, str], argv: Sequence[str]) -> bool:
    folders = environment.get("PYTHONPATH", "").split(os.pathsep)
    if not any(folder.endswith(IN_WORKERS) for folder in folders):
        return False
    command = parse_python_command(argv) if argv and is_python(argv[0]) else None
    return not isinstance(command, PythonCommand) or not _WITHOUT_FOLDER & set("".join(_switches(command.flags)))


def _switches(flags: Sequence[str]) -> list[str]:
    """Return the flags without the values of -W and -X."""
    return [flag for flag, before in zip(flags, ("", *flags), strict=False) if before not in ("-W", "-X")]


def _environment(pid: int) -> dict[str, str]:
    return dict(text.split("=", 1) for text in _texts(pid, "environ") if "=" in text)


def _texts(pid: int, name: str) -> list[str]:
    return [os.fsdecode(text) for text in Path(f"/proc/{pid}/{name}").read_bytes().split(b"\0")[:-1]]


def _has_torch(pid: int) -> bool:
    return b"libtorch" in Path(f"/proc/{pid}/maps").read_bytes()


def _is_connected(pid: int, port: int) -> bool:
    """Return whether a process has a TCP connection to this port, or listens on it."""
    folder, own = Path(f"/proc/{pid}"), set[str]()
    for descriptor in (folder / "fd").iterdir():
        try:
            own.add(os.readlink(descriptor))  # noqa: PTH115
        except OSError:
            continue  # closed by now
    for table in ("tcp", "tcp6"):
        for line in (folder / "net" / table).read_text().splitlines()[1:]:
            _, local, remote, state, *fields = line.split()
            ports = {int(local.rpartition(":")[2], 16)} if state == _LISTENING else {int(remote.rpartition(":")[2], 16)}
            if state in (_ESTABLISHED, _LISTENING) and port in ports and f"socket:[{fields[5]}]" in own:
                return True
    return False

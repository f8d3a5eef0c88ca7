"""Find processes below a worker that train in another world than its round, where their Python does not check that.

Each Python below a worker checks it by itself (`start_workers/in_workers`), because that folder comes first on
PYTHONPATH. A command that replaces PYTHONPATH, or a Python with -I, -E or -S, does not load the folder. A launcher
there starts ranks of its own in each pod, all write the same checkpoints, and the job succeeds. The ranks are found by
what the kernel shows: their environment names another rank or world size than the one that the coordinator assigned,
they have loaded torch, and they are connected to the store of that other world. Only the last one makes it certain.
Programs with torch below mpirun and other launchers that the job does not run are found as well.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elasticjob._runtime.agent.processes import descendants, kill, start_time
from elasticjob._runtime.agent.start_workers.in_workers.assigned import TRAINS, assigned_to
from elasticjob._runtime.agent.start_workers.in_workers.one_world import ALLOWED, record_refusal, unless_meant
from elasticjob._runtime.agent.start_workers.in_workers.refused import WORLD_OF_MPI, refused_launcher
from elasticjob._runtime.agent.workers.processes.process_table import ProcessTable
from elasticjob._runtime.agent.workers.processes.worker_process import FOR_NEXT_ROUND, IN_ROUND, SPARES
from elasticjob._runtime.contract.commands.python_command import PythonCommand, is_python, parse_python_command
from elasticjob._runtime.system.code_root import IN_WORKERS
from elasticjob._runtime.system.daemon_threads import DaemonExecutor

FIRST_POLL, LONGEST_POLL = 1.0, 10.0
"""Seconds until the first search of a round, and most seconds between two: the time between them doubles."""
_WITHOUT_FOLDER = frozenset("IES")
"""Flags with which Python does not load the folder that PYTHONPATH names."""
_ESTABLISHED, _LISTENING = "01", "0A"
"""States in /proc/net/tcp."""


@dataclass(frozen=True)
class SeparateRank:
    """A process that would train, or trains, as another rank than its worker."""

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


@dataclass(frozen=True)
class SeparateProcess:
    """A process that trains apart from the world of its worker."""

    pid: int
    started: str
    """As `start_time`."""
    local_rank: int
    """Of the worker that it belongs to."""
    message: str
    """Why, and what to write instead."""


def separate_rank(environment: Mapping[str, str], argv: Sequence[str]) -> SeparateRank | None:
    """Return what a process is a rank of by its environment; None if that is its round, or if its Python checks it."""
    given = assigned_to(environment)
    port = environment.get("MASTER_PORT", "")
    if not all(name in given and name in environment for name in ("RANK", "WORLD_SIZE")) or not port.isdigit():
        return None
    if (given["RANK"], given["WORLD_SIZE"]) == (environment["RANK"], environment["WORLD_SIZE"]):
        return None
    if _is_meant(environment) or _checks_itself(environment, argv):
        return None
    return SeparateRank(
        f"rank {given['RANK']} of {given['WORLD_SIZE']}",
        f"rank {environment['RANK']} of {environment['WORLD_SIZE']}",
        int(port),
    )


class SeparateWorlds:
    """Searches below the workers of this pod, and ends those below which a process trains in another world."""

    def __init__(self, table: ProcessTable, helper_pids: Set[int]) -> None:
        """`helper_pids`: programs of the agent's own, which are not searched."""
        self._table = table
        self._helper_pids = helper_pids
        self._thread = DaemonExecutor(threads=1)

    async def end_workers(self) -> None:
        """Search once, and end each worker that has such a process: no restart can mend it.

        /proc is read in a thread, because it may answer late: a process that waits for storage may hold the lock of its
        own memory. The reason is in the worker's file before the worker ends, also if the process that trains apart has
        lost its parent.
        """
        before = self._table.workers(IN_ROUND)
        without = frozenset({*self._helper_pids, *self._table.pids(FOR_NEXT_ROUND, SPARES)})
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._thread, find_separate_processes, without)
        now = {w.local_rank: (pid, w) for pid, w in self._table.workers(IN_ROUND).items()}
        for process in found:
            pid, worker = now.get(process.local_rank, (0, None))
            if worker is not None and pid in before and before[pid].round == worker.round:
                record_refusal(worker.error_file, process.message)
                kill({pid})
                if start_time(process.pid) == process.started:
                    kill({process.pid})


def find_separate_processes(without: Iterable[int]) -> list[SeparateProcess]:
    """Return the processes below this one that train apart, except for those below the processes in `without`."""
    found = []
    for pid in descendants(os.getpid(), without=without):
        with suppress(OSError, ValueError):  # it has ended, or belongs to another user
            started, environment = start_time(pid), _environment(pid)
            if message := _reason(pid, environment):
                local_rank = assigned_to(environment).get("LOCAL_RANK", "0")
                found.append(SeparateProcess(pid, started, int(local_rank), message))
    return found


def _reason(pid: int, environment: Mapping[str, str]) -> str:
    """Return why this process trains apart; "" if it does not as far as the kernel shows."""
    if not assigned_to(environment):
        return ""
    if (rank := separate_rank(environment, _texts(pid, "cmdline"))) is not None:
        return rank.message if _has_torch(pid) and _is_connected(pid, rank.port) else ""
    if _is_meant(environment) or _is_alone(environment):
        return ""
    launcher = refused_launcher(pid)
    return unless_meant(launcher) if launcher and _has_torch(pid) else ""


def _is_meant(environment: Mapping[str, str]) -> bool:
    return environment.get(ALLOWED) == "1" or TRAINS in environment


def _is_alone(environment: Mapping[str, str]) -> bool:
    """Return whether MPI has started one process, which may be a worker like any other."""
    return any(environment.get(name) == "1" for name in WORLD_OF_MPI)


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

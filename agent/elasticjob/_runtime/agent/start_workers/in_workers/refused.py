"""Launchers below a worker that the job does not run: each is named, with what to write instead.

They start ranks of their own. A manifest that shows one is refused before it starts; a script may hide it.
"""

from __future__ import annotations

import os

from .assigned import ASSIGNED

_MPI = (
    "starts ranks of its own, which the job does not restart: write the program behind it as the command, such as"
    " [python3, train.py], and its number of processes in each pod as spec.nprocPerNode"
)
REFUSED = {
    **{name: f"{name} {_MPI}" for name in ("mpirun", "mpiexec", "orterun", "srun")},
    "hyperpodrun": "hyperpodrun is an elastic agent of its own: write torchrun in its place",
    "ft_launcher": (
        "ft_launcher is an elastic agent of its own: write torchrun in its place, without its --ft-* options;"
        " spec.hangPolicy has a time-out for a rank that makes no progress, and spec.failurePolicy the number of"
        " restarts"
    ),
}
"""By program, the sentences of contract/commands/launchers.py, which cannot be imported here."""
_PROGRAMS = {**{name: name for name in REFUSED}, "mpiexec.hydra": "mpiexec", "prterun": "mpirun"}
"""By the name of a process, also those of Intel MPI and Open MPI 5, which their mpirun becomes."""
_SHELLS = ("sh", "bash", "dash")
WORLD_OF_MPI = {"OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpiexec"}
"""What Open MPI and the others set in the processes that they start."""


def refused_launcher(pid: int) -> str:
    """Return why the launcher is refused that a process of a worker is, or that has started it; "" without one.

    OSError: the process has ended, or belongs to another user.
    """
    while pid > 1 and f"\0{ASSIGNED}=".encode() in b"\0" + _read(pid, "environ"):  # the agent does not have it
        program, *arguments = _read(pid, "cmdline").split(b"\0")
        name = _base_name(program)
        if name.startswith("python") or name in _SHELLS:
            name = next((_base_name(word) for word in arguments if not word.startswith(b"-")), "")
        if name in _PROGRAMS:
            return REFUSED[_PROGRAMS[name]]
        pid = int(_read(pid, "stat").rpartition(b")")[2].split()[1])
    return ""


def own_refused_launcher() -> str:
    """Return why the launcher is refused that has started this process; "" without one.

    A Python that started by its name is a fork of the agent's: only its variables show what has started it.
    """
    try:
        if found := refused_launcher(os.getpid()):
            return found
    except (OSError, ValueError):
        pass
    return next((REFUSED[name] for variable, name in WORLD_OF_MPI.items() if variable in os.environ), "")


def _base_name(path: bytes) -> str:
    return os.fsdecode(path.rpartition(b"/")[2])


def _read(pid: int, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()

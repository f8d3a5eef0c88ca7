"""Each process group of a round gets its own prefix in the store of the round.

A shell may run `torchrun prepare.py && torchrun train.py`, and a program may destroy its process group and form another
one. All of them have the store of one round, where the second group would find the keys of the first: its ranks would
connect to addresses at which no process listens any more, and fail or hang. So the store counts the groups that each
rank has formed, and each group after the first one gets a prefix with its number. All ranks run the same program, so
they count alike. A process that fails before it has formed its group leaves the number to the one that tries again.
Each round has a new store, so ranks that stay and ranks that start in a round agree too.
"""

from __future__ import annotations

import functools
import os
import sys
from contextlib import suppress

from .assigned import ASSIGNED, TRAINS, assigned
from .one_world import ALLOWED, cannot_patch, check_world, fail_apart

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

_forming: tuple[tuple[int, str], Any, str] | None = None
"""Of a group that has got the store and is not formed yet: `_process_in_round`, the store, and the key of the count."""


def prefix_groups(module: ModuleType) -> None:
    """Give the store of torch.distributed.rendezvous the prefix of the group that gets it."""
    create = getattr(module, "_create_c10d_store", None)
    if create is None:
        cannot_patch("_create_c10d_store")
        return

    @functools.wraps(create)
    def _create_c10d_store(hostname: str, port: int, rank: int, world_size: int, *args: Any, **named: Any) -> Any:
        check_world(rank, world_size)  # ranks of another launcher would wait for a store that no process serves
        store = create(hostname, port, rank, world_size, *args, **named)
        if not _is_of_round(hostname, port):
            return store
        if prefix := _prefix_below_rank():
            return sys.modules["torch.distributed"].PrefixStore(prefix, store)
        if (stage := _stage(store, rank)) == 0:
            return store
        return sys.modules["torch.distributed"].PrefixStore(f"stage_{stage}", store)

    module._create_c10d_store = _create_c10d_store  # type: ignore[attr-defined]


def count_groups(module: ModuleType) -> None:
    """Note when a default process group is formed, and when it is destroyed: the next store is for another group."""
    update = getattr(module, "_update_default_pg", None)
    if update is None:
        return

    @functools.wraps(update)
    def _update_default_pg(group: Any) -> None:
        update(group)
        if group is None:
            _write(f"-{os.getpid()}")
        elif module.get_backend(group) != "fake":
            _count_group()

    module._update_default_pg = _update_default_pg  # type: ignore[attr-defined]


def _is_of_round(hostname: str, port: int) -> bool:
    """Return whether these are host and port of the store that the agent serves for the round."""
    given = assigned()
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return served and (hostname, str(port)) == (given.get("MASTER_ADDR"), given.get("MASTER_PORT"))


def _prefix_below_rank() -> str:
    """Return the prefix for what a rank that trains has started, such as its evaluation; "" for the ranks themselves.

    Such a process may call itself rank 0: it must not count as a group of the round's rank 0.
    """
    trains = os.environ.get(TRAINS, "")
    return "" if trains in ("", str(os.getpid())) else f"below_rank_{assigned().get('RANK')}_process_{trains}"


def _stage(store: Any, rank: int) -> int:
    """Return how many groups this rank has formed in the round before the one that is being formed."""
    global _forming
    key = f"groups_of_rank_{rank}"
    if _forming is None or _forming[0] != _process_in_round():
        _write(f"+{os.getpid()}")  # before the others are read: one of two processes at once finds the other
    _forming = (_process_in_round(), store, key)
    _refuse_second_process(rank)
    number: int = store.add(key, 0)
    return number


def _count_group() -> None:
    """Count the group that is formed, if it is the one that has got the round's store."""
    global _forming
    forming, _forming = _forming, None
    if forming is not None and forming[0] == _process_in_round():
        _, store, key = forming
        store.add(key, 1)


def _process_in_round() -> tuple[int, str]:
    """Return what a fork does not share, and what a process that stays does not share with its last round."""
    return os.getpid(), os.environ.get(ASSIGNED, "")


def _refuse_second_process(rank: int) -> None:
    """Raise SeparateWorldError if another process of this worker has a group of the round, or forms one.

    mpirun, or `&` in a shell, may run the script several times as the same rank. The first processes of all workers
    would form one world, the second ones another, and both would train the same model in silence.
    """
    if os.environ.get(TRAINS, own := str(os.getpid())) != own or os.environ.get(ALLOWED) == "1":
        return
    for pid in _processes_with_groups() - {os.getpid()}:
        if _is_alive(pid):
            fail_apart(
                f"processes {pid} and {os.getpid()} both form a group as rank {rank}: the job would train twice,"
                " side by side. A launcher, or & in a shell, has started the script again: start it once"
            )


def _write(line: str) -> None:
    """Add a line to this worker's file of this round, in which +PID forms a group and -PID has destroyed it.

    A worker that may not write there, because it has dropped its privileges, is not checked.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with suppress(OSError), open(f"{path}.groups", "a") as file:
            file.write(f"{line}\n")


def _processes_with_groups() -> set[int]:
    found = set[int]()
    with suppress(OSError, ValueError), open(f"{os.environ.get('TORCHELASTIC_ERROR_FILE')}.groups") as file:
        for line in file:
            (found.add if line[0] == "+" else found.discard)(int(line[1:]))
    return found


def _is_alive(pid: int) -> bool:
    with suppress(OSError, IndexError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] not in "ZX"
    return False

"""The store of a round: groups that follow each other in one worker meet there under names of their own.

A shell may run `torchrun prepare.py && torchrun train.py`, and a program may destroy its process group and form another
one. All of them have the store of one round, where the second group would find the keys of the first: its ranks would
connect to addresses at which no process listens any more, and fail or hang. So the store counts the groups of each
rank, and each group after the first one gets a prefix with its number. All ranks run the same program, so they count
alike. Each round has a new store, so ranks that stay and ranks that start in a round agree too.
"""

from __future__ import annotations

import functools
import os
import sys

from .assigned import assigned
from .one_world import cannot_patch, check_world

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

_forming: tuple[int, int] | None = None
"""Process id, and number of the group that has got a store and is not formed yet."""


def separate_stages(module: ModuleType) -> None:
    """Give the store of torch.distributed.rendezvous the prefix of the group that gets it."""
    create = getattr(module, "_create_c10d_store", None)
    if create is None:
        cannot_patch("_create_c10d_store")
        return

    @functools.wraps(create)
    def _create_c10d_store(hostname: str, port: int, rank: int, world_size: int, *args: Any, **named: Any) -> Any:
        check_world(rank, world_size)  # ranks of another launcher would wait for a store that no process serves
        store = create(hostname, port, rank, world_size, *args, **named)
        if not _is_of_round(hostname, port) or (stage := _stage(store, rank)) == 0:
            return store
        return sys.modules["torch.distributed"].PrefixStore(f"stage_{stage}", store)

    module._create_c10d_store = _create_c10d_store  # type: ignore[attr-defined]


def count_groups(module: ModuleType) -> None:
    """Let the next store that torch.distributed.rendezvous creates after a default process group be for another one."""
    update = getattr(module, "_update_default_pg", None)
    if update is None:
        return

    @functools.wraps(update)
    def _update_default_pg(group: Any) -> None:
        update(group)
        if group is not None and module.get_backend(group) != "fake":
            global _forming
            _forming = None

    module._update_default_pg = _update_default_pg  # type: ignore[attr-defined]


def _is_of_round(hostname: str, port: int) -> bool:
    """Return whether these are host and port of the store that the agent serves for the round."""
    given = assigned()
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return served and (hostname, str(port)) == (given.get("MASTER_ADDR"), given.get("MASTER_PORT"))


def _stage(store: Any, rank: int) -> int:
    """Return how many groups of this rank got the round's store before the one that is being formed.

    A process that tries again to form a group keeps its number, unless the store is that of another round.
    """
    global _forming
    key = f"groups_of_rank_{rank}"
    if _forming is None or _forming[0] != os.getpid() or not store.check([key]):
        _forming = (os.getpid(), store.add(key, 1) - 1)
    return _forming[1]

"""The store of a round: only its ranks meet there, and programs that follow each other in one worker do so apart.

A shell may run `torchrun prepare.py && torchrun train.py`, or start Python twice. All of them have the store of one
round, where the second one would find the keys of the first: its ranks would connect to processes that have ended, and
hang. So each process after the first one gets a prefix of its own there. All ranks run the same commands: they count
alike.
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


def separate_stages(module: ModuleType) -> None:
    """Give the store of torch.distributed.rendezvous the prefix of this process."""
    create = getattr(module, "_create_c10d_store", None)
    if create is None:
        cannot_patch("_create_c10d_store")
        return

    @functools.wraps(create)
    def _create_c10d_store(hostname: str, port: int, rank: int, world_size: int, *args: Any, **named: Any) -> Any:
        check_world(rank, world_size)  # ranks of another launcher would wait for a store that no process serves
        store = create(hostname, port, rank, world_size, *args, **named)
        if not _is_of_round(hostname, port) or (stage := _stage(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))) == 0:
            return store
        return sys.modules["torch.distributed"].PrefixStore(f"stage_{stage}", store)

    module._create_c10d_store = _create_c10d_store  # type: ignore[attr-defined]


def _is_of_round(hostname: str, port: int) -> bool:
    """Return whether these are host and port of the store that the agent serves for the round."""
    given = assigned()
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return served and (hostname, str(port)) == (given.get("MASTER_ADDR"), given.get("MASTER_PORT"))


def _stage(error_file: str) -> int:
    """Return how many processes of this worker formed a group in this round before this one.

    `error_file`: of this worker in this round. The file beside it has a line for each of the processes. A worker that
    may not write there, because it has dropped its privileges, counts none, as the other ranks do.
    """
    own = f"{os.getpid()}\n"
    try:
        with open(f"{error_file}.groups", "a+") as file:
            file.seek(0)
            before = file.readlines()
            if own in before:
                return before.index(own)
            file.write(own)
            return len(before)
    except OSError:
        return 0

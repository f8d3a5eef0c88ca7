"""Programs that follow each other in one worker form their process groups apart from each other.

A shell may run `torchrun prepare.py && torchrun train.py`, or start Python twice. All of them have the store of one
round, where the second one would find the keys of the first: its ranks would connect to processes that have ended, and
hang. So each process after the first one gets a prefix of its own there. All ranks run the same commands: they count
alike.
"""

from __future__ import annotations

import functools
import os
import sys
from types import ModuleType
from typing import Any

from .assigned import assigned


def separate_stages(module: ModuleType) -> None:
    """Give the store of torch.distributed.rendezvous the prefix of this process."""
    create = module._create_c10d_store

    @functools.wraps(create)
    def _create_c10d_store(hostname: str, port: int, *args: Any, **named: Any) -> Any:
        store = create(hostname, port, *args, **named)
        if not _is_of_round(hostname, port) or (stage := _stage(os.environ["TORCHELASTIC_ERROR_FILE"])) == 0:
            return store
        return sys.modules["torch.distributed"].PrefixStore(f"stage_{stage}", store)

    module._create_c10d_store = _create_c10d_store  # type: ignore[attr-defined]


def _is_of_round(hostname: str, port: int) -> bool:
    """Return whether these are host and port of the store that the agent serves for the round."""
    variables = ("TORCHELASTIC_USE_AGENT_STORE", "MASTER_ADDR", "MASTER_PORT")
    served = tuple(os.environ.get(name) for name in variables) == ("True", hostname, str(port))
    return served and bool(assigned()) and bool(os.environ.get("TORCHELASTIC_ERROR_FILE"))


def _stage(error_file: str) -> int:
    """Return how many processes of this worker formed a group in this round before this one.

    `error_file`: of this worker in this round. The file beside it has a line for each of the processes.
    """
    own = f"{os.getpid()}\n"
    with open(f"{error_file}.groups", "a+") as file:
        file.seek(0)
        before = file.readlines()
        if own in before:
            return before.index(own)
        file.write(own)
        return len(before)

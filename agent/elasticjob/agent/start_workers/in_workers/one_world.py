"""A worker trains in the world of its round, or says so.

A launcher below the pod's command (deepspeed, composer, an own program) may start ranks of its own on each node: then
each node trains alone, all write the same checkpoints, and the job succeeds. torch forms a default process group in
each of these ranks, and here its size and rank are compared with those that the agent gave to the worker.
"""

from __future__ import annotations

import functools
import json
import os
import time
from types import ModuleType
from typing import Any

from .assigned import assigned

ALLOWED = "ALLOW_SEPARATE_WORLDS"
"""1: the script means it."""
TRAINS = "ELASTICJOB_TRAINS"
"""Process id of the process that has formed the group of the round; what it starts may form groups of its own."""


class SeparateWorldError(RuntimeError):
    """This process would train in another world than that of its round. No restart can change that."""


def check_groups(module: ModuleType) -> None:
    """Check each default process group that torch.distributed forms."""
    update = module._update_default_pg

    @functools.wraps(update)
    def _update_default_pg(group: Any) -> None:
        if group is not None:
            check_world(group.rank(), group.size())
        update(group)

    module._update_default_pg = _update_default_pg  # type: ignore[attr-defined]


def check_world(rank: int, size: int) -> None:
    """Raise SeparateWorldError if a process group of this rank and size is not that of the round."""
    given, trains = assigned(), os.environ.get(TRAINS, "")
    if not given or os.environ.get(ALLOWED) == "1" or trains not in ("", str(os.getpid())):
        return
    if (given["RANK"], given["WORLD_SIZE"]) != (str(rank), str(size)):
        own_rank, world = given["RANK"], given["WORLD_SIZE"]
        fail(
            f"this process formed a process group as rank {rank} of {size}, but it belongs to rank {own_rank} of the"
            f" job's {world}: it would train apart from the others. Let the script take RANK and WORLD_SIZE from the"
            f" environment, and start it without a launcher that starts ranks itself; set {ALLOWED}=1 in the pod"
            " template if this is meant"
        )
    os.environ[TRAINS] = str(os.getpid())


def fail(message: str) -> None:
    """Raise SeparateWorldError with this message; the agent gets it even if the script catches it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and not os.path.exists(path):  # noqa: PTH110
        extra = {"py_callstack": f"SeparateWorldError: {message}", "timestamp": str(int(time.time()))}
        with open(path, "w") as file:
            json.dump({"message": {"message": f"SeparateWorldError: {message}", "extraInfo": extra}}, file)
    raise SeparateWorldError(message)

"""A worker trains in the world of its round, or says so.

A launcher below the pod's command (deepspeed, composer, an own program) may start ranks of its own in each pod: then
each node trains alone, all write the same checkpoints, and the job succeeds. torch forms a default process group in
each of these ranks, and here its size and rank are compared with those that the agent gave to the worker.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from contextlib import suppress

from .assigned import TRAINS, assigned
from .refused import own_refused_launcher

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

LAUNCHES = "ELASTICJOB_LAUNCHES"
"""The agent's socket for launchers; present where a command may run once in its pod."""
ALLOWED = "ALLOW_SEPARATE_WORLDS"
"""1: the script means it."""


class SeparateWorldError(RuntimeError):
    """This process would train in another world than that of its round. No restart can change that."""


def cannot_patch(name: str) -> None:
    """Say that this torch lacks a function that is to be patched."""
    print(f"[elasticjob] this torch has no {name}: workers that train apart are not noticed", file=sys.stderr)


def check_groups(module: ModuleType) -> None:
    """Check each default process group that torch.distributed forms."""
    update = getattr(module, "_update_default_pg", None)
    if update is None:
        cannot_patch("_update_default_pg")
        return

    @functools.wraps(update)
    def _update_default_pg(group: Any) -> None:
        # Groups of the backend `fake` plan a training that does not happen.
        if group is not None and module.get_backend(group) != "fake":
            check_world(group.rank(), group.size())
            _note_group()
        update(group)

    module._update_default_pg = _update_default_pg  # type: ignore[attr-defined]


def check_world(rank: int, size: int) -> None:
    """Raise SeparateWorldError if a process group of this rank and size is not that of the round.

    What has joined the group of the round, and what it starts, may form other groups.
    """
    given = assigned()
    if not given or os.environ.get(ALLOWED) == "1" or TRAINS in os.environ:
        return
    if (given["RANK"], given["WORLD_SIZE"]) != (str(rank), str(size)):
        own_rank, world = given["RANK"], given["WORLD_SIZE"]
        fail_apart(
            f"this process forms a process group as rank {rank} of {size}, but it belongs to rank {own_rank} of the"
            f" job's {world}: it would train apart from the others. Let the script take RANK and WORLD_SIZE from the"
            " environment, and start it without a launcher that starts ranks itself"
        )
    if LAUNCHES in os.environ and size > 1:
        from .hand_over import begin_as_rank  # only where a command may run once in its pod

        begin_as_rank()


def _note_group() -> None:
    """Note that this process is in the group of the round; a refusal before that was of no consequence."""
    if not assigned() or TRAINS in os.environ:
        return
    os.environ[TRAINS] = str(os.getpid())
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    with suppress(OSError):
        with open(path) as file:
            refused = SeparateWorldError.__name__ in file.read(1000)
        if refused:
            os.unlink(path)  # noqa: PTH108


def fail_apart(message: str) -> None:
    """Raise SeparateWorldError for a process that is not a rank of the round, with the launcher that has started it."""
    fail(unless_meant(own_refused_launcher() or message))


def unless_meant(message: str) -> str:
    """Return the message of a refusal with what to set if the script means it."""
    return f"{message}; set {ALLOWED}=1 in the pod template if this is meant"


def fail(message: str) -> None:
    """Raise SeparateWorldError with this message; the agent gets it even if the script catches it.

    Not so below a worker that trains already: what it starts may fail without any harm to the job.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and TRAINS not in os.environ:
        record_refusal(path, message)
    raise SeparateWorldError(message)


def record_refusal(path: str, message: str, name: str = SeparateWorldError.__name__) -> None:
    """Write an exception of this name to the error file of a worker, unless the file exists."""
    if os.path.exists(path):  # noqa: PTH110
        return
    extra = {"py_callstack": f"{name}: {message}", "timestamp": str(int(time.time()))}
    with suppress(OSError), open(path, "w") as file:
        json.dump({"message": {"message": f"{name}: {message}", "extraInfo": extra}}, file)

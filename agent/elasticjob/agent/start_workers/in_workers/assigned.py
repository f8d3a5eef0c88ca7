"""The ranks and the store that the agent gave to a worker, whatever launchers have set since."""

from __future__ import annotations

import os

ASSIGNED = "ELASTICJOB_WORLD"
"""`NAME=VALUE` of torchrun's variables, separated by spaces."""
_STORE = ("MASTER_ADDR", "MASTER_PORT")


def assigned() -> dict[str, str]:
    """Return the variables; empty outside of a worker."""
    return dict(word.split("=", 1) for word in os.environ.get(ASSIGNED, "").split() if "=" in word)


def restore_assigned() -> None:
    """Set the variables again: what a launcher starts runs as the rank that the launcher itself is."""
    os.environ.update(assigned())


def restore_store() -> None:
    """Set the address of the round's store again if a launcher changed it for one process with the worker's rank.

    accelerate does that for a job of several processes on CPUs: it starts one, and expects the others from mpirun.
    """
    given = assigned()
    if all(os.environ.get(name) == given.get(name) for name in ("RANK", "WORLD_SIZE")):
        os.environ.update({name: given[name] for name in _STORE if name in given})

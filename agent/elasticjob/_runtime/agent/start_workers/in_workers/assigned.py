"""The ranks and the store that the agent gave to a worker, whatever launchers have set since."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

ASSIGNED = "ELASTICJOB_WORLD"
"""`NAME=VALUE` of torchrun's variables, separated by spaces."""
TRAINS = "ELASTICJOB_TRAINS"
"""Process id of the process that has formed the group of the round; what it starts may form groups of its own."""


def assigned() -> dict[str, str]:
    """Return the variables; empty outside of a worker."""
    return assigned_to(os.environ)


def assigned_to(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the agent gave to the worker of a process with this environment."""
    return dict(word.split("=", 1) for word in environment.get(ASSIGNED, "").split() if "=" in word)


def restore_assigned() -> None:
    """Set the variables again: what a launcher starts runs as the rank that the launcher itself is."""
    os.environ.update(assigned())

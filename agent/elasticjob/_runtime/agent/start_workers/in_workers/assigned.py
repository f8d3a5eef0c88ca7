"""The ranks and the store that the agent gave to a worker, whatever launchers have set since."""

from __future__ import annotations

import os

ASSIGNED = "ELASTICJOB_WORLD"
"""`NAME=VALUE` of torchrun's variables, separated by spaces."""
TRAINS = "ELASTICJOB_TRAINS"
"""Process id of the process that has formed the group of the round; what it starts may form groups of its own."""


def assigned() -> dict[str, str]:
    """Return the variables; empty outside of a worker."""
    return dict(word.split("=", 1) for word in os.environ.get(ASSIGNED, "").split() if "=" in word)


def restore_assigned() -> None:
    """Set the variables again: what a launcher starts runs as the rank that the launcher itself is."""
    os.environ.update(assigned())

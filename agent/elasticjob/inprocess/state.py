"""The state of a rank that hooks receive and return. It is immutable: a hook returns a changed copy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any


class Status(Enum):
    """What a rank does in an iteration."""

    INITIALIZED = "initialized"
    """It has no part yet."""
    ACTIVE = "active"
    """It calls the wrapped function."""
    INACTIVE = "inactive"
    """It is a spare: it waits until another rank has completed, or has to be replaced."""
    TERMINATED = "terminated"
    """It leaves the job."""


@dataclass(frozen=True)
class State:
    """One rank in one iteration.

    This is `elasticjob.inprocess.State`, with NVIDIA's name. `elasticjob.State` is another class: the state of a
    training.

    Example:
        >>> spare = State(rank=3, world_size=4, initial_rank=3, initial_world_size=4, status=Status.INACTIVE)
        >>> spare.is_active
        False
    """

    rank: int
    """Rank among all ranks of this iteration, spares included."""
    world_size: int
    """Number of ranks of this iteration, spares included."""
    initial_rank: int
    """RANK when the wrapped function was called."""
    initial_world_size: int
    """WORLD_SIZE when the wrapped function was called."""
    active_rank: int | None = None
    """Rank among those that call the function: its RANK. None for a spare."""
    active_world_size: int | None = None
    """Number of ranks that call the function: their WORLD_SIZE."""
    iteration: int = 0
    """Number of restarts so far."""
    status: Status = Status.INITIALIZED
    fn_exception: Exception | None = field(default=None, compare=False)
    """What the function raised on this rank in the iteration that ended last."""
    store: Any = field(default=None, compare=False, repr=False)
    """The store of this iteration, a `StoreMixin`. With the default factory it is a `torch.distributed.Store` too."""

    @property
    def is_active(self) -> bool:
        """Whether the rank calls the function in this iteration."""
        return self.status is Status.ACTIVE

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> State:
        """Return the state of a rank as its launcher set it up. ValueError: a variable is missing or wrong."""
        rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
        if not 0 <= rank < world_size:
            raise ValueError(f"RANK={rank} must be less than WORLD_SIZE={world_size}: start this process with torchrun")
        return cls(rank, world_size, rank, world_size)

    def with_rank(self, rank: int, world_size: int) -> State:
        """Return the state with another rank among `world_size` ranks."""
        return replace(self, rank=rank, world_size=world_size)

    def activate_all_ranks(self) -> State:
        """Return the state with every rank active, this one among them."""
        return self.activate(self.world_size)

    def activate(self, active_world_size: int) -> State:
        """Return the state with ranks below `active_world_size` active, and this one a spare if it is not below."""
        active = self.rank < active_world_size
        return replace(
            self,
            active_rank=self.rank if active else None,
            active_world_size=active_world_size,
            status=Status.ACTIVE if active else Status.INACTIVE,
        )

    def terminate(self) -> State:
        """Return the state of a rank that leaves the job."""
        return replace(self, active_rank=None, status=Status.TERMINATED)

    def advance(self) -> State:
        """Return the state in the next iteration."""
        return replace(self, iteration=self.iteration + 1, store=None)

    def distributed_variables(self) -> dict[str, str]:
        """Return the environment variables from which torch.distributed reads the ranks."""
        rank = self.rank if self.active_rank is None else self.active_rank
        return {"RANK": str(rank), "WORLD_SIZE": str(self.active_world_size or self.world_size)}


def _number(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name, "")
    if not value.isdigit():
        raise ValueError(f"the environment variable {name} must be a number, not {value!r}: use torchrun, for example")
    return int(value)

"""Rank and world size of this process in the current round. Imports torch."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist


class Ranks:
    """Rank and world size: fixed ones, or those of the round in which `current` is called."""

    def __init__(self, rank: int | None = None, world_size: int | None = None, data_parallel: Any = None) -> None:
        """`data_parallel`: where the ranks of one model replica share their samples, what has the replica's number.

        A process group, a device mesh of one dimension, or a function that returns one of these or (rank, size).
        ValueError if only one of `rank` and `world_size` is given, if the rank is not below the world size, or if
        `data_parallel` is given too. TypeError if it is something else.
        """
        if (rank is None) != (world_size is None):
            raise ValueError("give both rank and world_size, or neither of them")
        if data_parallel is not None and rank is not None:
            raise ValueError("give either rank and world_size, or data_parallel")
        if data_parallel is not None and not callable(data_parallel):
            _check_source(data_parallel)
        self._fixed = None if rank is None or world_size is None else checked_ranks(rank, world_size)
        self._data_parallel = data_parallel

    def current(self) -> tuple[int, int]:
        """Return (rank, world size).

        They are fixed, of `data_parallel`, of torch.distributed, of RANK and WORLD_SIZE, or (0, 1).

        ValueError if `data_parallel` has no rank for this process, or is of an earlier round.
        """
        if self._fixed is not None:
            return self._fixed
        if self._data_parallel is not None:
            return _ranks_in(self._data_parallel() if callable(self._data_parallel) else self._data_parallel)
        if dist.is_available() and dist.is_initialized():
            return int(dist.get_rank()), int(dist.get_world_size())
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

    def __getstate__(self) -> dict[str, Any]:
        """Fix the current values in a copy: a spawned data loader worker has no process group."""
        return {"_fixed": self.current(), "_data_parallel": None}


def checked_ranks(rank: int, size: int) -> tuple[int, int]:
    """Return both; ValueError if the rank is not below the size."""
    if not 0 <= rank < size:
        raise ValueError(f"rank is {rank} and world_size is {size}: want a rank from 0 to world_size - 1")
    return int(rank), int(size)


def _ranks_in(source: Any) -> tuple[int, int]:
    """Return rank and size of this process in what `data_parallel` is or returns."""
    if isinstance(source, tuple):
        return checked_ranks(*source)
    _check_source(source)
    try:
        group = source.get_group() if _is_mesh(source) else source
        rank, size = int(dist.get_rank(group)), int(dist.get_world_size(group))
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            "data_parallel is a process group that has ended with its round: pass a function that returns the group of "
            "the present one, such as data_parallel=lambda: mesh['dp']"
        ) from error
    if rank < 0:
        raise ValueError("data_parallel is a process group without this process: pass the group that has it")
    return rank, size


def _check_source(source: Any) -> None:
    if _is_mesh(source):
        if source.ndim != 1:
            raise ValueError(
                f"data_parallel is a mesh of {source.ndim} dimensions: pass one of them, such as mesh['dp']"
            )
    elif not isinstance(source, (dist.ProcessGroup, tuple)) and source is not dist.GroupMember.NON_GROUP_MEMBER:
        raise TypeError(
            f"data_parallel is of type {type(source).__name__}: pass a process group, a device mesh of one dimension, "
            "or a function that returns one of these or (rank, size)"
        )


def _is_mesh(source: Any) -> bool:
    return hasattr(source, "get_group") and hasattr(source, "ndim")

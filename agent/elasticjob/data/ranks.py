"""Rank and world size of this process in the current round. Imports torch."""

from __future__ import annotations

import os

import torch.distributed as dist


class Ranks:
    """Rank and world size: fixed ones, or those of the round in which `current` is called."""

    def __init__(self, rank: int | None = None, world_size: int | None = None) -> None:
        """ValueError if only one of both is given, or if the rank is not below the world size."""
        if (rank is None) != (world_size is None):
            raise ValueError("give both rank and world_size, or neither of them")
        if rank is not None and world_size is not None and not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank} and world_size is {world_size}: want a rank from 0 to world_size - 1")
        self._fixed = None if rank is None or world_size is None else (rank, world_size)

    def current(self) -> tuple[int, int]:
        """Return (rank, world size): fixed, of torch.distributed, of RANK and WORLD_SIZE, or (0, 1)."""
        if self._fixed is not None:
            return self._fixed
        if dist.is_available() and dist.is_initialized():
            return int(dist.get_rank()), int(dist.get_world_size())
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

    def __getstate__(self) -> dict[str, tuple[int, int]]:
        """Fix the current values in a copy: a spawned data loader worker has no process group."""
        return {"_fixed": self.current()}

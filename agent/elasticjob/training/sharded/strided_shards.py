"""Which part of a tensor a rank holds that tensor parallelism and FSDP2 shard along the same dimension.

ColwiseParallel shards the rows of a weight over the ranks of a replica, and `fully_shard` then shards the rows of each
rank over the replicas. A DTensor lists its mesh dimensions from the outside to the inside, the replicas first, so that
torch gives these the placement `_StridedShard`: in the whole tensor, a replica has one stripe of the rows of each
tensor-parallel rank. What a rank holds is still one range of rows, a part of those of its tensor-parallel rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def is_strided(placement: Any) -> bool:
    """Return whether a placement shards what later mesh dimensions have sharded before."""
    return type(placement).__name__ == "_StridedShard"


def strided_range(
    size: int, dimension: int, placements: Sequence[Any], shape: Sequence[int], at: Sequence[int]
) -> range:
    """Return the indices of a dimension of `size` that the rank at coordinates `at` of a mesh of that shape holds.

    ValueError for placements in another order than those of FSDP2 over tensor parallelism.
    """
    mine = [number for number, placement in enumerate(placements) if getattr(placement, "dim", None) == dimension]
    strided = [number for number in mine if is_strided(placements[number])]
    inner = [number for number in mine if number not in strided]
    factor = math.prod(shape[number] for number in inner)
    if (
        len(strided) != 1
        or any(number < strided[0] for number in inner)
        or placements[strided[0]].split_factor != factor
    ):
        raise ValueError(f"placements {tuple(placements)}")
    found = range(size)
    for number in (*inner, *strided):
        found = _chunk(found, shape[number], at[number])
    return found


def _chunk(indices: range, parts: int, number: int) -> range:
    """Return one of the parts into which torch.chunk divides indices; it may be empty."""
    length = -(-len(indices) // parts)
    return indices[number * length : (number + 1) * length]

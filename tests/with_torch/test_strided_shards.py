"""Which rows a rank has of a weight that tensor parallelism and FSDP2 shard along the same dimension."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from elasticjob.training.sharded.strided_shards import strided_range

pytestmark = pytest.mark.torch


def rows(size: int, replicas: int, parallel: int) -> list[list[int]]:
    placements = (_StridedShard(0, split_factor=parallel), Shard(0))
    shape = (replicas, parallel)
    ranks = [(replica, rank) for rank in range(parallel) for replica in range(replicas)]
    return [list(strided_range(size, 0, placements, shape, at)) for at in ranks]


@pytest.mark.parametrize("size", range(1, 14))
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("parallel", [1, 2, 4])
def test_each_row_is_in_one_part(size: int, replicas: int, parallel: int) -> None:
    assert [row for part in rows(size, replicas, parallel) for row in part] == list(range(size))


def test_the_rows_of_a_tensor_parallel_rank_are_divided_among_the_replicas() -> None:
    assert rows(10, 2, 2) == [[0, 1, 2], [3, 4], [5, 6, 7], [8, 9]]
    placements = (Replicate(), _StridedShard(0, split_factor=2), Shard(0))
    assert list(strided_range(10, 0, placements, (2, 2, 2), (1, 1, 0))) == [3, 4], "replicated as well (HSDP)"


@pytest.mark.parametrize(
    "placements",
    [
        (Shard(0), _StridedShard(0, split_factor=2)),
        (_StridedShard(0, split_factor=3), Shard(0)),
        (_StridedShard(0, split_factor=2), _StridedShard(0, split_factor=2)),
    ],
)
def test_another_order_is_refused(placements: tuple[object, object]) -> None:
    with pytest.raises(ValueError, match="placements"):
        strided_range(8, 0, placements, (2, 2), (0, 0))

"""Which shards a new world takes up, from which rank, and which rank holds which copy: as tables. And their memory."""

from __future__ import annotations

import os

import pytest

from elasticjob._runtime.contract.snapshot_format.state_block import HEADER_SIZE, BlockHeader, read_header
from elasticjob._runtime.contract.snapshot_format.state_sources import NO_VERSION, Version
from elasticjob.training.sharded.shard_memory import ShardBuffers
from elasticjob.training.sharded.shard_sources import (
    NO_SHARD,
    ShardPlace,
    StoredShard,
    copy_holders,
    describe_lost,
    nearest,
    newest_complete,
    newest_sequence,
    parse_shards,
    replica_for,
    shard_places,
)

OLD, NEW, NEWEST = (1, 10), (2, 11), (3, 12)


def node(rank: int, own: list[Version], peer: list[Version], world: int = 3) -> list[StoredShard]:
    """Return the buffers of a rank: its own shard and that of its predecessor, at these versions."""
    buffers = [StoredShard(version, rank, world) for version in own]
    return buffers + [StoredShard(version, (rank - 1) % world, world) for version in peer]


BOTH = [OLD, NEW]
EMPTY = [NO_SHARD] * 4
ALL = [node(rank, BOTH, BOTH) for rank in range(3)]


@pytest.mark.parametrize(
    ("offers", "version"),
    [
        pytest.param([EMPTY, EMPTY], NO_VERSION, id="no state"),
        pytest.param(ALL, NEW, id="all processes restart"),
        pytest.param([EMPTY, ALL[1], ALL[2]], NEW, id="a node is lost, its shard is copied"),
        pytest.param([ALL[0], EMPTY, EMPTY], NO_VERSION, id="two neighbors of three are lost"),
        pytest.param(
            [node(0, BOTH, BOTH), node(1, BOTH, [OLD]), EMPTY], NEW, id="the lost shard is copied, another is not"
        ),
        pytest.param([EMPTY, node(1, BOTH, [OLD]), ALL[2]], OLD, id="the lost shard is not copied yet"),
        pytest.param([node(0, [OLD, NEW], [OLD]), node(1, [OLD], [OLD]), EMPTY], OLD, id="a commit is incomplete"),
        pytest.param(
            [node(0, [NEWEST], [], 2), node(1, [NEW], [NEW], 2)], NEW, id="a shard that others lack does not count"
        ),
        pytest.param(
            [[StoredShard((9, 5), 0, 2), *ALL[0]], ALL[1], ALL[2]], NEW, id="half of a smaller world is newer"
        ),
        pytest.param([[StoredShard((9, 5), 0, 1), *ALL[0]], ALL[1]], (9, 5), id="a rollback in a smaller world wins"),
    ],
)
def test_newest_complete(offers: list[list[StoredShard]], version: Version) -> None:
    assert newest_complete(offers) == version


def test_places_of_the_shards() -> None:
    places = shard_places([EMPTY, ALL[1], ALL[2]], NEW)
    assert places == [[ShardPlace(1, 3)], [ShardPlace(1, 1), ShardPlace(2, 3)], [ShardPlace(2, 1)]]
    assert nearest(places[1], 2) == ShardPlace(2, 3), "own memory first"
    spread = [ShardPlace(0, 0), ShardPlace(1, 0)]
    assert [nearest(spread, rank).rank for rank in (2, 3)] == [0, 1], "the others share the work"


def test_what_is_lost_is_named() -> None:
    assert describe_lost([EMPTY, EMPTY]) == ""
    assert describe_lost([EMPTY, ALL[0]]) == "shards 1 of 3 of step 11 are in no pod's memory"
    assert newest_sequence([EMPTY, ALL[0]]) == 2
    assert newest_sequence([EMPTY]) == 0


def test_offers_are_sent_as_numbers() -> None:
    assert parse_shards([n for stored in ALL[1] for n in stored.numbers()]) == ALL[1]


@pytest.mark.parametrize(
    ("nodes", "holders"),
    [
        pytest.param([0], [], id="one rank"),
        pytest.param([0, 0], [], id="one node holds no copies"),
        pytest.param([0, 1], [1, 0], id="two nodes"),
        pytest.param([0, 1, 2], [1, 2, 0], id="a ring"),
        pytest.param([0, 0, 1, 1, 2, 2], [2, 3, 4, 5, 0, 1], id="same local rank"),
        pytest.param([0, 1, 0, 1], [1, 0, 3, 2], id="ranks across nodes"),
    ],
)
def test_copy_holders(nodes: list[int], holders: list[int]) -> None:
    assert copy_holders(nodes) == holders


def test_nodes_of_different_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="the same number of workers"):
        copy_holders([0, 0, 1])


def test_what_is_not_sharded_comes_from_the_same_rank_at_the_same_world_size() -> None:
    assert [replica_for(rank, 3) for rank in range(4)] == [0, 1, 2, 0]


def test_the_version_that_all_ranks_have_is_not_overwritten() -> None:
    buffers = ShardBuffers([os.memfd_create("test") for _ in range(2)])
    fill(buffers, NO_VERSION, OLD)
    fill(buffers, OLD, NEW)
    kept = buffers.free_buffer(OLD)
    assert read_header(buffers.descriptors[kept]).version == NEW, "the copies of the newer one are not complete"
    assert read_header(buffers.descriptors[buffers.free_buffer(NEW)]).version == OLD
    assert read_header(buffers.descriptors[buffers.free_buffer((9, 9))]).version == OLD, "the older one"


def test_a_block_is_absent_while_it_is_written() -> None:
    buffers = ShardBuffers([os.memfd_create("test") for _ in range(2)])
    fill(buffers, NO_VERSION, OLD)
    buffer = buffers.free_buffer(NEW)
    for written in range(2):
        buffers.begin(written, 500)
    assert newest_complete([[StoredShard(read_header(d).version, 0, 1) for d in buffers.descriptors]]) == NO_VERSION
    buffers.finish(buffer, BlockHeader(*NEW, 10, 500))
    assert read_header(buffers.descriptors[buffer]).version == NEW


def fill(buffers: ShardBuffers, kept: Version, version: Version) -> None:
    """Write a block without content."""
    buffer = buffers.free_buffer(kept)
    buffers.begin(buffer, HEADER_SIZE + 10)
    buffers.finish(buffer, BlockHeader(*version, 10, HEADER_SIZE + 10))

"""Plan a restore: which rank loads which shard, which rank sends it, and which rank keeps its copy. Pure.

A shard is what one rank holds of a sharded state, numbered by this rank in the world that committed it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elasticjob._runtime.contract.snapshot_format.state_sources import NO_VERSION, Version


@dataclass(frozen=True)
class StoredShard:
    """One complete block in the memory of a rank."""

    version: Version
    shard: int
    shards: int
    """World size of the commit: the state consists of so many shards."""

    def numbers(self) -> list[int]:
        """Return the fields as integers."""
        return [*self.version, self.shard, self.shards]


NO_SHARD = StoredShard(NO_VERSION, -1, 0)
NUMBERS = 4
"""Integers of a StoredShard."""


def parse_shards(numbers: Sequence[int]) -> list[StoredShard]:
    """Return what is in the buffers of one rank; NO_SHARD for each empty buffer."""
    groups = (numbers[i : i + NUMBERS] for i in range(0, len(numbers), NUMBERS))
    return [StoredShard((sequence, step), shard, shards) for sequence, step, shard, shards in groups]


@dataclass(frozen=True)
class ShardPlace:
    """Where a shard is: a rank of the new world, and the buffer in its memory."""

    rank: int
    buffer: int


def newest_complete(buffers_of_ranks: Sequence[Sequence[StoredShard]]) -> Version:
    """Return the newest version of which every shard is on some rank; NO_VERSION if there is none."""
    found: dict[tuple[Version, int], set[int]] = {}
    for stored in _present(buffers_of_ranks):
        found.setdefault((stored.version, stored.shards), set()).add(stored.shard)
    complete = (version for (version, shards), held in found.items() if held >= set(range(shards)))
    return max(complete, default=NO_VERSION)


def shard_places(buffers_of_ranks: Sequence[Sequence[StoredShard]], version: Version) -> list[list[ShardPlace]]:
    """Return for each shard of a complete version where it is, in the order of the ranks."""
    shards = max(stored.shards for stored in _present(buffers_of_ranks) if stored.version == version)
    places: list[list[ShardPlace]] = [[] for _ in range(shards)]
    for rank, buffers in enumerate(buffers_of_ranks):
        for buffer, stored in enumerate(buffers):
            if stored.version == version:
                places[stored.shard].append(ShardPlace(rank, buffer))
    return places


def newest_sequence(buffers_of_ranks: Sequence[Sequence[StoredShard]]) -> int:
    """Return the highest sequence number of any shard; 0 if there is none."""
    return max((stored.version[0] for stored in _present(buffers_of_ranks)), default=0)


def describe_lost(buffers_of_ranks: Sequence[Sequence[StoredShard]]) -> str:
    """Return which shards of the newest version are on no rank; empty if no rank has any shard."""
    newest = max(_present(buffers_of_ranks), key=lambda stored: stored.version, default=NO_SHARD)
    held = {stored.shard for stored in _present(buffers_of_ranks) if stored.version == newest.version}
    lost = ", ".join(str(shard) for shard in range(newest.shards) if shard not in held)
    return f"shards {lost} of {newest.shards} of step {newest.version[1]} are in no pod's memory" if lost else ""


def nearest(places: Sequence[ShardPlace], rank: int) -> ShardPlace:
    """Return the place from which a rank reads: its own memory, else one that other ranks read less."""
    return next((place for place in places if place.rank == rank), places[rank % len(places)])


def replica_for(rank: int, shards: int) -> int:
    """Return the shard from which a rank takes what is not sharded, such as buffers and its random states.

    At the same world size it is the rank's own, so that values that differ between ranks stay what they were.
    """
    return rank % shards


def copy_holders(nodes: Sequence[int]) -> list[int]:
    """Return for each rank the rank that holds the copy of its shard: in the next pod, with the same local rank.

    `nodes`: the pod of each rank. With one pod there is no other, and the list is empty. ValueError: the pods have
    different numbers of ranks.
    """
    ranks: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    if len({len(members) for members in ranks.values()}) > 1:
        raise ValueError("ShardedState: all pods must run the same number of workers, so that each holds one copy")
    if len(ranks) < 2:
        return []
    following = dict(zip(ranks, [*list(ranks)[1:], *list(ranks)[:1]], strict=True))
    return [ranks[following[node]][ranks[node].index(rank)] for rank, node in enumerate(nodes)]


def _present(buffers_of_ranks: Sequence[Sequence[StoredShard]]) -> Iterable[StoredShard]:
    return (stored for buffers in buffers_of_ranks for stored in buffers if stored.version != NO_VERSION)

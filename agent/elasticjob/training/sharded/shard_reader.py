"""Restore a state in the layout of a new world.

The planner of torch.distributed.checkpoint lists the parts of the saved shards that a rank needs. The ranks that hold
these shards send the parts. No file is read or written.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from elasticjob._runtime.contract.snapshot_format import state_block
from elasticjob._runtime.contract.snapshot_format.state_block import ALIGNMENT
from elasticjob.training.sharded.shard_group import PIECE, ShardGroup, bytes_tensor, tensor_bytes
from elasticjob.training.sharded.shard_layout import PLAIN_TENSORS, ShardEntry, entry_tensor, sharded_parts
from elasticjob.training.sharded.shard_sources import ShardPlace, nearest, replica_for
from elasticjob.training.sharded.sharded_parts import TensorKind

_Part = tuple[int, int, list[int], list[int]]
"""What one rank asks of another: buffer, entry of the block in it, where the part begins in the entry, its sizes."""
_Chunks = dict[str, dict[tuple[int, ...], list[tuple[int, int]]]]
"""By name and by offsets in the whole tensor: the shards that have this part, with the number of its entry."""


class ShardReader:
    """Reads one version of the state from the memory of all ranks. All ranks create it and call its methods."""

    def __init__(self, group: ShardGroup, descriptors: Sequence[int], places: Sequence[Sequence[ShardPlace]]) -> None:
        """`descriptors`: this rank's buffers. `places`: where each shard of the version is (`shard_places`)."""
        self._group = group
        self._places = places
        buffers = {place.buffer for at in places for place in at if place.rank == group.rank}
        self._blocks = {buffer: state_block.read_block(descriptors[buffer]) for buffer in buffers}
        mine = {shard: self._blocks[at[0].buffer][1] for shard, at in enumerate(places) if at[0].rank == group.rank}
        found = {int(shard): content for part in group.gather_json(mine) for shard, content in part.items()}
        self.contents: list[Any] = [found[shard] for shard in range(len(places))]
        """JSON of each shard's block."""
        self._entries = [parse_entries(content) for content in self.contents]
        self._replica = replica_for(group.rank, len(places))

    @property
    def content(self) -> Any:
        """The JSON from which this rank takes what is not sharded."""
        return self.contents[self._replica]

    def described(self) -> dict[str, TensorKind]:
        """Return what is known of every tensor, by name."""
        return {e.name: TensorKind(getattr(torch, e.dtype), e.shape, e.sharded, e.on_cpu) for e in self._all_entries()}

    def check_plain_tensors(self, parts: Mapping[str, Any], statistics: Collection[str]) -> None:
        """ValueError on all ranks if tensors that are not sharded differ between ranks, and would move to another one.

        They belong to the rank with the same number in the same layout only. `parts`: where the sharded tensors of this
        rank begin and how large they are. `statistics`: names of those of which each rank may have any other's.
        """
        as_before = self._group.size == len(self._places) and parts == sharded_parts(self._entries[self._group.rank])
        if not self._group.greatest([0 if as_before else 1])[0]:
            return
        differing = self._differing() - set(statistics)
        if differing:
            name = min(differing)
            what = "a tensor among the values" if name == PLAIN_TENSORS else name
            raise ValueError(
                f"ShardedState: {what} is no DTensor and differs between ranks, and the state was committed by "
                f"{len(self._places)} ranks in another layout than that of these {self._group.size}: no other rank can "
                "take it up. Make it a DTensor, or make it the same on all ranks before commit, or keep the world size "
                "and the device mesh"
            )

    def _differing(self) -> set[str]:
        """Return the names of tensors that are not sharded and not the same in all shards."""
        mine = {
            shard: {
                entry.name: hashlib.sha256(
                    tensor_bytes(self._part(buffer, number, [0] * len(entry.sizes), entry.sizes))
                ).hexdigest()[:_DIGEST]
                for number, entry in enumerate(self._entries[shard])
                if not entry.sharded
            }
            for shard, at in enumerate(self._places)
            for buffer in (at[0].buffer,)
            if at[0].rank == self._group.rank
        }
        found = [digests for part in self._group.gather_json(mine) for digests in part.values()]
        names = {name for digests in found for name in digests}
        return {name for name in names if len({digests.get(name) for digests in found}) > 1}

    def load(self, tensors: Mapping[str, Any]) -> None:
        """Load the tensors, each with the part that this rank has to hold. KeyError or ValueError: they do not fit."""
        chunks = self._chunks()
        missing = [name for name, tensor in tensors.items() if name not in chunks and tensor.numel()]
        if missing:
            raise KeyError(f"ShardedState: {missing[0]} is not in the committed state: the model has changed")
        wanted = {name: tensor for name, tensor in tensors.items() if name in chunks}
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(wanted, self._metadata(chunks), is_coordinator=True)
        plan = planner.finish_plan(planner.create_global_plan([planner.create_local_plan()])[0])
        batches = _batches([item for item in plan.items if 0 not in item.lengths], wanted)
        for number in range(max(row[0] for row in self._group.gather_numbers([len(batches)]))):
            self._read(batches[number] if number < len(batches) else [], chunks, planner)

    def _all_entries(self) -> Iterator[ShardEntry]:
        return (entry for entries in self._entries for entry in entries)

    def _chunks(self) -> _Chunks:
        found: _Chunks = {}
        for shard, entries in enumerate(self._entries):
            for number, entry in enumerate(entries):
                if entry.sharded or shard == self._replica:
                    parts = found.setdefault(entry.name, {})
                    parts.setdefault(tuple(entry.offsets), []).append((shard, number))
        return found

    def _metadata(self, chunks: _Chunks) -> Metadata:
        found = {}
        for name, parts in chunks.items():
            entries = [self._entries[shard][number] for (shard, number), *_ in parts.values()]
            saved = [ChunkStorageMetadata(torch.Size(e.offsets), torch.Size(e.sizes)) for e in entries]
            properties = TensorProperties(dtype=getattr(torch, entries[0].dtype))
            found[name] = TensorStorageMetadata(properties, torch.Size(entries[0].shape), saved)
        return Metadata(found)

    def _read(self, items: Sequence[Any], chunks: _Chunks, planner: Any) -> None:
        """Ask for the parts, send what others ask for, and copy what arrives into the tensors."""
        asked: list[list[_Part]] = [[] for _ in range(self._group.size)]
        expected: list[list[Any]] = [[] for _ in range(self._group.size)]
        for item in items:
            index = item.storage_index
            saved = chunks[index.fqn][tuple(index.offset)]
            place, number = self._nearest(saved)
            asked[place.rank].append((place.buffer, number, list(item.storage_offsets), list(item.lengths)))
            expected[place.rank].append(item)
        wanted = self._group.exchange([bytes_tensor(json.dumps(parts).encode()) for parts in asked])
        sent = [torch.cat([*(self._part(*part) for part in json.loads(tensor_bytes(w))), _NOTHING]) for w in wanted]
        received = self._group.exchange(sent)
        for parts, data in zip(expected, received, strict=True):
            position = 0
            for item in parts:
                target = planner.resolve_tensor(item).detach()
                size = target.numel() * target.element_size()
                dtype = self._dtype(item, chunks)
                if dtype != target.dtype:
                    raise ValueError(f"ShardedState: {item.storage_index.fqn} was {dtype} and is {target.dtype} now")
                target.copy_(data[position : position + size].view(dtype).view(target.shape))
                planner.commit_tensor(item, target)
                position += _aligned(size)

    def _nearest(self, saved: Sequence[tuple[int, int]]) -> tuple[ShardPlace, int]:
        """Return the place from which this rank reads a part, and the number of the entry there."""
        numbers = {place: number for shard, number in saved for place in self._places[shard]}
        place = nearest(list(numbers), self._group.rank)
        return place, numbers[place]

    def _dtype(self, item: Any, chunks: _Chunks) -> Any:
        ((shard, number), *_) = chunks[item.storage_index.fqn][tuple(item.storage_index.offset)]
        return getattr(torch, self._entries[shard][number].dtype)

    def _part(self, buffer: int, number: int, offsets: list[int], sizes: list[int]) -> Any:
        """Return a part of a block in this rank's memory as bytes, filled up to the alignment."""
        header, content, view = self._blocks[buffer]
        entry = self._entries[content["shard"]][number]
        tensor = entry_tensor(entry, view, state_block.data_start(header.json_size))
        for dimension, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            tensor = tensor.narrow(dimension, offset, size)
        raw = tensor.contiguous().view(-1).view(torch.uint8)
        return torch.nn.functional.pad(raw, (0, _aligned(len(raw)) - len(raw)))


_DIGEST = 32
"""Digits of a hash."""
_NOTHING = torch.empty(0, dtype=torch.uint8)


def parse_entries(content: Any) -> list[ShardEntry]:
    """Return the entries in the JSON of a block."""
    return [ShardEntry(**entry) for entry in (*content["layout"]["entries"], *content["plain"])]


def _batches(items: Sequence[Any], tensors: Mapping[str, Any]) -> list[list[Any]]:
    """Return the reads in groups of about PIECE bytes, which limits the memory that an exchange needs."""
    batches: list[list[Any]] = []
    room = 0
    for item in items:
        size = math.prod(item.lengths) * tensors[item.dest_index.fqn].element_size()
        if not batches or size > room:
            batches.append([])
            room = PIECE
        batches[-1].append(item)
        room -= size
    return batches


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT

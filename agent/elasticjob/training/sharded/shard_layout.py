"""The layout of one rank's shard in memory: which part of which tensor is where.

torch.distributed.checkpoint's planner says which part of each tensor a rank holds. The layout is planned once and used
for all commits until a tensor comes, goes or moves.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import DTensor

from elasticjob._runtime.contract.snapshot_format.state_block import ALIGNMENT
from elasticjob.training.sharded.sharded_parts import StateNames
from elasticjob.training.sharded.strided_shards import is_strided, strided_range

PLAIN_TENSORS = "values"
"""Name of the entry with all tensors among plain values and in objects that are neither model nor optimizer."""


@dataclass(frozen=True)
class ShardEntry:
    """One rank's part of a tensor."""

    name: str
    dtype: str
    shape: list[int]
    """Of the whole tensor."""
    offsets: list[int]
    """Where the part begins in the whole tensor."""
    sizes: list[int]
    position: int
    """Offset in bytes from the start of the data."""
    sharded: bool
    on_cpu: bool


class ShardLayout:
    """The parts of all tensors that this rank holds."""

    def __init__(self, tensors: Mapping[str, Any], names: StateNames) -> None:
        """`names`: those of the optimizers' states among the tensors. TypeError: a tensor cannot be kept."""
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(tensors), is_coordinator=True)
        self._all = [local_part(tensor) for tensor in tensors.values()]
        self.sources: list[Any] = []
        """The tensors of this process, in the order of the entries."""
        self.entries: list[ShardEntry] = []
        self.size = 0
        """Bytes of data."""
        for item in planner.create_local_plan().items:
            self._add(item, tensors[item.index.fqn])
        described = {"entries": [asdict(entry) for entry in self.entries], "names": names}
        self.text = json.dumps(described, separators=(",", ":"))

    def fits(self, tensors: Mapping[str, Any]) -> bool:
        """Return whether these are still the tensors of the layout."""
        local = [local_part(tensor) for tensor in tensors.values()]
        return len(local) == len(self._all) and all(a is b for a, b in zip(local, self._all, strict=True))

    def sharded_parts(self) -> dict[str, tuple[list[int], list[int]]]:
        """Return offsets and sizes of each part of a sharded tensor."""
        return sharded_parts(self.entries)

    def targets(self, view: Any, start: int) -> list[Any]:
        """Return tensors that share the memory of a block, in the order of `sources`."""
        return [entry_tensor(entry, view, start) for entry in self.entries]

    def _add(self, item: Any, tensor: Any) -> None:
        data, local = item.tensor_data, local_part(tensor)
        if list(data.chunk.sizes) != list(local.shape) or not _is_where(data.chunk, tensor):
            raise TypeError(
                f"ShardedState: {item.index.fqn}: the layout of this DTensor cannot be kept: use even shards"
            )
        if not local.numel():
            return
        whole, chunk, on_cpu = list(data.size), data.chunk, local.device.type == "cpu"
        parts = (list(chunk.offsets), list(chunk.sizes), self.size, isinstance(tensor, DTensor), on_cpu)
        self.entries.append(ShardEntry(item.index.fqn, _name(local.dtype), whole, *parts))
        self.sources.append(local)
        self.size += -(-local.numel() * local.element_size() // ALIGNMENT) * ALIGNMENT


def _is_where(chunk: Any, tensor: Any) -> bool:
    """Return whether a chunk is the part of the tensor that FSDP2 over tensor parallelism has on this rank.

    The planner names the first index only, which would be wrong for a part with gaps.
    """
    if (
        not isinstance(tensor, DTensor)
        or not any(map(is_strided, tensor.placements))
        or not tensor._local_tensor.numel()
    ):
        return True
    mesh, at = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    for dimension in {placement.dim for placement in tensor.placements if is_strided(placement)}:
        try:
            held = strided_range(tensor.shape[dimension], dimension, tensor.placements, tuple(mesh.shape), at)
        except ValueError:
            return False
        if (held.start, len(held)) != (chunk.offsets[dimension], chunk.sizes[dimension]):
            return False
    return True


def local_part(tensor: Any) -> Any:
    """Return what this rank holds of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def sharded_parts(entries: Iterable[ShardEntry]) -> dict[str, tuple[list[int], list[int]]]:
    """Return offsets and sizes of each part of a sharded tensor among the entries."""
    return {entry.name: (entry.offsets, entry.sizes) for entry in entries if entry.sharded}


def entry_tensor(entry: ShardEntry, view: Any, start: int) -> Any:
    """Return an entry as a tensor that shares the memory of its block."""
    size = torch.Size(entry.sizes)
    offset = start + entry.position
    return torch.frombuffer(view, dtype=getattr(torch, entry.dtype), count=size.numel(), offset=offset).view(size)


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")

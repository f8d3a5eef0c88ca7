"""The layout of one rank's shard in memory: which part of which tensor is where.

torch.distributed.checkpoint's planner says which part of each tensor a rank holds. The layout is planned once and used
for all commits until a tensor comes, goes or moves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import DTensor

from elasticjob.training.blocks.state_block import ALIGNMENT
from elasticjob.training.sharded.sharded_parts import StateNames

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

    def targets(self, view: Any, start: int) -> list[Any]:
        """Return tensors that share the memory of a block, in the order of `sources`."""
        return [entry_tensor(entry, view, start) for entry in self.entries]

    def _add(self, item: Any, tensor: Any) -> None:
        data, local = item.tensor_data, local_part(tensor)
        if list(data.chunk.sizes) != list(local.shape):
            raise TypeError(f"ShardedState: {item.index.fqn}: the layout of this DTensor cannot be kept")
        if not local.numel():
            return
        whole, chunk, on_cpu = list(data.size), data.chunk, local.device.type == "cpu"
        parts = (list(chunk.offsets), list(chunk.sizes), self.size, isinstance(tensor, DTensor), on_cpu)
        self.entries.append(ShardEntry(item.index.fqn, _name(local.dtype), whole, *parts))
        self.sources.append(local)
        self.size += -(-local.numel() * local.element_size() // ALIGNMENT) * ALIGNMENT


def local_part(tensor: Any) -> Any:
    """Return what this rank holds of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def entry_tensor(entry: ShardEntry, view: Any, start: int) -> Any:
    """Return an entry as a tensor that shares the memory of its block."""
    size = torch.Size(entry.sizes)
    offset = start + entry.position
    return torch.frombuffer(view, dtype=getattr(torch, entry.dtype), count=size.numel(), offset=offset).view(size)


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")

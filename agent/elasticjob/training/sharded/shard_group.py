"""A gloo group of all ranks for shards only: what the ranks exchange at the start of a round, and copies for a peer.

The training's own group is never used for it: a copy is sent while the training's collectives run.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from elasticjob.training.state_exchange import is_distributed, rank

PIECE = 64 << 20
"""Bytes sent at a time."""


class ShardGroup:
    """The ranks of a round. All methods but `send`, `receive` are collective."""

    def __init__(self) -> None:
        """Create the group; without a process group, this rank is the only one. Call it on all ranks."""
        self.rank = rank()
        self.size = int(dist.get_world_size()) if is_distributed() else 1
        self.group: Any = dist.new_group(backend="gloo") if self.size > 1 else None

    @property
    def destroyed(self) -> bool:
        """Whether the group has been destroyed, and with it its connections."""
        return self.group is not None and self.group not in distributed_c10d._world.pg_map

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of all ranks, in their order. All ranks pass as many."""
        if self.group is None:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.int64)
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(gathered, mine, group=self.group)
        return [row.tolist() for row in gathered]

    def gather_json(self, content: Any) -> list[Any]:
        """Return the contents of all ranks, in their order."""
        if self.group is None:
            return [content]
        text = json.dumps(content).encode()
        lengths = [row[0] for row in self.gather_numbers([len(text)])]
        mine = torch.zeros(max(lengths), dtype=torch.uint8)
        mine[: len(text)] = bytes_tensor(text)
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(gathered, mine, group=self.group)
        return [json.loads(tensor_bytes(row[:n])) for row, n in zip(gathered, lengths, strict=True)]

    def exchange(self, sent: Sequence[Any]) -> list[Any]:
        """Send one tensor of bytes to each rank; return those received, in the order of the ranks."""
        if self.group is None:
            return list(sent)
        lengths = self.gather_numbers([len(tensor) for tensor in sent])
        received = [row[self.rank] for row in lengths]
        buffer = torch.empty(sum(received), dtype=torch.uint8)
        dist.all_to_all_single(buffer, torch.cat(list(sent)), received, [len(t) for t in sent], group=self.group)
        return list(buffer.split(received))

    def greatest(self, numbers: Sequence[int]) -> list[int]:
        """Return the maximum of each number over all ranks."""
        if self.group is None:
            return list(numbers)
        agreed = torch.tensor(numbers, dtype=torch.int64)
        self.group.allreduce([agreed], dist.ReduceOp.MAX).wait()
        return [int(number) for number in agreed]

    def send(self, view: Any, target: int) -> list[Any]:
        """Begin to send bytes to a rank; return what to wait for."""
        return [self.group.send([piece], target, 0) for piece in _pieces(view)]

    def receive(self, view: Any, source: int) -> list[Any]:
        """Begin to receive bytes from a rank into `view`; return what to wait for."""
        return [self.group.recv([piece], source, 0) for piece in _pieces(view)]


def bytes_tensor(content: bytes) -> Any:
    """Return bytes, at least one, as a tensor."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def tensor_bytes(tensor: Any) -> bytes:
    """Return the content of a contiguous tensor of bytes on the CPU. torch's own way needs NumPy."""
    return ctypes.string_at(tensor.data_ptr(), len(tensor))


def _pieces(view: Any) -> list[Any]:
    return list(torch.frombuffer(view, dtype=torch.uint8).split(PIECE))

"""The collectives of `State.sync`. Every rank of the default process group takes part in each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from elasticjob.training.blocks.state_block import HEADER_SIZE, BlockHeader
from elasticjob.training.group_device import broadcast_device

_PIECE = 64 << 20
"""Bytes broadcast at a time; with NCCL each broadcast needs as much GPU memory."""


def is_distributed() -> bool:
    """Return whether there is a process group."""
    return bool(dist.is_available() and dist.is_initialized())


def rank() -> int:
    """Return this rank; 0 without a process group."""
    return int(dist.get_rank()) if is_distributed() else 0


class Exchange:
    """The collectives with tensors on the device that the process group needs."""

    def __init__(self, part_devices: Sequence[Any]) -> None:
        """`part_devices`: devices of the State's own tensors."""
        self.receiver: int | None = None
        """The one rank that needs a block: over gloo it gets it alone. None: all ranks take part in its broadcast."""
        self._device = torch.device("cpu")
        if is_distributed() and "nccl" in str(dist.get_backend()):
            group = dist.distributed_c10d._get_default_group()
            self._device = broadcast_device(getattr(group, "bound_device_id", None), list(part_devices))

    @property
    def _to_one(self) -> bool:
        """Whether only the sender and `receiver` have a part in a block. nccl would form a communicator for the two."""
        return self.receiver is not None and self._device.type == "cpu"

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of all ranks, in their order. All ranks pass as many."""
        if not is_distributed():
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, mine)
        return [row.tolist() for row in gathered]

    def send_header(self, header: BlockHeader, sender: int) -> BlockHeader:
        """Broadcast the header that rank `sender` passes, and return it."""
        numbers = [header.sequence, header.step, header.json_size, header.size]
        sent = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        dist.broadcast(sent, sender)
        return BlockHeader(*sent.tolist())

    def send(self, view: Any, header: BlockHeader, sender: int) -> None:
        """Send a block without its header; on rank `sender`."""
        for piece in _pieces(view, header):
            if self._to_one:
                dist.send(piece, self.receiver)
            else:
                dist.broadcast(piece.to(self._device), sender)

    def receive(self, view: Any, header: BlockHeader, sender: int) -> None:
        """Receive a block without its header into `view`; on the other ranks."""
        for piece in _pieces(view, header):
            if self._to_one:
                dist.recv(piece, sender)
                continue
            staged = piece if self._device.type == "cpu" else torch.empty_like(piece, device=self._device)
            dist.broadcast(staged, sender)
            if staged is not piece:
                piece.copy_(staged)

    def is_left_out(self) -> bool:
        """Return whether this rank, which does not send, has no part in a block."""
        return self._to_one and self.receiver != rank()

    def discard(self, header: BlockHeader, sender: int) -> None:
        """Take part in the broadcast of a block that this rank has already."""
        left = header.size - HEADER_SIZE
        scratch = torch.empty(min(_PIECE, left), dtype=torch.uint8, device=self._device)
        while left > 0:
            dist.broadcast(scratch[:left], sender)
            left -= _PIECE


def _pieces(view: Any, header: BlockHeader) -> list[Any]:
    """Return a block without its header as tensors of bytes. The receiver writes the header last."""
    data = torch.frombuffer(view, dtype=torch.uint8)[HEADER_SIZE : header.size]
    return list(data.split(_PIECE))

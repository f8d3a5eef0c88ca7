"""The collectives of `State.sync`. Every rank of the default process group takes part in `gather`."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from elasticjob._runtime.contract.snapshot_format.state_block import HEADER_SIZE, BlockHeader, populate
from elasticjob.training.group_device import broadcast_device

PIECE = 16 << 20
"""Bytes sent at a time; with NCCL each broadcast needs as much GPU memory."""


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
        self._receiver: int | None = None
        """The rank to which this one sends a block; None if it broadcasts."""
        self._sender: int | None = None
        """The rank that sends a block to this one."""
        self._broadcasts = True
        """Whether one rank sends a block to all others."""
        self._device = torch.device("cpu")
        if is_distributed() and "nccl" in str(dist.get_backend()):
            group = dist.distributed_c10d._get_default_group()
            self._device = broadcast_device(getattr(group, "bound_device_id", None), list(part_devices))

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of all ranks, in their order. All ranks pass as many."""
        if not is_distributed():
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, mine)
        return [row.tolist() for row in gathered]

    def pair_up(self, sender: int, pairs: Iterable[tuple[int, int]]) -> None:
        """Let blocks go from the first to the second rank of each pair; without pairs, from `sender` to all ranks.

        With nccl `sender` always broadcasts: a communicator would be formed for each pair.
        """
        receivers = dict(pairs) if self._device.type == "cpu" else {}
        self._broadcasts = not receivers
        self._receiver = receivers.get(rank())
        senders = {receiver: source for source, receiver in receivers.items()}
        self._sender = senders.get(rank()) if receivers else (None if rank() == sender else sender)

    @property
    def device(self) -> torch.device:
        """The device whose tensors are sent and received without a copy."""
        return self._device

    @property
    def sends(self) -> bool:
        """Whether this rank sends a block."""
        return self._sender is None and (self._broadcasts or self._receiver is not None)

    @property
    def receives(self) -> bool:
        """Whether another rank sends this one a block."""
        return self._sender is not None

    def send(self, header: BlockHeader, pieces: Iterable[Any]) -> None:
        """Send a block; `pieces` are its bytes after the header. The next piece is prepared while one is on its way."""
        if not is_distributed():
            return
        numbers = [header.sequence, header.step, header.json_size, header.size]
        self._begin_send(torch.tensor(numbers, dtype=torch.int64)).wait()
        under_way = None
        for piece in pieces:
            begun = self._begin_send(piece)
            if under_way is not None:
                under_way.wait()
            under_way = begun
        if under_way is not None:
            under_way.wait()

    def receive_header(self) -> BlockHeader:
        """Receive the header of a block, whose rest `receive`, `receive_pieces` or `discard` then gets."""
        numbers = torch.zeros(4, dtype=torch.int64)
        self._begin_receive(numbers)()
        return BlockHeader(*numbers.tolist())

    def receive(self, view: mmap.mmap, header: BlockHeader) -> None:
        """Receive a block without its header into `view`."""
        data = torch.frombuffer(view, dtype=torch.uint8)
        populate(view, 0, PIECE)
        for begin in range(HEADER_SIZE, header.size, PIECE):
            end = min(begin + PIECE, header.size)
            finish = self._begin_receive(data[begin:end])
            populate(view, end, PIECE)
            finish()

    def receive_pieces(
        self, header: BlockHeader, place: Callable[[int, int, torch.device], Any]
    ) -> Iterator[tuple[int, Any]]:
        """Yield (offset in the block, bytes) of each piece. A piece is overwritten by the one after the next.

        `place(offset, size, device)` returns where to receive a piece instead; None: in a buffer.
        """
        begins = range(HEADER_SIZE, header.size, PIECE)
        buffers = [torch.empty(min(PIECE, header.size - HEADER_SIZE), dtype=torch.uint8) for _ in range(2)]

        def begin_piece(begin: int) -> tuple[Any, Callable[[], None]]:
            size = min(PIECE, header.size - begin)
            piece = place(begin, size, self._device)
            if piece is None:
                piece = buffers[0][:size]
                buffers.reverse()
            return piece, self._begin_receive(piece)

        under_way = begin_piece(HEADER_SIZE)
        for begin in begins:
            piece, finish = under_way
            finish()
            if begin + PIECE < header.size:
                under_way = begin_piece(begin + PIECE)
            yield begin, piece

    def discard(self, header: BlockHeader) -> None:
        """Take part in the transfer of a block that this rank has already."""
        scratch = torch.empty(min(PIECE, header.size - HEADER_SIZE), dtype=torch.uint8, device=self._device)
        for begin in range(HEADER_SIZE, header.size, PIECE):
            self._begin_receive(scratch[: header.size - begin])()

    def _begin_send(self, data: Any) -> Any:
        if self._broadcasts:
            return dist.broadcast(data.to(self._device), rank(), async_op=True)
        return dist.isend(data, self._receiver)

    def _begin_receive(self, data: Any) -> Callable[[], None]:
        """Begin to receive into `data`, and return what waits for its end."""
        staged = data if data.device == self._device else torch.empty_like(data, device=self._device)
        if self._broadcasts:
            under_way = dist.broadcast(staged, self._sender, async_op=True)
        else:
            under_way = dist.irecv(staged, self._sender)

        def finish() -> None:
            under_way.wait()
            if staged is not data:
                data.copy_(staged)

        return finish


def pieces_of(view: mmap.mmap, header: BlockHeader) -> Iterator[Any]:
    """Yield a block without its header as tensors of bytes."""
    yield from torch.frombuffer(view, dtype=torch.uint8)[HEADER_SIZE : header.size].split(PIECE)

"""The block of a State as a sequence of pieces, without a copy of the whole: of live objects, and into them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch

from elasticjob._runtime.contract.snapshot_format.state_block import HEADER_SIZE, BlockHeader, data_start
from elasticjob.training.snapshot_values.state_tree import PackedTree, place_tree
from elasticjob.training.snapshot_values.tensor_bytes import TensorBytes
from elasticjob.training.state_parts import state_of

Place: TypeAlias = Callable[[int, int, torch.device], Any]
"""Returns where a piece is received, by its offset in the block, its size, and the device that receives it; None:
anywhere."""
Receive: TypeAlias = Callable[[Place], Iterator[tuple[int, Any]]]
"""Receives the pieces of a block in order, as (offset, bytes)."""
_CPU = torch.device("cpu")


class LiveBlock:
    """A block as `State.commit` would write it."""

    def __init__(self, version: tuple[int, int], content: bytes, packed: PackedTree) -> None:
        """`content`: the JSON. `packed`: the tensors; they must not change meanwhile."""
        start = data_start(len(content))
        self.header = BlockHeader(*version, len(content), start + packed.size)
        self._text = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self._tensors = [(start + offset, tensor) for offset, tensor in packed.tensors]

    def pieces(self, size: int, device: torch.device = _CPU) -> Iterator[Any]:
        """Yield the bytes after the header in pieces of `size`. A piece is overwritten by the one after the next.

        A piece inside a tensor on this device is no copy of it.
        """
        end = self.header.size
        buffers = [torch.zeros(min(size, end - HEADER_SIZE), dtype=torch.uint8) for _ in range(2)]
        source = TensorBytes([(HEADER_SIZE, self._text), *self._tensors])
        for begin in range(HEADER_SIZE, end, size):
            piece = source.view(begin, min(size, end - begin), device)
            if piece is None:
                piece = buffers[0][: min(size, end - begin)]
                buffers.reverse()
                source.read(begin, piece)
            yield piece


def receive_into(
    objects: Mapping[str, Any], header: BlockHeader, receive: Receive, begin_write: Callable[[], None]
) -> tuple[Any, Mapping[str, Any]]:
    """Receive a block and return its JSON and its tree.

    Tensors of the modules among `objects` are received in place where type and shape agree, so their content is lost
    once `begin_write` has been called. A piece inside one of them is received there, without a copy.
    """
    direct, placed = TensorBytes(()), set[int]()

    def place(begin: int, size: int, device: torch.device) -> Any | None:
        view = direct.view(begin, size, device)
        if view is not None:
            placed.add(begin)
        return view

    pieces = receive(place)
    text = bytearray(header.json_size)
    json_bytes = TensorBytes([(HEADER_SIZE, torch.frombuffer(text, dtype=torch.uint8))])
    begin, piece = next(pieces)
    json_bytes.write(begin, piece)
    while begin + len(piece) < HEADER_SIZE + header.json_size:
        begin, piece = next(pieces)
        json_bytes.write(begin, piece)
    content = json.loads(text)
    modules = {n: state_of(part) for n, part in objects.items() if isinstance(part, torch.nn.Module)}
    tree, places = place_tree(content["tree"], {"objects": modules})
    start = data_start(header.json_size)
    tensors = [(start + offset, tensor) for offset, tensor in places]
    target = TensorBytes(tensors)
    begin_write()
    direct = TensorBytes(tensors)
    target.write(begin, piece)
    for begin, piece in pieces:
        if begin not in placed:
            target.write(begin, piece)
    return content, tree

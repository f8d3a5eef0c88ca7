"""Tensors as one sequence of bytes, which is read or written piece by piece. Imports torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch


class TensorBytes:
    """The bytes of tensors at ascending offsets. Pieces are passed in order; between two tensors there may be gaps."""

    def __init__(self, tensors: Iterable[tuple[int, Any]]) -> None:
        """`tensors`: (offset, tensor), on any device. Those that are written to are contiguous."""
        self._parts: Iterator[tuple[int, Any]] = ((offset, _bytes_of(t)) for offset, t in tensors if t.numel())
        self._part = next(self._parts, None)

    def read(self, begin: int, piece: Any) -> None:
        """Copy the bytes from offset `begin` on into a piece: a tensor of bytes."""
        for part, place in self._overlaps(begin, piece):
            place.copy_(part)

    def write(self, begin: int, piece: Any) -> None:
        """Copy a piece into the tensors from offset `begin` on."""
        for part, place in self._overlaps(begin, piece):
            part.copy_(place)

    def view(self, begin: int, size: int, device: torch.device) -> Any | None:
        """Return the bytes from offset `begin` on without a copy; None if they are not of one tensor on this device.

        What is written to them goes into the tensor.
        """
        self._skip_to(begin)
        if self._part is None:
            return None
        offset, content = self._part
        inside = offset <= begin and begin + size <= offset + len(content)
        return content[begin - offset : begin - offset + size] if inside and content.device == device else None

    def _skip_to(self, begin: int) -> None:
        while self._part is not None and self._part[0] + len(self._part[1]) <= begin:
            self._part = next(self._parts, None)

    def _overlaps(self, begin: int, piece: Any) -> Iterator[tuple[Any, Any]]:
        """Yield each part of a tensor that the piece covers, with its place in the piece."""
        self._skip_to(begin)
        end = begin + len(piece)
        while self._part is not None and self._part[0] < end:
            offset, content = self._part
            first, last = max(offset, begin), min(offset + len(content), end)
            yield content[first - offset : last - offset], piece[first - begin : last - begin]
            if offset + len(content) > end:
                return
            self._part = next(self._parts, None)


def _bytes_of(tensor: Any) -> Any:
    """Return the bytes of a tensor in the order of its elements, on its device."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)

"""Convert state dicts to JSON plus tensors, and back. Only plain values and tensors are allowed. Imports torch."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from typing import Any

import torch

from elasticjob.training.state_block import ALIGNMENT


class PackedTree:
    """A state dict as JSON, in which each tensor is replaced by its type, its shape and the offset of its bytes."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        """TypeError names the first item that is neither a plain value nor a tensor."""
        self.tensors: list[tuple[int, Any]] = []
        """(offset, tensor); the offset counts bytes from the start of the data."""
        self.size = 0
        """Size of the data in bytes."""
        self.json = self._pack(tree, "state")

    def _pack(self, value: Any, path: str) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, torch.Tensor):
            return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), self._place(value)]}
        if isinstance(value, Mapping):
            return {"dict": [[_key(k, path), self._pack(v, f"{path}[{k!r}]")] for k, v in value.items()]}
        if isinstance(value, (list, tuple)):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [self._pack(item, f"{path}[{i}]") for i, item in enumerate(value)]}
        raise TypeError(
            f"{path}: objects of type {type(value).__name__} cannot be part of a State; "
            "allowed: numbers, text, lists, dicts and tensors"
        )

    def _place(self, tensor: Any) -> int:
        """Reserve space for a tensor and return its offset."""
        offset = self.size
        self.size += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        self.tensors.append((offset, tensor))
        return offset

    def write(self, view: mmap.mmap, start: int) -> None:
        """Copy all tensors, from any device, into the data that begins at `start`."""
        for offset, tensor in self.tensors:
            if tensor.numel():
                _tensor_at(view, tensor.dtype, tensor.shape, start + offset).copy_(tensor.detach())


def unpack_tree(value: Any, view: mmap.mmap, start: int) -> Any:
    """Return the packed value; tensors are copies on the CPU.

    ValueError, TypeError or another error if the JSON does not describe the bytes.
    """
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        name, shape, offset = content
        dtype = getattr(torch, name)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"torch has no tensor type {name}")
        return (
            _tensor_at(view, dtype, shape, start + offset).clone()
            if 0 not in shape
            else torch.empty(shape, dtype=dtype)
        )
    if kind == "dict":
        return {k: unpack_tree(v, view, start) for k, v in content}
    items = [unpack_tree(item, view, start) for item in content]
    return items if kind == "list" else tuple(items)


def _key(key: Any, path: str) -> int | str:
    if type(key) not in (int, str):
        raise TypeError(f"{path}: {key!r} cannot be a key in a State; allowed: integers and text")
    found: int | str = key
    return found


def _tensor_at(view: mmap.mmap, dtype: Any, shape: Any, offset: int) -> Any:
    """Return a tensor that shares the memory of `view`, from a byte offset."""
    size = torch.Size(shape)
    return torch.frombuffer(view, dtype=dtype, count=size.numel(), offset=offset).view(size)

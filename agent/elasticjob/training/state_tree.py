"""State dicts as JSON plus tensors: nothing else can be in them, and nothing else comes out. Imports torch."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from typing import Any

import torch

from elasticjob.training.state_block import ALIGNMENT


class PackedTree:
    """A tree of plain values, with each tensor replaced by where its bytes go (counted from the data's begin)."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        """TypeError names what is neither a plain value nor a tensor."""
        self.tensors: list[tuple[int, Any]] = []
        self.size = 0
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
        raise TypeError(f"{path}: a {type(value).__name__} can be no part of a State: numbers, text and tensors can")

    def _place(self, tensor: Any) -> int:
        offset = self.size
        self.size += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        self.tensors.append((offset, tensor))
        return offset

    def write(self, view: mmap.mmap, start: int) -> None:
        """Copy all tensors, from whatever device, to `start` and on."""
        for offset, tensor in self.tensors:
            if tensor.numel():
                _at(view, tensor.dtype, tensor.shape, start + offset).copy_(tensor.detach())


def unpack_tree(value: Any, view: mmap.mmap, start: int) -> Any:
    """What was packed; tensors are copies on the CPU. ValueError or the like where bytes and JSON do not fit."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        name, shape, offset = content
        dtype = getattr(torch, name)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"no type of tensors: {name}")
        return _at(view, dtype, shape, start + offset).clone() if 0 not in shape else torch.empty(shape, dtype=dtype)
    if kind == "dict":
        return {k: unpack_tree(v, view, start) for k, v in content}
    items = [unpack_tree(item, view, start) for item in content]
    return items if kind == "list" else tuple(items)


def _key(key: Any, path: str) -> int | str:
    if type(key) not in (int, str):
        raise TypeError(f"{path}: {key!r} can be no key in a State: whole numbers and text can")
    found: int | str = key
    return found


def _at(view: mmap.mmap, dtype: Any, shape: Any, offset: int) -> Any:
    size = torch.Size(shape)
    return torch.frombuffer(view, dtype=dtype, count=size.numel(), offset=offset).view(size)

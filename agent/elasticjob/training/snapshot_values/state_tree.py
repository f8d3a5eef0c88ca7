"""Convert state dicts to JSON plus tensors, and back. Only plain values and tensors are allowed. Imports torch."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from elasticjob._runtime.contract.snapshot_format.state_block import ALIGNMENT
from elasticjob.training.pinned_memory import wait_for_copies
from elasticjob.training.snapshot_values.state_values import container_refusal, key_refusal, refusal


class PackedTree:
    """Objects and values as JSON. Each tensor is replaced by its type, its shape and the offset of its bytes."""

    def __init__(self, objects: Mapping[str, Any], values: Mapping[str, Any], owner: str = "State") -> None:
        """`objects`: state dicts by name. TypeError names the first item that cannot be kept, and what to write.

        `owner`: the class to which they belong.
        """
        self._owner = owner
        self.tensors: list[tuple[int, Any]] = []
        """(offset, tensor); the offset counts bytes from the start of the data."""
        self.size = 0
        """Size of the data in bytes."""
        packed_objects = [[name, self._pack(state, f"{name}.state_dict()")] for name, state in objects.items()]
        packed_values = [[name, self._pack(value, name)] for name, value in values.items()]
        self.json = {"dict": [["objects", {"dict": packed_objects}], ["values", {"dict": packed_values}]]}

    def _pack(self, value: Any, path: str) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if problem := container_refusal(value):
            raise TypeError(f"{self._owner}: {path}: {problem}")
        if isinstance(value, Mapping):
            return {"dict": [[self._key(k, path), self._pack(v, f"{path}[{k!r}]")] for k, v in value.items()]}
        if isinstance(value, (list, tuple)):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [self._pack(item, f"{path}[{i}]") for i, item in enumerate(value)]}
        if problem := refusal(value):
            raise TypeError(f"{self._owner}: {path}: {problem}")
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), self._place(value)]}

    def _key(self, key: Any, path: str) -> int | str:
        if problem := key_refusal(key):
            raise TypeError(f"{self._owner}: {path}: {problem}")
        found: int | str = key
        return found

    def _place(self, tensor: Any) -> int:
        """Reserve space for a tensor and return its offset."""
        offset = self.size
        self.size += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        self.tensors.append((offset, tensor))
        return offset

    def write(self, view: mmap.mmap, start: int) -> None:
        """Copy all tensors, from any device, into the data that begins at `start`."""
        write_tensors(self.tensors, view, start)


def write_tensors(tensors: Iterable[tuple[int, Any]], view: mmap.mmap, start: int) -> None:
    """Copy tensors, from any device, to their offsets in the data that begins at `start`.

    It returns once the devices have done so, also if it is interrupted: what follows makes the block complete.
    """
    devices = set()
    try:
        for offset, tensor in tensors:
            if tensor.numel():
                devices.add(tensor.device)
                place = _tensor_at(view, tensor.dtype, tensor.shape, start + offset)
                place.copy_(tensor.detach(), non_blocking=can_be_queued(tensor))
    finally:
        wait_for_copies(devices)


def can_be_queued(tensor: Any) -> bool:
    """Return whether a GPU may copy the tensor while the host goes on: the host itself would conjugate or negate it."""
    return tensor.device.type == "cuda" and not tensor.is_conj() and not tensor.is_neg()


def unpack_tree(value: Any, view: mmap.mmap | bytearray | None, start: int) -> Any:
    """Return the packed value; tensors are copies on the CPU. `view`: None if there are none with content.

    ValueError, TypeError or another error if the JSON does not describe the bytes.
    """

    def copy_tensor(dtype: Any, shape: Any, offset: int, _own: Any) -> Any:
        return torch.empty(shape, dtype=dtype) if 0 in shape else _tensor_at(view, dtype, shape, start + offset).clone()

    return _unpack(value, None, copy_tensor)


def place_tree(value: Any, own: Any) -> tuple[Any, list[tuple[int, Any]]]:
    """Return the packed value with tensors that wait for their content, and these tensors by the offset of it.

    `own`: a value of the same form, of which contiguous tensors of the right type and shape are used.
    """
    places: list[tuple[int, Any]] = []

    def place_tensor(dtype: Any, shape: Any, offset: int, own: Any) -> Any:
        fits = isinstance(own, torch.Tensor) and own.dtype == dtype and list(own.shape) == shape
        tensor = own if fits and own.is_contiguous() and not own.is_inference() else torch.empty(shape, dtype=dtype)
        places.append((offset, tensor))
        return tensor

    return _unpack(value, own, place_tensor), sorted(places, key=lambda place: place[0])


def _unpack(value: Any, own: Any, tensor: Callable[[Any, Any, int, Any], Any]) -> Any:
    """Return the packed value with what `tensor` returns for each type, shape and offset, and the same part of `own`.

    Only dicts of `own` are followed.
    """
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        name, shape, offset = content
        dtype = getattr(torch, name)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"torch has no tensor type {name}")
        return tensor(dtype, shape, offset, own)
    if kind == "dict":
        known = own if isinstance(own, Mapping) else {}
        return {k: _unpack(v, known.get(k), tensor) for k, v in content}
    items = [_unpack(item, None, tensor) for item in content]
    return items if kind == "list" else tuple(items)


def _tensor_at(view: mmap.mmap | bytearray | None, dtype: Any, shape: Any, offset: int) -> Any:
    """Return a tensor that shares the memory of `view`, from a byte offset."""
    size = torch.Size(shape)
    return torch.frombuffer(view, dtype=dtype, count=size.numel(), offset=offset).view(size)

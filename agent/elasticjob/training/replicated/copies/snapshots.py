"""Copies of what a training step may change before it is complete: plain values, and the buffers of modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

import torch


class Snapshot:
    """A copy of plain values. Tensors are not copied: their version shows whether they have been changed in place."""

    def __init__(self, value: Any) -> None:
        self._tensors: list[tuple[Any, int]] = []
        self._value = self._copy(value)

    @property
    def intact(self) -> bool:
        """Whether `value` still returns what the snapshot was taken of."""
        return all(tensor._version == version for tensor, version in self._tensors)

    def value(self) -> Any:
        """Return the values. The containers are new, so that later changes do not reach the snapshot."""
        return _copied(self._value)

    def _copy(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.is_inference():  # has no version
                return value.clone()
            self._tensors.append((value, value._version))
            return value
        return _copied(value, self._copy)


class BufferCopies:
    """Copies of the saved buffers and the extra state of modules, which a forward pass changes before its step ends.

    The versions of these tensors do not show it: the kernels of BatchNorm do not count.
    """

    def __init__(self, modules: Iterable[Any]) -> None:
        self._modules = tuple(modules)
        self._places: list[tuple[Any, str]] = []
        self._copies: list[Any] = []
        self._with_extra_state: list[Any] = []
        self._extra_states: list[Any] = []

    def refresh(self) -> None:
        """Find the buffers again and copy them: modules, shapes or devices may have changed."""
        children = {id(child): child for module in self._modules for child in module.modules()}
        self._places = [
            (child, name)
            for child in children.values()
            for name, buffer in child._buffers.items()
            if buffer is not None and name not in child._non_persistent_buffers_set
        ]
        self._copies = [buffer.detach().clone() for buffer in self._buffers()]
        self._with_extra_state = [child for child in children.values() if _has_extra_state(child)]
        self._copy_extra_states()

    def capture(self) -> None:
        """Copy what `refresh` found."""
        pairs = self._pairs()
        if any(kept.shape != buffer.shape for kept, buffer in pairs):  # a forward pass has replaced a buffer
            self.refresh()
            return
        for copies, buffers in _groups(pairs):
            torch._foreach_copy_(copies, buffers)
        self._copy_extra_states()

    def restore(self) -> None:
        """Set everything to the last copy."""
        for (child, name), (kept, buffer) in zip(self._places, self._pairs(), strict=True):
            if kept.shape != buffer.shape:
                child._buffers[name] = kept.clone()
        for copies, buffers in _groups(self._pairs()):
            torch._foreach_copy_(buffers, copies)
        for child, kept in zip(self._with_extra_state, self._extra_states, strict=True):
            child.set_extra_state(deepcopy(kept))

    def _copy_extra_states(self) -> None:
        self._extra_states = [deepcopy(child.get_extra_state()) for child in self._with_extra_state]

    def _buffers(self) -> list[Any]:
        return [child._buffers[name] for child, name in self._places]

    def _pairs(self) -> list[tuple[Any, Any]]:
        """Return each copy with its buffer."""
        return list(zip(self._copies, self._buffers(), strict=True))


def _groups(pairs: list[tuple[Any, Any]]) -> list[tuple[list[Any], list[Any]]]:
    """Return copies and buffers by type and device: each group takes few kernels, whatever its length."""
    groups: dict[Any, tuple[list[Any], list[Any]]] = {}
    for kept, buffer in pairs:
        copies, buffers = groups.setdefault((buffer.dtype, buffer.device), ([], []))
        copies.append(kept)
        buffers.append(buffer.detach())
    return list(groups.values())


def _has_extra_state(module: Any) -> bool:
    return type(module).get_extra_state is not torch.nn.Module.get_extra_state


def _copied(value: Any, copy_item: Any = None) -> Any:
    """Return a new container of the same kind with copies of the items; other values as they are."""
    copy_item = copy_item or _copied
    if isinstance(value, Mapping):
        return {key: copy_item(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [copy_item(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value

"""A copy of a gradient scaler that needs no transfer from the device, unlike its `state_dict`."""

from __future__ import annotations

from typing import Any

import torch

_TENSORS = ("_scale", "_growth_tracker")


def is_scaler(part: Any) -> bool:
    """Return whether the part is a torch.amp.GradScaler."""
    return isinstance(part, torch.amp.GradScaler)


class ScalerCopy:
    """The scale of a GradScaler and the steps since it last changed.

    An interrupted step may have changed them without an optimizer step: the scale shrinks when gradients overflow. A
    scaler that is not enabled (`GradScaler(enabled=False)`, or one without a GPU) has neither.
    """

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler
        self._copies: dict[str, Any] = {}

    def capture(self) -> None:
        """Copy the tensors on their device."""
        if self._scaler.is_enabled():
            self._copies = {name: _cloned(getattr(self._scaler, name)) for name in _TENSORS}

    def restore(self) -> None:
        """Set the scaler to the last copy, at the beginning of a step: no gradient has been unscaled."""
        if self._copies:
            for name, kept in self._copies.items():
                setattr(self._scaler, name, _cloned(kept))
            self._scaler._per_optimizer_states.clear()


def _cloned(tensor: Any) -> Any:
    return None if tensor is None else tensor.detach().clone()

"""The parameters that a State leaves to the script, because training does not change them.

A block has a digest of some elements of each of them. A process that loads the block compares these with its own: what
has been changed without a gradient, such as a moving average, or was initialized at random, must not go unnoticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

import torch

from elasticjob.training.state_parts import restore_part, state_of

SAMPLES = 64
"""Elements of each parameter that its digest covers."""
Digests = Mapping[str, Mapping[str, str]]
"""Digests of the parameters that are left out, by part and name."""


class FrozenParameters:
    """Packs and restores the parts of a State, without the parameters that have never needed a gradient."""

    def __init__(self, objects: Mapping[str, Any], *, save_frozen: bool) -> None:
        """`objects`: the parts by name, as the script has made them. `save_frozen`: leave nothing out."""
        self._modules = {
            n: part for n, part in objects.items() if not save_frozen and isinstance(part, torch.nn.Module)
        }
        self._frozen = {name: _frozen(module) for name, module in self._modules.items()}
        self._parameters = [
            (name, key, parameter)
            for name, module in self._modules.items()
            for key, parameter in module.named_parameters(remove_duplicate=False)
            if key in self._frozen[name]
        ]
        self._last: Digests = {}

    def drop_trainable(self) -> None:
        """Parameters that have become trainable are saved from now on."""
        for name, key, parameter in self._parameters:
            if parameter.requires_grad:
                self._frozen[name].discard(key)

    def state_of(self, name: str, part: Any) -> Any:
        """Return the state of a part that has to be saved."""
        state = state_of(part)
        if name not in self._frozen:
            return state
        self._frozen[name] &= _frozen(part)
        return {key: value for key, value in state.items() if not _belongs_to(key, self._frozen[name])}

    def digests(self) -> Digests:
        """Return those of what `state_of` leaves out. RuntimeError: one has changed since the last call."""
        found = {name: _digests(module, self._frozen[name]) for name, module in self._modules.items()}
        for name, of_part in found.items():
            before = self._last.get(name, {})
            if changed := [key for key, digest in of_part.items() if before.get(key, digest) != digest]:
                raise RuntimeError(
                    f"State({name}=...): {changed[0]} needs no gradient and has changed nevertheless, "
                    "as a moving average does: write State(frozen_parameters=True)"
                )
        self._last = found
        return found

    def restore(self, name: str, part: Any, state: Any, digests: Digests) -> None:
        """Load what `state_of` returned, perhaps on another rank, with its `digests`.

        RuntimeError: this process does not have the parameters that are left out.
        """
        left_out = digests.get(name)
        if left_out is not None and name in self._frozen:
            self._frozen[name] &= left_out.keys()
        if not left_out:
            restore_part(part, state)
            return
        own = _digests(part, left_out)
        if different := [key for key, digest in left_out.items() if own.get(key) != digest]:
            raise RuntimeError(
                f"State({name}=...): this process has another {different[0]} than the saved state, "
                "which leaves it out: load the same frozen parameters in every process, before State(...), "
                "or write State(frozen_parameters=True)"
            )
        found = part.load_state_dict(state, strict=False)
        missing = [key for key in getattr(found, "missing_keys", ()) if not _belongs_to(key, left_out)]
        if problems := [*missing, *getattr(found, "unexpected_keys", ())]:
            raise RuntimeError(f"State({name}=...): the saved state is of another model: {problems[0]} does not fit")


def _frozen(module: Any) -> set[str]:
    parameters = module.named_parameters(remove_duplicate=False)
    return {name for name, parameter in parameters if not parameter.requires_grad}


def _belongs_to(key: str, parameters: Collection[str]) -> bool:
    """Return whether a key of a state dict is one of the parameters, or is saved with it, as by quantized layers."""
    while key and key not in parameters:
        key = key.rpartition(".")[0]
    return bool(key)


def _digests(module: Any, keys: Collection[str]) -> dict[str, str]:
    parameters = module.named_parameters(remove_duplicate=False)
    return {key: _digest(parameter) for key, parameter in parameters if key in keys}


def _digest(tensor: Any) -> str:
    flat = tensor.detach().reshape(-1)
    sample = flat[:: max(1, len(flat) // SAMPLES)][:SAMPLES].contiguous().cpu()
    content = f"{tensor.dtype} {tuple(tensor.shape)}".encode() + bytes(sample.view(torch.uint8).tolist())
    return hashlib.blake2b(content, digest_size=8).hexdigest()

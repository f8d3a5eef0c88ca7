"""The tensors of models and optimizers by name, each with the part that this rank holds.

FSDP2 keeps a parameter as a DTensor between steps; an optimizer's state has the placement of its parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from elasticjob.training.sharded_models import is_sharded_optimizer, is_sharded_tensor
from elasticjob.training.snapshot_values.state_values import refusal

StateNames = dict[str, dict[str, list[str]]]
"""Names of the tensors in an optimizer's state: optimizer, parameter, names."""


@dataclass(frozen=True)
class TensorKind:
    """What is known of a committed tensor."""

    dtype: Any
    shape: list[int]
    """Of the whole tensor."""
    sharded: bool
    on_cpu: bool


class ShardedParts:
    """The modules and optimizers of a ShardedState."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        """TypeError: an object cannot be kept. It names the object and what to write instead."""
        self.modules = {name: part for name, part in objects.items() if isinstance(part, torch.nn.Module)}
        self.optimizers = {name: part for name, part in objects.items() if isinstance(part, torch.optim.Optimizer)}
        self._places: list[tuple[str, dict[str, Any], str]] = []
        self._fsdp: list[Any] = []
        self._names: dict[int, str] = {}
        self._find_places()
        for name, module in self.modules.items():
            _check_module(name, module)
        for name, optimizer in self.optimizers.items():
            self._check_optimizer(name, optimizer)

    def tensors(self) -> dict[str, Any]:
        """Return all tensors by name: parameters, saved buffers, and the tensors in the optimizers' states."""
        for module in self._fsdp:
            module.reshard()  # between steps some modules may keep their gathered parameters
        found = {name: holder[key] for name, holder, key in self._places}
        for optimizer_name, optimizer in self.optimizers.items():
            for parameter_name, parameter in self._parameters(optimizer):
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor):
                        found[f"{optimizer_name}.{parameter_name}.{key}"] = value
                        if isinstance(value, DTensor) and value.shape != parameter.shape:
                            where = f"{optimizer_name}: {key} of {parameter_name}"
                            raise TypeError(f"ShardedState: {where}: its shape differs from the parameter's")
        return found

    def settings(self) -> dict[str, Any]:
        """Return for each optimizer the settings of its groups, and what its state holds besides tensors."""
        return {name: self._settings(optimizer) for name, optimizer in self.optimizers.items()}

    def state_names(self) -> StateNames:
        """Return the names of the tensors in the optimizers' states."""
        return {
            name: {
                parameter_name: [k for k, v in state.items() if isinstance(v, torch.Tensor)]
                for parameter_name, parameter in self._parameters(optimizer)
                if (state := optimizer.state.get(parameter))
            }
            for name, optimizer in self.optimizers.items()
        }

    def prepare(self, names: StateNames, described: Mapping[str, TensorKind]) -> dict[str, Any]:
        """Return the tensors into which a state with those names can be loaded: the parts' own, once it is loaded.

        `described`: by name. The optimizers' states are new tensors.
        """
        found = {name: holder[key].detach() for name, holder, key in self._places}
        for optimizer_name, states in names.items():
            parameters = dict(self._parameters(self.optimizers[optimizer_name]))
            for parameter_name, keys in states.items():
                for key in keys:
                    name = f"{optimizer_name}.{parameter_name}.{key}"
                    found[name] = _empty_state(parameters[parameter_name], described[name])
        return found

    def statistics(self) -> set[str]:
        """Return the names of the buffers of normalization layers: those of any rank do for another one."""
        return {
            f"{name}.{path}.{key}" if path else f"{name}.{key}"
            for name, module in self.modules.items()
            for path, child in module.named_modules()
            if isinstance(child, torch.nn.modules.batchnorm._NormBase)
            for key in child._buffers
        }

    def restore(self, names: StateNames, tensors: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Set the optimizers to the loaded tensors and settings."""
        for optimizer_name, optimizer in self.optimizers.items():
            kept = settings[optimizer_name]
            for group, values in zip(optimizer.param_groups, kept["groups"], strict=True):
                group.update(values)
            optimizer.state.clear()
            for parameter_name, parameter in self._parameters(optimizer):
                state = dict(kept["plain"].get(parameter_name, {}))
                for key in names.get(optimizer_name, {}).get(parameter_name, []):
                    state[key] = tensors[f"{optimizer_name}.{parameter_name}.{key}"]
                if state:
                    optimizer.state[parameter] = state

    def _find_places(self) -> None:
        """Find parameters and saved buffers again: modules may have changed."""
        children = [
            (f"{name}.{path}" if path else name, child)
            for name, module in self.modules.items()
            for path, child in module.named_modules()
        ]
        self._fsdp = [child for _, child in children if hasattr(child, "reshard") and hasattr(child, "unshard")]
        self._places = [
            (f"{prefix}.{key}", holder, key)
            for prefix, child in children
            for holder, skipped in ((child._parameters, ()), (child._buffers, child._non_persistent_buffers_set))
            for key, value in holder.items()
            if value is not None and key not in skipped
        ]
        self._names = {id(holder[key]): name for name, holder, key in self._places}

    def _parameters(self, optimizer: Any) -> Iterator[tuple[str, Any]]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield self._names[id(parameter)], parameter

    def _settings(self, optimizer: Any) -> dict[str, Any]:
        plain = {
            name: values
            for name, parameter in self._parameters(optimizer)
            if (
                values := {
                    k: v for k, v in optimizer.state.get(parameter, {}).items() if not isinstance(v, torch.Tensor)
                }
            )
        }
        groups = [{key: item for key, item in group.items() if key != "params"} for group in optimizer.param_groups]
        return {"groups": groups, "plain": plain}

    def _check_optimizer(self, name: str, optimizer: Any) -> None:
        if is_sharded_optimizer(optimizer):
            raise TypeError(f"ShardedState({name}=...): {type(optimizer).__name__} cannot be kept: use FSDP2")
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if id(parameter) not in self._names:
                    raise TypeError(
                        f"ShardedState({name}=...): parameter {index} of group {number} is in no model of this "
                        "ShardedState: pass the model, and create the optimizer after fully_shard"
                    )


def _check_module(name: str, module: Any) -> None:
    """Raise TypeError if a module has something that cannot be kept."""
    for path, child in module.named_modules():
        where = f"ShardedState({name}=...): {path or type(child).__name__}"
        if type(child).__name__ == "FullyShardedDataParallel":
            raise TypeError(f"{where}: FullyShardedDataParallel (FSDP1) cannot be kept: use fully_shard (FSDP2)")
        if type(child).get_extra_state is not torch.nn.Module.get_extra_state:
            raise TypeError(f"{where}: a module with get_extra_state cannot be kept: register its state as buffers")
    for path, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if problem := _tensor_problem(tensor):
            raise TypeError(f"ShardedState({name}=...): {path}: {problem}")


def _tensor_problem(tensor: Any) -> str:
    if tensor.is_meta:
        return "tensors on the meta device have no content: create the ShardedState once they are materialized"
    if not isinstance(tensor, DTensor):
        return f"{type(tensor).__name__} cannot be kept: use DTensor" if is_sharded_tensor(tensor) else refusal(tensor)
    if any(placement.is_partial() for placement in tensor.placements):
        return "a DTensor with a Partial placement has no content of its own: redistribute it"
    return ""


def _empty_state(parameter: Any, kind: TensorKind) -> Any:
    """Return a new tensor for an optimizer's state of a parameter; a sharded one has the parameter's placement."""
    if kind.sharded and isinstance(parameter, DTensor):
        return torch.empty_like(parameter.detach(), dtype=kind.dtype)
    return torch.empty(kind.shape, dtype=kind.dtype, device="cpu" if kind.on_cpu else parameter.device)

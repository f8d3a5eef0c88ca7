"""The parts of a State: objects with `state_dict`, and samplers with `set_epoch`. All other parts are plain values."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from elasticjob.training.sharded_models import (
    is_sharded_optimizer,
    is_sharded_tensor,
    keeps_position_of_rank,
    sharded_parameter,
)
from elasticjob.training.snapshot_values.state_values import ALLOWED, SHARDED, value_refusal


def split_parts(
    parts: Mapping[str, Any],
    taken: Collection[str],
    owner: str = "State",
    problem_of: Callable[[Any], str] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return objects and plain values by name; DDP models are replaced by their module.

    `taken`: names of the State's attributes. `owner`: its class. `problem_of`: why an object cannot be kept, empty if
    it can. ValueError: a part has a taken name. TypeError: a part cannot be kept. Both name the part and what to write
    instead.
    """
    problem_of = problem_of or _refusal
    objects = {name: unwrap(part) for name, part in parts.items() if _is_object(part)}
    for name in parts:
        if name.startswith("_"):
            raise ValueError(f"{owner}({name}=...): use a name that does not begin with an underscore")
        if name in taken:
            taken_by = f"{owner} has an attribute {name!r}"
            raise ValueError(f"{owner}({name}=...): {taken_by}: use another name, such as my_{name}")
    for name, part in objects.items():
        if problem := problem_of(part):
            raise TypeError(f"{owner}({name}=...): {problem}")
    return objects, {name: part for name, part in parts.items() if name not in objects}


def unwrap(part: Any) -> Any:
    """Return the module inside a DDP wrapper: its names lack the prefix `module.`, so any model can load them."""
    return part.module if isinstance(part, torch.nn.parallel.DistributedDataParallel) else part


def state_of(part: Any) -> Any:
    """Return the state of an object: its `state_dict`, or its epoch."""
    return part.state_dict() if hasattr(part, "state_dict") else {"epoch": part.epoch}


def restore_part(part: Any, state: Any) -> None:
    """Load what `state_of` returned."""
    if isinstance(part, (torch.nn.Module, torch.optim.Optimizer)):
        part.load_state_dict(state)
    elif hasattr(part, "load_state_dict"):
        part.load_state_dict(_in_kind_of(part.state_dict(), state))
    else:
        part.set_epoch(state["epoch"])


def _in_kind_of(own: Any, state: Any) -> Any:
    """Return `state` with dicts of the kinds that the object has: MultiStepLR calls methods of a Counter."""
    if type(own) in (Counter, OrderedDict) and isinstance(state, dict):
        return type(own)(state)
    if isinstance(own, dict) and isinstance(state, dict):
        return {key: _in_kind_of(own.get(key), value) for key, value in state.items()}
    return state


def check_values(values: Mapping[str, Any], owner: str = "State") -> None:
    """TypeError names the first plain value that would come back as something else, and what to write."""
    for name, value in values.items():
        if problem := value_refusal(value):
            raise TypeError(f"{owner}: {name}: {problem}")


def on_device_of(value: Any, known: Any) -> Any:
    """Return a plain value with its tensors on the devices of those at the same place in `known`."""
    if isinstance(value, torch.Tensor) and isinstance(known, torch.Tensor):
        return value.to(known.device)
    if isinstance(value, dict) and isinstance(known, dict):
        return {key: on_device_of(item, known.get(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and isinstance(known, (list, tuple)) and len(value) == len(known):
        return type(value)(map(on_device_of, value, known))
    return value


def _is_object(part: Any) -> bool:
    both = hasattr(part, "state_dict") and hasattr(part, "load_state_dict")
    return not isinstance(part, type) and (both or hasattr(part, "set_epoch"))


def _refusal(part: Any) -> str:
    """Return why an object cannot be kept, and what to use instead; empty if it can."""
    if isinstance(part, torch.nn.Module) and (parameter := sharded_parameter(part)):
        return f"parameter {parameter}: {SHARDED}"
    if is_sharded_optimizer(part) or any(map(is_sharded_tensor, _optimized(part))):
        return f"{type(part).__name__}: {SHARDED}"
    return object_refusal(part)


def _optimized(part: Any) -> list[Any]:
    """Return the parameters of an optimizer."""
    groups = part.param_groups if isinstance(part, torch.optim.Optimizer) else ()
    return [parameter for group in groups for parameter in group["params"]]


def object_refusal(part: Any) -> str:
    """Return why an object that is the same on all ranks cannot be kept; empty if it can."""
    if isinstance(part, torch.optim.Optimizer) and not hasattr(part, "_optimizer_step_pre_hooks"):
        wrapped = type(part).__name__
        return f"{wrapped} does not say when it begins a step: pass the optimizer that it wraps"
    if isinstance(part, torch.nn.Module) and any(map(torch.nn.parameter.is_lazy, part.parameters())):
        return "it has parameters without a shape: call it once with an example before"
    if keeps_position_of_rank(part):
        return (
            f"{type(part).__name__} saves the position of one rank, and a State holds the same state for all ranks: "
            "count the samples of all ranks in a plain value, such as State(samples=0), and skip them after sync"
        )
    if not hasattr(part, "state_dict") and not hasattr(part, "epoch"):
        return (
            f"{type(part).__name__} has set_epoch but no attribute `epoch` to save: "
            f"add one, or state_dict and load_state_dict; plain values are {ALLOWED}"
        )
    return ""

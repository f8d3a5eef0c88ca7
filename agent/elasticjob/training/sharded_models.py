"""Recognize models and optimizers whose state differs between ranks.

Classes are looked up in modules that are imported: a class of another module has no objects.
"""

from __future__ import annotations

import sys
from typing import Any


def sharded_parameter(module: Any) -> str:
    """Return name and kind of the first parameter of a module that is sharded over ranks; empty if there is none."""
    for name, child in module.named_modules():
        if _is(child, "torch.distributed.fsdp", "FullyShardedDataParallel"):
            parameter = next((n for n, _ in child.named_parameters()), "")
            prefix = f"{name}." if name else ""
            return f"{prefix}{parameter} (FullyShardedDataParallel)"
    for name, parameter in module.named_parameters():
        if is_sharded_tensor(parameter):
            return f"{name} ({type(parameter).__name__})"
    return ""


def is_sharded_tensor(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor, a ShardedTensor or a FlatParameter of FSDP."""
    return (
        _is(tensor, "torch.distributed.tensor", "DTensor")
        or _is(tensor, "torch.distributed._shard.sharded_tensor", "ShardedTensor")
        or getattr(tensor, "_is_flat_param", False)
    )


def is_sharded_optimizer(part: Any) -> bool:
    """Return whether each rank holds the state of a part of the parameters only."""
    return _is(part, "torch.distributed.optim", "ZeroRedundancyOptimizer")


def keeps_position_of_rank(part: Any) -> bool:
    """Return whether `state_dict` of a sampler or data loader holds the position of this rank.

    Such samplers have torch's attributes `num_replicas` and `rank`. torch's own DistributedSampler saves its epoch
    only, which all ranks share.
    """
    parts = (part, getattr(part, "base_dataloader", None))  # accelerate's loader holds torchdata's
    own = any(base.__module__.partition(".")[0] == "torchdata" for each in parts for base in type(each).__mro__)
    per_rank = hasattr(part, "num_replicas") and hasattr(part, "rank")
    return hasattr(part, "state_dict") and (own or per_rank)


def _is(value: Any, module: str, name: str) -> bool:
    found = getattr(sys.modules.get(module), name, None)
    return found is not None and isinstance(value, found)

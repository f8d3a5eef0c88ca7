"""Make torch forget the device meshes of an earlier round of this process.

DTensor caches the results of its dispatch by device mesh, and these contain the mesh. A mesh of the next round with the
same shape is equal to the old one, although this process may have another rank in it: with a cached result, optimizer
states and gathered tensors would be those of the old rank.
"""

from __future__ import annotations

import sys
from typing import Any

_TENSOR = "torch.distributed.tensor"


def forget_device_meshes() -> None:
    """Clear the caches of DTensor, if this process uses it. Call it after the process groups have ended."""
    propagator = _attribute(f"{_TENSOR}._api", "DTensor", "_op_dispatcher", "sharding_propagator")
    for clear in (
        _attribute("torch._C", "_clear_DTensor_sharding_propagator_cache"),
        getattr(getattr(propagator, "propagate_op_sharding", None), "cache_clear", None),
        _attribute(f"{_TENSOR}._redistribute", "_gen_transform_infos", "cache_clear"),
        _attribute(f"{_TENSOR}._redistribute", "clear_redistribute_planner_cache"),
    ):
        if clear is not None and propagator is not None:
            clear()


def _attribute(module: str, *names: str) -> Any:
    """Return an attribute of a module that is imported; None if this version of torch lacks it."""
    found: Any = sys.modules.get(module)
    for name in names:
        found = getattr(found, name, None)
    return found

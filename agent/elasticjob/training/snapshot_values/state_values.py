"""Which values a State can hold, and what to write instead of the others."""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any

import torch

from elasticjob.training.sharded_models import is_sharded_tensor

ALLOWED = "numbers, text, lists, dicts and tensors"
SHARDED = (
    "it is sharded over ranks, and a State holds the same state for all ranks: "
    "pass its model to an elasticjob.ShardedState"
)


def refusal(value: Any) -> str:
    """Return why a value that is no plain number, text, list or dict cannot be kept, and what to write instead.

    Empty for tensors that can be kept.
    """
    if isinstance(value, torch.Tensor):
        return _tensor_refusal(value)
    if _is_numpy(value, "ndarray"):
        return "numpy arrays cannot be part of a State: write torch.from_numpy(array)"
    if _is_numpy(value, "generic"):
        return "numpy scalars cannot be part of a State: write value.item()"
    if isinstance(value, type):
        return f"the class {value.__name__} cannot be part of a State: pass an object of it"
    return (
        f"objects of type {type(value).__name__} cannot be part of a State: "
        f"write {ALLOWED}, or give the type state_dict and load_state_dict"
    )


def value_refusal(value: Any) -> str:
    """Return why a plain value would come back as something else, and what to write instead; empty if it would not."""
    if isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf:
        return (
            _tensor_refusal(value)
            or "a tensor that is trained comes back as one that no optimizer knows: put it into a torch.nn.Module"
        )
    for plain in (dict, list, tuple):
        if isinstance(value, plain) and type(value) is not plain:
            return _comes_back_as(value, plain)
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return next(filter(None, map(value_refusal, items)), "")


def container_refusal(value: Any) -> str:
    """Return why a container in the state of an object cannot be kept; empty if the object can do with a plain one."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _comes_back_as(value, tuple)
    if isinstance(value, defaultdict):
        return _comes_back_as(value, dict)
    return ""


def _comes_back_as(value: Any, plain: type) -> str:
    return f"a {type(value).__name__} comes back as a plain {plain.__name__}: write {plain.__name__}(value)"


def key_refusal(key: Any) -> str:
    """Return why a key of a dict cannot be kept; empty for integers and text."""
    if type(key) in (int, str):
        return ""
    return f"{key!r} cannot be a key in a State: write keys as integers or text, such as str(key)"


def _tensor_refusal(tensor: Any) -> str:
    if is_sharded_tensor(tensor):
        return SHARDED
    if tensor.is_meta:
        return "tensors on the meta device have no content: create the State once the tensor has been materialized"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return "sparse and quantized tensors cannot be part of a State: write tensor.to_dense() or tensor.dequantize()"
    return ""


def _is_numpy(value: Any, kind: str) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, getattr(numpy, kind))

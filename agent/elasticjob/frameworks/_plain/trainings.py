"""What the trainings of transformers and of Lightning share: metrics, common checkpoints and lines. Imports torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
_MAX_METRICS = 24
_MAX_NAME = 64


def last_metrics(metrics: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the newest metrics, with names that a status may have."""
    return dict([*{str(name)[:_MAX_NAME]: value for name, value in metrics.items()}.items()][-_MAX_METRICS:])


def newest_on_all_ranks(own: Sequence[T]) -> tuple[T | None, tuple[int, T] | None]:
    """Return the newest checkpoint that all ranks have, and, if a rank lacks a newer one, the first such rank with it.

    `own`: the checkpoints that this rank finds, oldest first. All ranks call it.
    """
    found: list[Any] = [own]
    if dist.is_available() and dist.is_initialized():
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, own)
    common = set.intersection(*map(set, found))
    chosen = next((each for each in reversed(found[0]) if each in common), None)
    newest = max((each for of_rank in found for each in of_rank[-1:]), default=None)
    if newest is None or newest in common:
        return chosen, None
    return chosen, (next(rank for rank, of_rank in enumerate(found) if newest not in of_rank), newest)


def say(text: str) -> None:
    """Tell the user a sentence, once for all ranks."""
    if os.environ.get("RANK", "0") == "0":
        print(f"[elasticjob] {text}", file=sys.stderr, flush=True)

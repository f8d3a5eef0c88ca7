"""Data loaders of torch: which options micro-batches allow, and the start of an iteration. Imports torch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch

from elasticjob.data.epoch_position import EpochPosition


def require(condition: bool, advice: str) -> None:
    """ValueError with what to do, unless the condition holds."""
    if not condition:
        raise ValueError(f"this data loader cannot be used with elasticjob.microbatches: {advice}")


def require_order(loader: Any) -> None:
    """ValueError for a loader that returns batches in the order in which its workers finish them."""
    require(getattr(loader, "in_order", True), "create it with in_order=True, because each batch has its own weight")


def begin_iteration(loader: Any, position: EpochPosition) -> Iterator[Any]:
    """Return `iter(loader)`. Afterwards the rank's random generator of torch is as it was before.

    A loader without a generator of its own draws the seed of its workers from the rank's generator, once for each
    iteration. An epoch that is interrupted has one iteration more than an undisturbed one, so that all later random
    numbers would differ, such as those of dropout. The seed of the workers follows from the generator's first seed and
    the position here: other epochs have another one.
    """
    if getattr(loader, "generator", None) is not None:
        return iter(loader)
    generator = torch.default_generator
    before = generator.get_state()
    text = f"{generator.initial_seed()} {position.epoch} {position.consumed}"
    try:
        generator.manual_seed(random.Random(text).getrandbits(63))  # noqa: S311
        return iter(loader)
    finally:
        generator.set_state(before)

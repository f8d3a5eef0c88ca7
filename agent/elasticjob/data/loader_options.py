"""Checks of the options of a data loader."""

from __future__ import annotations

from typing import Any


def require(condition: bool, advice: str) -> None:
    """ValueError with what to do, unless the condition holds."""
    if not condition:
        raise ValueError(f"this data loader cannot be used with elasticjob.microbatches: {advice}")


def require_order(loader: Any) -> None:
    """ValueError for a loader that returns batches in the order in which its workers finish them."""
    require(getattr(loader, "in_order", True), "create it with in_order=True, because each batch has its own weight")

"""Blocks of training state in memory, without torch."""

from __future__ import annotations

import json
import os

from elasticjob._runtime.contract.snapshot_format import state_block
from elasticjob._runtime.contract.snapshot_format.state_block import HEADER_SIZE, NO_STEP, BlockHeader


def memory(
    step: int = NO_STEP, path: str | None = None, data: bytes = b"", *, sequence: int = 1, **more: object
) -> int:
    """Return a descriptor of memory with a block; without one if there is no step. `more`: other items of its JSON."""
    descriptor = os.memfd_create("test")
    if step != NO_STEP:
        write(descriptor, step, path, data, sequence=sequence, **more)
    return descriptor


def write(
    descriptor: int, step: int, path: str | None, data: bytes = b"", *, sequence: int = 1, **more: object
) -> None:
    """Replace the block in memory."""
    text = json.dumps({"path": path, "tree": {}, **more}).encode()
    view = state_block.begin_write(descriptor, HEADER_SIZE + len(text) + len(data))
    view[HEADER_SIZE:] = text + data
    state_block.finish_write(descriptor, BlockHeader(sequence, step, len(text), len(view)))

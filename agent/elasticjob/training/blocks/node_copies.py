"""The copies of a State in memory: two for all workers of a node, which the first of them writes."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

from elasticjob.contract.memory_file import memory_file
from elasticjob.training.blocks import state_block
from elasticjob.training.blocks.state_block import BlockHeader

COPIES = 2
"""One is complete at any time."""


class NodeCopies:
    """The two copies. Workers other than the first have memory of their own for a block that they receive or send."""

    def __init__(self, shared: Sequence[int], *, is_writer: bool) -> None:
        """`shared`: descriptors of the node's memory; empty without an agent, and the copies end with this process."""
        self.is_writer = is_writer
        self._shared = tuple(shared[:COPIES]) or _own_memory()
        self._written = self._shared if is_writer else _own_memory()
        self._mapped: dict[int, mmap.mmap] = {}

    def newest(self) -> tuple[int, BlockHeader]:
        """Return descriptor and header of the node's newest copy; the header is ABSENT if there is none."""
        index, header = state_block.newest_block(self._shared)
        return self._shared[index], header

    def begin(self, header: BlockHeader) -> tuple[mmap.mmap, Callable[[], int]]:
        """Drop the older copy. Return memory for all bytes of another one, and what completes it.

        That writes the header, and returns the descriptor.
        """
        index, _ = state_block.newest_block(self._written)
        descriptor = self._written[1 - index]
        memory = state_block.begin_write(descriptor, header.size, self._mapped.get(descriptor))
        self._mapped[descriptor] = memory

        def finish() -> int:
            state_block.finish_write(descriptor, header)
            return descriptor

        return memory, finish

    def write(self, header: BlockHeader, fill: Callable[[Any], None]) -> int:
        """Replace the older copy and return its descriptor. `fill` writes all bytes but the header into the memory."""
        memory, finish = self.begin(header)
        fill(memory)
        return finish()

    def release(self) -> None:
        """Free this worker's own memory; the node's copies stay."""
        if not self.is_writer:
            self._mapped = {}
            for descriptor in self._written:
                os.ftruncate(descriptor, 0)


def _own_memory() -> tuple[int, ...]:
    """Return descriptors of memory for two copies that ends with this process."""
    return tuple(memory_file(f"elasticjob-state-{i}") for i in range(COPIES))

"""The copies of a State in memory: two for all workers of a pod, which the first of them writes."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from elasticjob._runtime.contract.snapshot_format import state_block
from elasticjob._runtime.contract.snapshot_format.state_block import BlockHeader
from elasticjob._runtime.system.memory_file import memory_file
from elasticjob.training import pinned_memory

COPIES = 2
"""One is complete at any time."""
GRANULE = 1 << 20
"""Bytes. The memory of a copy is a multiple of it: a block is a few bytes longer or shorter each time, and new memory
would have to be registered with the driver again."""


class NodeCopies:
    """The two copies. Workers other than the first have memory of their own for a block that they receive or send."""

    def __init__(self, shared: Sequence[int], *, is_writer: bool) -> None:
        """`shared`: descriptors of the pod's memory; empty without an agent, and the copies end with this process."""
        self.is_writer = is_writer
        self._shared = tuple(shared[:COPIES]) or _own_memory()
        self._written = self._shared if is_writer else _own_memory()
        self.mapped: dict[int, mmap.mmap] = {}
        """Memory of the blocks that this process has written, by descriptor."""
        self.registered: dict[int, pinned_memory.Registration] = {}
        weakref.finalize(self, _end_all, self.registered)  # at the end of the process too

    def newest(self) -> tuple[int, BlockHeader]:
        """Return descriptor and header of the pod's newest copy; the header is ABSENT if there is none."""
        index, header = state_block.newest_block(self._shared)
        return self._shared[index], header

    def begin(self, header: BlockHeader) -> tuple[mmap.mmap, Callable[[], int]]:
        """Drop the older copy. Return memory for all bytes of another one, and what completes it.

        That writes the header, and returns the descriptor.
        """
        index, _ = state_block.newest_block(self._written)
        descriptor = self._written[1 - index]
        memory = self._memory(descriptor, header.size)

        def finish() -> int:
            state_block.finish_write(descriptor, header)
            self._register(descriptor, memory)
            return descriptor

        return memory, finish

    def _memory(self, descriptor: int, size: int) -> mmap.mmap:
        """Return memory for at least `size` bytes, if possible that of the last block there."""
        mapped = self.mapped.get(descriptor)
        fits = mapped is not None and size <= len(mapped) <= size + 2 * GRANULE
        room = len(mapped) if mapped is not None and fits else -(-size // GRANULE) * GRANULE
        if mapped is not None and not state_block.is_mapped(descriptor, room, mapped):
            self._unregister(descriptor)  # before its pages go
        memory = self.mapped[descriptor] = state_block.begin_write(descriptor, room, mapped)
        return memory

    def _register(self, descriptor: int, memory: mmap.mmap) -> None:
        """Register memory with the driver, in which the first copy is complete: the kernel has allocated its pages."""
        if self.is_writer and descriptor not in self.registered:
            registration = pinned_memory.register(memory)
            if registration is not None:
                self.registered[descriptor] = registration

    def _unregister(self, descriptor: int) -> None:
        registration = self.registered.pop(descriptor, None)
        if registration is not None:
            registration.end()

    def write(self, header: BlockHeader, fill: Callable[[Any], None]) -> int:
        """Replace the older copy and return its descriptor. `fill` writes all bytes but the header into the memory."""
        memory, finish = self.begin(header)
        fill(memory)
        return finish()

    def release(self) -> None:
        """Free this worker's own memory; the pod's copies stay."""
        if not self.is_writer:
            self.mapped = {}
            for descriptor in self._written:
                os.ftruncate(descriptor, 0)


def _end_all(registered: dict[int, pinned_memory.Registration]) -> None:
    for registration in registered.values():
        registration.end(0.0)  # they end side by side
    while registered:
        registered.popitem()[1].end()


def _own_memory() -> tuple[int, ...]:
    """Return descriptors of memory for two copies that ends with this process."""
    return tuple(memory_file(f"elasticjob-state-{i}") for i in range(COPIES))

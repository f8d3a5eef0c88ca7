"""The memory of one rank for shards: two buffers for its own and two for those of the rank whose copy it holds.

The agent owns the memory, so it outlives the worker. Of each pair of buffers, one is written while the other one holds
the newest shard that all ranks have, with its copies.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

from elasticjob._runtime.contract.snapshot_format import state_block
from elasticjob._runtime.contract.snapshot_format.state_block import BlockHeader
from elasticjob._runtime.contract.snapshot_format.state_sources import Version
from elasticjob._runtime.system.memory_file import memory_file
from elasticjob.training import progress_channel
from elasticjob.training.snapshot_values.node_copies import COPIES

BUFFERS = 2
"""For the own shard, and as many for another rank's."""
_FIRST = COPIES + 1
"""Number of the first buffer among the descriptors that the agent sends, after those that all workers share."""

_without_agent: list[int] = []


def shard_descriptors() -> list[int]:
    """Return the descriptors of all buffers. Without an agent, their memory ends with this process."""
    found = list(progress_channel.node_memory()[_FIRST : _FIRST + 2 * BUFFERS])
    if len(found) == 2 * BUFFERS:
        return found
    if not _without_agent:
        _without_agent.extend(memory_file(f"elasticjob-shard-{i}") for i in range(2 * BUFFERS))
    return _without_agent


class ShardBuffers:
    """A pair of buffers. It stays mapped from block to block."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self.descriptors = tuple(descriptors)
        self._views: list[mmap.mmap | None] = [None] * len(self.descriptors)

    def free_buffer(self, protected: Version) -> int:
        """Return the buffer that may be written: not the one with the version that all ranks have, else the older."""
        versions = [state_block.read_header(descriptor).version for descriptor in self.descriptors]
        return min(range(BUFFERS), key=lambda buffer: (versions[buffer] == protected, versions[buffer]))

    def begin(self, buffer: int, size: int) -> mmap.mmap:
        """Return the memory for a block of `size` bytes; there is no block in the buffer until `finish`."""
        view = self._views[buffer] = state_block.begin_write(self.descriptors[buffer], size, self._views[buffer])
        return view

    def finish(self, buffer: int, header: BlockHeader) -> None:
        """Write the header after all other bytes: it makes the block complete."""
        state_block.finish_write(self.descriptors[buffer], header)

"""Write a State to the memory that outlives its process: at once, or while the caller goes on."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from elasticjob._runtime.contract.snapshot_format.state_block import HEADER_SIZE, BlockHeader, data_start
from elasticjob._runtime.contract.snapshot_format.state_sources import Version
from elasticjob.training.devices import own_streams, synchronize_device
from elasticjob.training.replicated.copies.background_copy import BackgroundCopy, LateTensors
from elasticjob.training.snapshot_values.node_copies import NodeCopies
from elasticjob.training.snapshot_values.state_tree import PackedTree, write_tensors


@dataclass(frozen=True)
class PackedState:
    """A State as one block has it."""

    version: Version
    content: bytes
    """The JSON of the block."""
    packed: PackedTree
    """Its tensors, which are not copied yet."""


class CopyWriter:
    """Writes blocks to the memory of `copies`: one copy is always complete while the other is written."""

    def __init__(self, copies: NodeCopies, background: BackgroundCopy) -> None:
        self._copies = copies
        self._background = background

    def write(self, state: PackedState) -> int:
        """Write the state, and return the descriptor of its memory. The device must have finished its work."""
        memory, start, finish = self._begin(state)
        state.packed.write(memory, start)
        return finish()

    def write_late(self, state: PackedState, objects: Mapping[str, Any]) -> None:
        """Begin to write the state; an optimizer's step waits for the end (`BackgroundCopy.wait`).

        `objects`: the parts of the State by name. What their optimizers change is copied late, and the rest at once.
        """
        late = LateTensors(state.packed, objects)
        memory, start, finish = self._begin(state)
        write_tensors(late.others, memory, start)
        use_streams = own_streams(late.devices)
        synchronize_device()  # before another stream reads what is queued

        def copy() -> None:
            use_streams()
            late.write(memory, start)
            finish()

        self._background.start(copy)

    def _begin(self, state: PackedState) -> tuple[mmap.mmap, int, Callable[[], int]]:
        """Return memory in which only the tensors are missing, where they begin, and what completes the copy."""
        start = data_start(len(state.content))
        header = BlockHeader(*state.version, len(state.content), start + state.packed.size)
        memory, finish = self._copies.begin(header)
        memory[HEADER_SIZE : HEADER_SIZE + len(state.content)] = state.content
        return memory, start, finish

"""Copies of shards in other pods, made by a thread while the next step runs.

After each commit every rank sends its shard to its holder, receives the one that it holds, and agrees with all ranks
that both are done. Only then may the next commit replace the older shard: until all copies exist, the commit before
is the one to which the training returns.
"""

from __future__ import annotations

import atexit
import queue
import threading
from typing import Any

import torch

from elasticjob._runtime.contract.snapshot_format.state_block import HEADER_SIZE, BlockHeader
from elasticjob._runtime.contract.snapshot_format.state_sources import Version
from elasticjob.training.sharded.shard_group import ShardGroup
from elasticjob.training.sharded.shard_memory import ShardBuffers

_END_TIMEOUT = 30.0
"""Seconds in which a thread must end whose process group still exists."""
_BROKEN_TIMEOUT = 1.0
"""Seconds that a round waits for the thread of an earlier one, whose connections are broken. gloo sometimes loses the
error: a wait that begins while its connection is shut down lasts for the group's time-out, 30 minutes by default."""
_EXIT_TIMEOUT = 2.0
"""Seconds that a process waits for the last copies at its end: it would abort while torch waits in a thread."""


class ShardCopier:
    """The thread of one round."""

    def __init__(self, group: ShardGroup, holders: list[int], peers: ShardBuffers, complete_version: Version) -> None:
        """`holders`: result of `copy_holders`. `complete_version`: see the attribute; it is not overwritten."""
        self._group = group
        self._target = holders[group.rank] if holders else -1
        self._source = holders.index(group.rank) if holders else -1
        self._peers = peers
        self.complete_version = complete_version
        """The newest version whose shards and copies all exist."""
        self._error: BaseException | None = None
        self._jobs: queue.SimpleQueue[tuple[BlockHeader, Any] | None] = queue.SimpleQueue()
        self._done = threading.Event()
        self._done.set()
        self._thread = threading.Thread(target=self._run, daemon=True, name="elasticjob-shards")
        self._thread.start()
        atexit.register(self._end, _EXIT_TIMEOUT)

    def begin(self, header: BlockHeader, view: Any) -> None:
        """Copy the block in `view`, which must stay as it is until `wait` returns."""
        self._done.clear()
        self._jobs.put((header, view))

    def wait(self) -> None:
        """Wait until all ranks have copied what they began. An error of the connection to other ranks is raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread; without its process group it copies nothing any more, and may wait on.

        RuntimeError: it is still connected to a rank that does not answer.
        """
        atexit.unregister(self._end)
        destroyed = self._group.destroyed
        self._end(_BROKEN_TIMEOUT if destroyed else _END_TIMEOUT)
        if self._thread.is_alive() and not destroyed:
            raise RuntimeError("the copies of an earlier round have not ended: end its process groups first")

    def _end(self, timeout: float) -> None:
        self._jobs.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None and self._error is None:
            try:
                self._copy(*job)
                self.complete_version = job[0].version
            except Exception as error:  # of a lost rank: raised in the next commit
                self._error = error
            finally:
                del job
                self._done.set()

    def _copy(self, header: BlockHeader, view: Any) -> None:
        if self._target >= 0:
            self.exchange(header, view)
        sequence, step = header.version
        highest = self._group.greatest([sequence, -sequence, step, -step])
        if highest != [sequence, -sequence, step, -step]:
            raise RuntimeError("ShardedState: the ranks have committed different steps: call commit on all ranks")

    def exchange(self, header: BlockHeader, view: Any) -> None:
        """Send the own block and receive the other one, both at the same time."""
        group = self._group
        numbers = torch.tensor([header.sequence, header.step, header.json_size, header.size])
        announced = torch.empty_like(numbers)
        works = [group.group.send([numbers], self._target, 0), group.group.recv([announced], self._source, 0)]
        for work in works:
            work.wait()
        received = BlockHeader(*announced.tolist())
        buffer = self._peers.free_buffer(self.complete_version)
        memory = self._peers.begin(buffer, received.size)
        works = group.send(memoryview(view)[HEADER_SIZE:], self._target)
        works += group.receive(memoryview(memory)[HEADER_SIZE:], self._source)
        for work in works:
            work.wait()
        self._peers.finish(buffer, received)

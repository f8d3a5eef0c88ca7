"""A device with a queue of its own, played on the CPU: what a GPU does to a training loop, without one.

`install` makes it the accelerator of this process. Work is carried out later and in order, in a thread; the host runs
several steps ahead. Collectives of the backend "queued" return at once, and so does the wait for them. One whose group
is aborted ends successfully, with the part of the sum that has come, and the queue goes on. So does one of another rank
of that group, as kernels of NCCL that are aborted do it to their neighbours.

Tensors are on the CPU, and only what is launched here is queued: gradients, all-reduces and the steps of `QueuedSGD`.
Code that reads a tensor calls `synchronize` first.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist

DEPTH = 12
"""How many items the queue takes before `launch` waits."""
ITEM_SECONDS = 0.002
"""How long an item takes."""
_POLL_SECONDS = 0.001


class QueuedEvent:
    """An event as torch's devices have them."""

    def __init__(self) -> None:
        self._done = threading.Event()

    def record(self, stream: QueuedDevice) -> None:
        """Record the event behind all work that is queued."""
        stream.enqueue(self._done.set)

    def query(self) -> bool:
        return self._done.is_set()


class QueuedDevice:
    """A module such as torch.cuda, and its only stream."""

    Event = QueuedEvent

    def __init__(self) -> None:
        self._items: queue.Queue[Callable[[], object]] = queue.Queue()
        self._room = threading.Semaphore(DEPTH)
        threading.Thread(target=self._work, name="device", daemon=True).start()

    def is_initialized(self) -> bool:
        return True

    def current_stream(self) -> QueuedDevice:
        return self

    def synchronize(self) -> None:
        """Wait until the queue is empty."""
        done = threading.Event()
        self.enqueue(done.set)
        done.wait()

    def launch(self, item: Callable[[], object]) -> None:
        """Queue work, or capture it if a graph is captured; wait while the queue is full."""
        if QueuedGraph.capturing is not None:
            QueuedGraph.capturing.items.append(item)
            return
        self._room.acquire()

        def run() -> None:
            time.sleep(ITEM_SECONDS)
            item()
            self._room.release()

        self.enqueue(run)

    def enqueue(self, item: Callable[[], object]) -> None:
        """Queue something that takes no time on the device."""
        self._items.put(item)

    def _work(self) -> None:
        while True:
            self._items.get()()


device = QueuedDevice()


class QueuedGraph:
    """A CUDA graph: a sequence of items that is replayed as one, without a hook inside of it."""

    capturing: QueuedGraph | None = None

    def __init__(self) -> None:
        self.items: list[Callable[[], object]] = []

    def capture_begin(self) -> None:
        QueuedGraph.capturing = self

    def capture_end(self) -> None:
        QueuedGraph.capturing = None

    def replay(self) -> None:
        def run() -> None:
            for item in self.items:
                item()

        device.launch(run)


class QueuedSGD(torch.optim.Optimizer):  # type: ignore[misc]
    """Subtracts the gradients in the queue."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(list(parameters), {})

    def step(self, closure: Any = None) -> None:
        assert closure is None
        pairs = [(p, p.grad) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter, _ in pairs:
            torch.autograd.graph.increment_version(parameter)

        def subtract() -> None:
            for parameter, gradient in pairs:
                parameter.data.sub_(gradient)

        device.launch(subtract)


class _Started(dist.Work):  # type: ignore[misc]
    """A collective that is in the queue. A wait for it orders streams, and does not hold up the host."""

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        return True


class QueuedBackend(torch._C._distributed_c10d.Backend):  # type: ignore[misc]
    """Sums over the ranks, through the store of the group."""

    def __init__(self, store: Any, rank: int, size: int, folder: Path) -> None:
        super().__init__(rank, size)
        self._store, self._rank, self._size, self._number = store, rank, size, 0
        self._aborted = threading.Event()
        if rank == 0:
            store.set("abort", str(folder / f"aborted-{uuid4()}"))
        self._abort = Path(store.get("abort").decode())
        """Exists once any rank has aborted this group."""

    def name(self) -> str:
        return "queued"

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        return self.name()

    def allreduce(self, tensors: list[Any], options: Any = None) -> Any:
        (tensor,), number = tensors, self._number
        self._number += 1
        device.launch(lambda: self._sum(tensor, number))
        return _Started()

    def abort(self) -> None:
        self._abort.touch()
        self._aborted.set()

    def shutdown(self) -> None:
        self._aborted.set()

    def _sum(self, tensor: Any, number: int) -> None:
        parts = {self._rank: tensor.tolist()}
        try:
            self._exchange(parts, number)
        except RuntimeError:  # the connection to the store is shut down with those of the group
            self._aborted.wait()
        tensor.copy_(sum(torch.tensor(part, dtype=tensor.dtype) for part in parts.values()))

    def _exchange(self, parts: dict[int, list[float]], number: int) -> None:
        """Get the parts of the other ranks; return without some of them once any rank has aborted the group."""
        self._store.set(f"{number}/{self._rank}", json.dumps(parts[self._rank]))
        missing = {*range(self._size)} - {self._rank}
        while missing and not self._aborted.is_set() and not self._abort.exists():
            come = {rank for rank in missing if self._store.check([f"{number}/{rank}"])}
            parts.update({rank: json.loads(self._store.get(f"{number}/{rank}")) for rank in come})
            missing -= come
            if missing and not come:
                time.sleep(_POLL_SECONDS)


def install(folder: str | Path) -> QueuedDevice:
    """Make the device the accelerator of this process, and its backend known to torch.distributed; return it.

    Ranks find in the folder which groups have been aborted.
    """
    torch.privateuseone = device
    torch.accelerator.current_accelerator = lambda check_available=False: (
        None if check_available else torch.device("privateuseone")
    )

    def create(store: Any, rank: int, size: int, _timeout: timedelta) -> QueuedBackend:
        return QueuedBackend(store, rank, size, Path(folder))

    dist.Backend.register_backend("queued", create, devices=["cpu"])
    return device

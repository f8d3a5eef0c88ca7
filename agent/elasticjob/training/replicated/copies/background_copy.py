"""A commit whose copy goes on while the next step computes its gradients.

What the optimizers of a State change is copied late, in a thread, because nothing else changes it until their next
step. All other tensors are copied at once: a forward pass changes the buffers of a BatchNorm, and nothing says when a
moving average is changed.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import torch

from elasticjob.training.snapshot_values.state_tree import PackedTree, write_tensors
from elasticjob.training.update_guard import guard

POLL_INTERVAL = 0.1
"""Seconds after which a wait looks whether the copy is still under way, if nothing wakes it."""
LATE = 1 << 20
"""Bytes from which a tensor is copied late. Many small ones would compete with the training for the interpreter."""
SAMPLES = 16
"""Elements of a tensor that show whether it was changed in a way that its version does not count, as by `.data`."""


class BackgroundCopy:
    """Runs one copy at a time in a thread."""

    def __init__(self) -> None:
        self._copying_in = 0
        """The process in which a copy is under way: a fork has no such thread."""
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._error: Exception | None = None

    def start(self, copy: Callable[[], object]) -> None:
        """Run `copy` while the caller goes on, or now if no thread can be started. `wait` for the one before it."""
        ended: SimpleQueue[None] = SimpleQueue()
        turn = [None]

        def run() -> None:
            if not _take(turn):
                return
            try:
                copy()
            except Exception as error:
                self._error = error
            finally:
                self._copying_in = 0
                ended.put(None)

        self._ended, self._copying_in = ended, os.getpid()
        with guard.section():  # an interrupted start of a thread may block all others
            try:
                # No daemon: a process that ends waits for the commit that its script has made.
                threading.Thread(target=run, name="elasticjob-commit").start()
            except RuntimeError:  # no more threads
                run()
            except BaseException:  # an interruption: a thread that has not begun will copy nothing
                if _take(turn):
                    self._copying_in = 0
                raise

    def wait(self) -> None:
        """Return once the copy is complete; raise what has prevented it.

        The end of a round may interrupt it. `Thread.join` would then forget the thread (Python before 3.13).
        """
        while self._copying_in == os.getpid():
            with suppress(Empty):
                self._ended.get(timeout=POLL_INTERVAL)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait_ignoring_errors(self) -> None:
        """Return once no copy is under way. One that has failed is only reported: a newer state takes its place."""
        try:
            self.wait()
        except Exception as error:
            sys.stderr.write(f"elasticjob: a commit has failed, and the one before it is kept: {error}\n")


def _take(turn: list[None]) -> bool:
    """Take the only item of a list; return False if another thread has taken it."""
    try:
        turn.pop()
    except IndexError:
        return False
    return True


class LateTensors:
    """The tensors of a packed state that may be copied late, and how they were when the commit began."""

    def __init__(self, packed: PackedTree, objects: Mapping[str, Any]) -> None:
        self.names = _changed_by_optimizers(objects)
        self.tensors: list[tuple[int, Any]] = []
        """(offset, tensor), as in the packed state."""
        self.others: list[tuple[int, Any]] = []
        """Those that must be copied at once."""
        for offset, tensor in packed.tensors:
            late = tensor.data_ptr() in self.names and _is_late(tensor)
            (self.tensors if late else self.others).append((offset, tensor))
        self._seen = [(tensor._version, _sample(tensor)) for _, tensor in self.tensors]

    @property
    def devices(self) -> set[Any]:
        return {tensor.device for _, tensor in self.tensors}

    def write(self, memory: mmap.mmap, start: int) -> None:
        """Copy them to the data that begins at `start`. RuntimeError: one was not as it had been."""
        for place, (version, sample) in zip(self.tensors, self._seen, strict=True):
            write_tensors([place], memory, start)
            tensor = place[1]
            if tensor._version != version or not torch.equal(_sample(tensor), sample):
                raise RuntimeError(
                    f"State.commit(non_blocking=True): {self.names[tensor.data_ptr()]} was changed before it was "
                    "copied, and not by a step of an optimizer of this State: the commit before this one is kept. "
                    "Write state.commit()"
                )


def _changed_by_optimizers(objects: Mapping[str, Any]) -> dict[int, str]:
    """Return what the optimizers change in their steps, by address: their parameters and their states."""
    modules = {name: part for name, part in objects.items() if isinstance(part, torch.nn.Module)}
    names = {
        parameter.data_ptr(): f"{name}.{key}"
        for name, module in modules.items()
        for key, parameter in module.named_parameters()
    }
    found: dict[int, str] = {}
    for name, part in objects.items():
        if isinstance(part, torch.optim.Optimizer):
            for parameter in (parameter for group in part.param_groups for parameter in group["params"]):
                known = names.get(parameter.data_ptr(), f"a parameter of {name}")
                found[parameter.data_ptr()] = known
                state = part.state.get(parameter)
                for key, value in state.items() if isinstance(state, Mapping) else ():
                    if isinstance(value, torch.Tensor):
                        found[value.data_ptr()] = f"{key} of {known}"
    return found


def _is_late(tensor: Any) -> bool:
    return (
        type(tensor) is torch.Tensor  # others may have no memory of their own
        and tensor.numel() * tensor.element_size() >= LATE
        and not tensor.is_inference()  # has no version
        and any(tensor.is_contiguous(memory_format=layout) for layout in _layouts(tensor.dim()))
    )


def _layouts(dimensions: int) -> list[Any]:
    """Return the layouts of a tensor that has no gaps, so that `_sample` may read all of its memory."""
    more = {4: [torch.channels_last], 5: [torch.channels_last_3d]}
    return [torch.contiguous_format, *more.get(dimensions, [])]


def _sample(tensor: Any) -> Any:
    """Return a copy of the bytes of some elements, on the device of the tensor."""
    step = tensor.numel() // SAMPLES
    return torch.as_strided(tensor.detach(), (SAMPLES,), (step,)).clone().view(torch.uint8)

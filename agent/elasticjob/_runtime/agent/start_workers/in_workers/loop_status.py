"""Rank 0 of a loop with accelerate or Lightning Fabric sends its steps and metrics to the agent (`status_sender`).

Steps are those of the optimizers that the framework has prepared. Metrics are what the script logs through it, and the
loss that it passes to the framework's `backward`.
"""

from __future__ import annotations

import atexit
import functools
import os
import weakref
from contextlib import suppress

from . import trainers
from .status_sender import MAX_METRICS, StatusSender, has_agent, is_wanted, numbers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType
    from typing import Any

_LOSS = "loss"


class LoopStatus:
    """What a loop has done in this process."""

    def __init__(self) -> None:
        self._sender = StatusSender()
        self._calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """Steps of each optimizer in this process."""
        self._before: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """Steps of each optimizer before that, from its state at the last request."""
        self._step = 0
        """Steps of the optimizer with the most steps."""
        self._logged: dict[str, Any] = {}
        self._loss: Any = None
        self._sent: tuple[int, dict[str, str]] = (0, {})
        self._is_shown: bool | None = None
        self._pid = 0
        """The process that shows its progress, and not one that it has forked."""

    def count(self, optimizer: Any) -> None:
        """Count a step of an optimizer of torch, and send the progress if it is time for that."""
        self._calls[optimizer] = self._calls.get(optimizer, 0) + 1
        self._step = self._most_steps()
        if not self._sender.is_due or os.environ.get("RANK") != "0" or not self._shown():
            return
        for each, calls in self._calls.items():
            self._before[each] = max(0, _steps_in_state(each) - calls)
        self._step = self._most_steps()
        self._send(numbers({_LOSS: self._loss} | self._logged))

    def note(self, metrics: Mapping[str, Any]) -> None:
        """Note metrics that the script has logged."""
        values = {str(name): value.detach() if hasattr(value, "detach") else value for name, value in metrics.items()}
        self._logged = dict([*(self._logged | values).items()][1 - MAX_METRICS :])

    def note_loss(self, loss: Any) -> None:
        """Note the loss of a backward pass, if it is one number."""
        with suppress(AttributeError, RuntimeError):
            self._loss = loss.detach() if loss.numel() == 1 else None

    def send_last(self) -> None:
        """Send the last step, at the end of the process.

        Its metrics are not read: after an error, the GPU may never reach them.
        """
        if self._pid == os.getpid() and not self._sender.is_over and self._step != self._sent[0]:
            self._send(self._sent[1])

    def _most_steps(self) -> int:
        return max(calls + self._before.get(each, 0) for each, calls in self._calls.items())

    def _send(self, metrics: dict[str, str]) -> None:
        self._sent = (self._step, metrics)
        self._sender.send(metrics, self._step)

    def _shown(self) -> bool:
        """Return whether nothing else shows the progress of this process: a Trainer of transformers, or the script."""
        if self._is_shown is None:
            own = trainers.framework("own_callbacks")
            self._is_shown = has_agent() and not trainers.made and not (own is not None and own.uses_elasticjob())
            if self._is_shown:
                self._pid = os.getpid()
                atexit.register(self.send_last)
        return self._is_shown


process_status = LoopStatus()


def count_accelerate(module: ModuleType) -> None:
    """Count the steps of accelerate's optimizers: those of this module."""
    for name in ("AcceleratedOptimizer", "DeepSpeedOptimizerWrapper"):
        optimizer = getattr(module, name, None)
        if optimizer is not None and optimizer.__module__ == module.__name__ and is_wanted():
            optimizer.step = _counted(optimizer.step, _is_accelerate_step)


def count_fabric(module: ModuleType) -> None:
    """Count the steps of Fabric's optimizers."""
    optimizer = getattr(module, "_FabricOptimizer", None)
    if optimizer is not None and is_wanted():
        optimizer.step = _counted(optimizer.step, lambda _: True)


def note_accelerate(module: ModuleType) -> None:
    """Note what a script logs with its Accelerator, and its losses."""
    _note(getattr(module, "Accelerator", None), "log")


def note_fabric(module: ModuleType) -> None:
    """Note what a script logs with Fabric, and its losses."""
    _note(getattr(module, "Fabric", None), "log_dict")


def _note(kind: Any, log_name: str) -> None:
    if kind is None or not is_wanted():
        return
    log, backward = getattr(kind, log_name), kind.backward

    @functools.wraps(log)
    def noted_log(self: Any, *args: Any, **named: Any) -> Any:
        metrics: Any = args[0] if args else named.get("values", named.get("metrics"))
        with suppress(Exception):  # not a dict: the framework says so
            process_status.note(metrics)
        return log(self, *args, **named)

    @functools.wraps(backward)
    def noted_backward(self: Any, loss: Any, *args: Any, **named: Any) -> Any:
        process_status.note_loss(loss)
        return backward(self, loss, *args, **named)

    setattr(kind, log_name, noted_log)
    kind.backward = noted_backward


def _counted(step: Any, is_step: Any) -> Any:
    @functools.wraps(step)
    def counted_step(self: Any, *args: Any, **named: Any) -> Any:
        result = step(self, *args, **named)
        if is_step(self):
            process_status.count(self.optimizer)
        return result

    return counted_step


def _is_accelerate_step(optimizer: Any) -> bool:
    """Return whether a call of `step` has changed the model: gradients are complete, and finite."""
    return bool(optimizer.gradient_state.sync_gradients) and not optimizer.step_was_skipped


def _steps_in_state(optimizer: Any) -> int:
    """Return the number of steps that an optimizer such as Adam has counted, also before a restart; 0: it does not."""
    with suppress(AttributeError, TypeError, ValueError, RuntimeError):
        for state in optimizer.state.values():
            if "step" in state:
                return int(state["step"])
    return 0

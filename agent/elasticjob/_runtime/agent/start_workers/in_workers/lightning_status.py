"""Rank 0 of Lightning's Trainer sends its step, the total and its metrics to the agent (`status_sender`)."""

from __future__ import annotations

import functools
import math
import sys

from .status_sender import StatusSender, has_agent, is_wanted, numbers
from .trainers import framework

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any


def show_progress(module: ModuleType) -> None:
    """Add a callback to each Trainer of Lightning that stops and saves, or one that sends its progress to the agent."""
    trainer = getattr(module, "Trainer", None)
    if trainer is None or not is_wanted():
        return
    init = trainer.__init__

    @functools.wraps(init)
    def extended_init(self: Any, *args: Any, **named: Any) -> None:
        init(self, *args, **named)
        package = sys.modules[module.__name__.partition(".trainer.")[0]]
        stop = framework("plain_lightning")
        if (stop is None or not stop.add_lightning_stop(self, package, _total)) and has_agent():
            self.callbacks.append(_callback(package))

    trainer.__init__ = extended_init


def _callback(package: Any) -> Any:
    """Return a callback of this package, lightning.pytorch or pytorch_lightning."""

    class ShowProgress(package.Callback):  # type: ignore[misc]
        """Sends the progress of rank 0 every few seconds, and at the end."""

        def __init__(self) -> None:
            self.sender = StatusSender()

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
            if trainer.is_global_zero and self.sender.is_due and trainer.global_step:
                self.send(trainer, pl_module)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.is_global_zero and not self.sender.is_over:
                self.send(trainer, pl_module)

        def __reduce__(self) -> Any:
            return package.Callback, ()  # a process that unpickles the trainer has no such class

        def send(self, trainer: Any, pl_module: Any) -> None:
            self.sender.send(numbers(trainer.callback_metrics), trainer.global_step, _total(trainer, pl_module))

    return ShowProgress()


def _total(trainer: Any, pl_module: Any) -> int | None:
    """Return the number of optimizer steps; None if it is open, or if the module does steps of its own."""
    if trainer.max_steps is not None and trainer.max_steps > 0:
        return int(trainer.max_steps)
    epochs, batches = trainer.max_epochs, trainer.num_training_batches
    if not epochs or epochs < 0 or not math.isfinite(batches) or not pl_module.automatic_optimization:
        return None
    steps: int = math.ceil(batches / max(1, trainer.accumulate_grad_batches))
    return steps * int(epochs)

"""Rank 0 of Lightning's Trainer sends its step, the total and its metrics to the agent, as transformers' Trainer does.

The agent answers these requests on its loopback address (`reporting.status_requests`). A request that fails is the last
one: the training never waits for the status again.
"""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import time
from contextlib import suppress

from .trainers import TRAINER_INTEGRATION

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

_URL, _TOKEN = "KUBEFLOW_TRAINER_SERVER_URL", "KUBEFLOW_TRAINER_SERVER_TOKEN"  # names of variables
_AGENT = "http://127.0.0.1:"
"""How the URL of the agent begins. A URL of another server is set by the pod template."""
_INTERVAL = 5.0
"""Seconds from one request to the next. Reading a metric waits for the GPU."""
_TIMEOUT = 1.0
"""Seconds that the training waits for an answer."""
_MAX_METRICS = 24


def show_progress(module: ModuleType) -> None:
    """Add a callback to each Trainer of Lightning that sends its progress to the agent."""
    trainer = getattr(module, "Trainer", None)
    if trainer is None or os.environ.get(TRAINER_INTEGRATION) == "None":
        return
    init = trainer.__init__

    @functools.wraps(init)
    def extended_init(self: Any, *args: Any, **named: Any) -> None:
        init(self, *args, **named)
        if os.environ.get(_URL, "").startswith(_AGENT):
            self.callbacks.append(_callback(sys.modules[module.__name__.partition(".trainer.")[0]]))

    trainer.__init__ = extended_init


def _callback(package: Any) -> Any:
    """Return a callback of this package, lightning.pytorch or pytorch_lightning."""

    class ShowProgress(package.Callback):  # type: ignore[misc]
        """Sends the progress of rank 0 every few seconds, and at the end."""

        def __init__(self) -> None:
            self.send_at = 0.0

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
            if trainer.is_global_zero and time.monotonic() >= self.send_at and trainer.global_step:
                self.send(trainer, pl_module)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.is_global_zero and self.send_at < math.inf:
                self.send(trainer, pl_module)

        def __reduce__(self) -> Any:
            return package.Callback, ()  # a process that unpickles the trainer has no such class

        def send(self, trainer: Any, pl_module: Any) -> None:
            self.send_at = time.monotonic() + _INTERVAL if _post(_progress(trainer, pl_module)) else math.inf

    return ShowProgress()


def _progress(trainer: Any, pl_module: Any) -> dict[str, Any]:
    """Return the step, the total if it is known, and the metrics that are numbers."""
    found: dict[str, Any] = {}
    for name, value in list(trainer.callback_metrics.items())[:_MAX_METRICS]:
        with suppress(TypeError, ValueError, RuntimeError):
            found[str(name)] = f"{float(value):.6g}"
    total = _total(trainer, pl_module)
    return found | {"current_step": trainer.global_step} | ({} if total is None else {"total_steps": total})


def _total(trainer: Any, pl_module: Any) -> int | None:
    """Return the number of optimizer steps; None if it is open, or if the module does steps of its own."""
    if trainer.max_steps is not None and trainer.max_steps > 0:
        return int(trainer.max_steps)
    epochs, batches = trainer.max_epochs, trainer.num_training_batches
    if not epochs or epochs < 0 or not math.isfinite(batches) or not pl_module.automatic_optimization:
        return None
    steps: int = math.ceil(batches / max(1, trainer.accumulate_grad_batches))
    return steps * int(epochs)


def _post(metrics: dict[str, Any]) -> bool:
    """Send metrics to the agent; return whether it has taken them, or may take later ones."""
    import urllib.error
    import urllib.request

    named = [{"name": name, "value": str(value)} for name, value in metrics.items()]
    body = json.dumps({"trainerStatus": {"metrics": named}}).encode()
    try:
        with open(os.environ[_TOKEN]) as file:
            headers = {"Authorization": f"Bearer {file.read()}"}
        request = urllib.request.Request(os.environ[_URL], body, headers, method="POST")  # noqa: S310
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=_TIMEOUT):
            return True
    except urllib.error.HTTPError:
        return True  # too many, or not in this round
    except (OSError, KeyError, ValueError):
        return False

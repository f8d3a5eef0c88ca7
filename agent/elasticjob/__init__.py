"""Elastic PyTorch jobs: the agent, the store and the functions that training code imports."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any


def _refuse_old_python() -> None:
    """End an agent as for any usage error; raise ImportError in other programs. Older Pythons run this module only."""
    message = f"{sys.executable} is Python {sys.version.split()[0]}: use an image with Python 3.10 or newer"
    if sys.argv[1:2] != ["agent"]:
        raise ImportError(f"elasticjob: {message}")
    import json
    import os

    sys.stderr.write(f"elasticjob agent: {message}\n")
    termination = {"outcome": "Error", "reason": "UsageError", "message": message}
    try:
        with open(os.environ.get("ELASTICJOB_TERMINATION_LOG") or "/dev/termination-log", "w") as file:
            json.dump(termination, file)
    except OSError:
        pass
    sys.exit(64)


if sys.version_info < (3, 10):  # noqa: UP036
    _refuse_old_python()

if TYPE_CHECKING:
    from elasticjob._runtime.local.launch import RunResult, WorkerState, launch
    from elasticjob.data.iterable import ElasticIterable
    from elasticjob.data.learning_rate import scale_learning_rate
    from elasticjob.data.micro_batches import microbatches
    from elasticjob.data.sampler import ElasticSampler
    from elasticjob.inprocess._restartable.restartable import restartable
    from elasticjob.training.progress_channel import Stopped, deadline, on_stop, progress
    from elasticjob.training.replicated.state import State
    from elasticjob.training.sharded.sharded_state import ShardedState

__version__ = "0.1.0"
__all__ = [
    "ElasticIterable",
    "ElasticSampler",
    "RunResult",
    "ShardedState",
    "State",
    "Stopped",
    "WorkerState",
    "deadline",
    "launch",
    "microbatches",
    "on_stop",
    "progress",
    "restartable",
    "scale_learning_rate",
]

_MODULES = {
    "ElasticIterable": "elasticjob.data.iterable",
    "ElasticSampler": "elasticjob.data.sampler",
    "microbatches": "elasticjob.data.micro_batches",
    "scale_learning_rate": "elasticjob.data.learning_rate",
    "RunResult": "elasticjob._runtime.local.launch",
    "WorkerState": "elasticjob._runtime.local.launch",
    "launch": "elasticjob._runtime.local.launch",
    "ShardedState": "elasticjob.training.sharded.sharded_state",
    "State": "elasticjob.training.replicated.state",
    "Stopped": "elasticjob.training.progress_channel",
    "deadline": "elasticjob.training.progress_channel",
    "on_stop": "elasticjob.training.progress_channel",
    "progress": "elasticjob.training.progress_channel",
    "restartable": "elasticjob.inprocess._restartable.restartable",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use: the agent and the store start without the modules of training code."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value

"""Elastic PyTorch jobs: the agent, the store and the functions that training code imports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elasticjob.local.launch import RunResult, WorkerState, launch
    from elasticjob.training.progress_channel import Stopped, on_stop, progress
    from elasticjob.training.state import State

__version__ = "0.1.0"
__all__ = ["RunResult", "State", "Stopped", "WorkerState", "launch", "on_stop", "progress"]

_MODULES = {
    "RunResult": "elasticjob.local.launch",
    "WorkerState": "elasticjob.local.launch",
    "launch": "elasticjob.local.launch",
    "State": "elasticjob.training.state",
    "Stopped": "elasticjob.training.progress_channel",
    "on_stop": "elasticjob.training.progress_channel",
    "progress": "elasticjob.training.progress_channel",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use: the agent and the store start without the modules of training code."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value

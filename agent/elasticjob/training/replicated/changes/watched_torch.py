"""What a State must see of torch besides the steps of optimizers, for which torch has no hooks.

A captured CUDA graph changes parameters when it is replayed, and runs no Python then. DistributedDataParallel writes to
the parameters when it is made, though with the values that they have. Both methods are wrapped once in a process; the
wrappers call the State that is watched.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn.parallel import distributed as ddp


class Watcher(Protocol):
    """What is called."""

    def begin_change(self) -> None:
        """Before a CUDA graph with an optimizer's step is replayed."""

    def note_broadcast(self) -> None:
        """After the parameters of rank 0 have been sent to all ranks."""


@dataclass
class _Watched:
    watcher: Callable[[], Watcher | None] | None = None
    newest_graph: Callable[[], Any] | None = None
    """Returns the graph whose capture began last, while it exists: torch captures one at a time."""
    is_capturing: Callable[[], bool] | None = None
    with_step: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    """The graphs with an optimizer's step."""


watched = _Watched()


def watch(watcher: Watcher) -> None:
    """Call this object from now on, and no longer an earlier one."""
    watched.watcher = weakref.ref(watcher)
    _watch_ddp()
    if torch.cuda.is_available():
        watch_graphs(torch.cuda.CUDAGraph, torch.cuda.is_current_stream_capturing)


def watch_graphs(graph: Any, is_capturing: Callable[[], bool]) -> None:
    """Watch a class of graphs. `is_capturing` returns whether calls are captured now, and not carried out."""
    watched.is_capturing = is_capturing
    for name, wrap in (("capture_begin", _capture_begin), ("replay", _replay)):
        method = getattr(graph, name)
        if not hasattr(method, "_elasticjob"):
            wrapped = wrap(method)
            wrapped._elasticjob = True
            setattr(graph, name, wrapped)


def note_captured_step() -> bool:
    """Note an optimizer's step; return whether it is only captured, so that it changes nothing yet."""
    graph = _newest_graph()
    if graph is None or watched.is_capturing is None or not watched.is_capturing():
        return False
    watched.with_step.add(graph)
    return True


def has_graphs() -> bool:
    """Return whether there is a graph: it may write to the gradients that existed when it was captured."""
    return _newest_graph() is not None


def _newest_graph() -> Any:
    return watched.newest_graph() if watched.newest_graph is not None else None


def _watcher() -> Watcher | None:
    return watched.watcher() if watched.watcher is not None else None


def _capture_begin(method: Any) -> Any:
    @functools.wraps(method)
    def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
        watched.newest_graph = weakref.ref(graph)
        return method(graph, *args, **kwargs)

    return capture_begin


def _replay(method: Any) -> Any:
    @functools.wraps(method)
    def replay(graph: Any, *args: Any, **kwargs: Any) -> Any:
        if graph in watched.with_step and (watcher := _watcher()) is not None:
            watcher.begin_change()
        return method(graph, *args, **kwargs)

    return replay


def _watch_ddp() -> None:
    """Wrap what DistributedDataParallel calls, unless it is. Without it, its change counts as one of the script."""
    sync = getattr(ddp, "_sync_module_states", None)
    if sync is None or hasattr(sync, "_elasticjob"):
        return

    @functools.wraps(sync)
    def sync_module_states(*args: Any, **kwargs: Any) -> Any:
        result = sync(*args, **kwargs)
        if (watcher := _watcher()) is not None:
            watcher.note_broadcast()
        return result

    sync_module_states._elasticjob = True  # type: ignore[attr-defined]
    ddp._sync_module_states = sync_module_states

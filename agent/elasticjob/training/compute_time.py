"""Measure the seconds of each step that a rank spends in its own work.

In data parallel training every step takes the same time on all ranks: fast ranks wait for slow ones in the backward
pass, where gradients are reduced. The time between two backward passes (data, forward pass, optimizer) is the rank's
own. A rank that waits for other ranks there too looks as slow as they are, but never slower.
"""

from __future__ import annotations

import functools
import os
import sys
from time import monotonic_ns
from typing import Any

from elasticjob._runtime.contract.shared_memory.progress_page import PageWord

_OWN = int(PageWord.OWN)

_words: memoryview | None = None
_depth = 0
"""Number of nested backward passes in progress; reentrant checkpoints nest them."""
_ended = 0
"""When the last backward pass ended, as `monotonic_ns`; 0 if unknown."""


def measure(words: memoryview) -> None:
    """Wrap `torch.autograd.backward` and count in `words` (a page) from now on. Without torch this does nothing.

    Only backward passes on the CPU count. On other devices, work continues after the Python call has returned.
    """
    global _words, _ended
    autograd = sys.modules.get("torch.autograd")
    backward = getattr(autograd, "backward", None)
    if autograd is None or backward is None:
        return
    _words, _ended = words, 0
    if getattr(backward, "__module__", "") == __name__:
        return  # wrapped in an earlier round of this process

    @functools.wraps(backward, assigned=("__name__", "__qualname__", "__doc__"))
    def measured(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        global _depth, _ended
        if _ended and _depth == 0 and _words is not None:
            _words[_OWN] += monotonic_ns() - _ended
        _depth += 1
        try:
            return backward(tensors, *args, **kwargs)
        finally:
            _depth -= 1
            if _depth == 0:
                _ended = monotonic_ns() if getattr(tensors, "is_cpu", False) else 0

    autograd.backward = measured  # type: ignore[attr-defined]  # what Tensor.backward calls


def _reset_after_fork() -> None:
    """Stop counting in a child process: it is not the rank."""
    global _words
    _words = None


os.register_at_fork(after_in_child=_reset_after_fork)

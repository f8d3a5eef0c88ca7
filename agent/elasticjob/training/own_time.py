"""How much of a step is the rank's own.

In data parallel training every step takes all ranks equally long: the fast ones wait for the slow ones where gradients
are reduced, within the backward pass. What lies between two backward passes (data, forward pass, optimizer) is each
rank's own. A rank that waits for others there as well looks as slow as they are, never slower.
"""

from __future__ import annotations

import functools
import os
import sys
from time import monotonic_ns
from typing import Any

from elasticjob.contract.progress_page import PageWord

_OWN = int(PageWord.OWN)

_words: memoryview | None = None
_depth = 0
"""Backward passes under way: reentrant checkpoints run some within others."""
_ended = 0
"""When the last one had ended; 0: not known."""


def measure(words: memoryview) -> None:
    """Count in `words` from now on; does nothing in a process that has not imported torch.

    Only passes on the CPU count: other devices work on their own, and say nothing by when a call of Python returns.
    """
    global _words
    autograd = sys.modules.get("torch.autograd")
    backward = getattr(autograd, "backward", None)
    if autograd is None or backward is None:
        return
    _words = words

    @functools.wraps(backward)
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


def _forget() -> None:
    """In a process forked from the one that is the rank."""
    global _words
    _words = None


os.register_at_fork(after_in_child=_forget)

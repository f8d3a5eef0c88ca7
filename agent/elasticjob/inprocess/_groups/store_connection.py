"""Connect to a torch store in several attempts, so that an interruption can end the wait for a store that is lost.

torch connects in C++ code, which ignores signals until its whole time-out has passed. A rank that waits there cannot
leave its function, and would be killed with its state when the store's node is lost while the next group forms.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

_SHORTEST_ATTEMPT = 0.25
_PAUSE = 0.02
"""Seconds. An attempt takes at least the first, or a quarter of the time so far: a slow network needs longer ones."""


@contextmanager
def interruptible_connections() -> Iterator[None]:
    """Let `init_process_group` connect to its store so that signals are handled between attempts."""
    module: Any = importlib.import_module("torch.distributed.rendezvous")
    create = module.TCPStore

    @functools.wraps(create, updated=())
    def connect(*args: Any, **kwargs: Any) -> Any:
        timeout = kwargs.get("timeout")
        if args or not isinstance(timeout, timedelta) or kwargs.get("is_master", True):
            return create(*args, **kwargs)
        return _connect(create, timeout, kwargs)

    module.TCPStore = connect
    try:
        yield
    finally:
        module.TCPStore = create


def _connect(create: Any, timeout: timedelta, kwargs: dict[str, Any]) -> Any:
    begin = time.monotonic()
    while True:
        elapsed = time.monotonic() - begin
        left = timeout.total_seconds() - elapsed
        attempt = min(max(_SHORTEST_ATTEMPT, elapsed / 4), left)
        try:
            store = create(**{**kwargs, "timeout": timedelta(seconds=max(attempt, 0.01))})
        except RuntimeError:
            if attempt >= left:
                raise
            time.sleep(_PAUSE)
        else:
            store.set_timeout(timeout)
            return store

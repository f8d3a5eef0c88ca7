"""Waiting for a condition with a deadline, and saying what was seen when it passes."""

import time
from collections.abc import Callable

from .errors import ClusterError


def until(what: str, look: Callable[[], str | None], timeout: float, interval: float = 0.1) -> None:
    """Calls `look` until it returns None (satisfied); it returns what is still amiss otherwise.

    Raises ClusterError naming `what` and the last thing seen after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while (seen := look()) is not None:
        if time.monotonic() >= deadline:
            raise ClusterError(f"{what}: not within {timeout:g} s; last seen: {seen}")
        time.sleep(interval)

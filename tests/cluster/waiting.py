"""Wait for a condition, with a deadline."""

import time
from collections.abc import Callable

from .errors import ClusterError


def until(what: str, check: Callable[[], str | None], timeout: float, interval: float = 0.1) -> None:
    """Call `check` until it returns None (satisfied) and not a problem.

    After `timeout` seconds raise ClusterError, which names `what` and the last problem.
    """
    deadline = time.monotonic() + timeout
    while (problem := check()) is not None:
        if time.monotonic() >= deadline:
            raise ClusterError(f"{what}: not ready within {timeout:g} s; last problem: {problem}")
        time.sleep(interval)

"""Wait for code in C that may never return, such as a wait for a device."""

from __future__ import annotations

import threading
from collections.abc import Callable


def run_within(seconds: float | None, function: Callable[[], object], what: str) -> None:
    """Call a function in a thread of its own, and raise what it raises. None: no limit, in this thread.

    TimeoutError, with `what` in its text: it has not returned in time. Its thread goes on.
    """
    if seconds is None:
        function()
        return
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name="time-limit")
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"{what} within {seconds:g} s")
    if errors:
        raise errors[0]

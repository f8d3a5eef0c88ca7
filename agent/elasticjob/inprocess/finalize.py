"""Hook after an interruption: release what the function left behind."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from elasticjob.inprocess.state import State


class Finalize(ABC):
    """Called on each rank after the abort, once its function has ended. An `Exception` ends the rank."""

    @abstractmethod
    def __call__(self, state: State, exception: Exception | None) -> object:
        """Clean up. `exception` is what the function raised on this rank; None if another rank failed."""


class ThreadedFinalize(Finalize):
    """Calls a function in a thread and fails if it does not return in time."""

    def __init__(
        self,
        timeout: timedelta,
        fn: Callable[..., object],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._timeout = timeout
        self._function = fn
        self._args = tuple(args)
        self._kwargs = dict(kwargs or {})

    def __call__(self, state: State, exception: Exception | None) -> None:
        errors: list[BaseException] = []
        thread = threading.Thread(target=self._run, args=(errors,), daemon=True, name="finalize")
        thread.start()
        thread.join(self._timeout.total_seconds())
        if thread.is_alive():
            raise TimeoutError(f"finalize {self._function!r} did not return within {self._timeout}")
        if errors:
            raise errors[0]

    def _run(self, errors: list[BaseException]) -> None:
        try:
            self._function(*self._args, **self._kwargs)
        except BaseException as error:
            errors.append(error)

"""Calls in threads for which neither the event loop nor the process waits at its end."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

_Call = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class DaemonExecutor(ThreadPoolExecutor):
    """An executor for calls that may hang, such as the look-up of a name: its threads do not hold up the process.

    asyncio.run joins the threads of its usual executor, and Python joins the threads of every ThreadPoolExecutor before
    it ends. asyncio accepts no other class. So this is a ThreadPoolExecutor that never starts the threads of its class.
    """

    def __init__(self, threads: int = 16) -> None:
        """`threads`: how many calls run at a time; the others wait."""
        super().__init__(max_workers=threads)
        self._threads_left = threads
        self._calls = deque[_Call]()
        self._guard = threading.Lock()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        with self._guard:
            self._calls.append((future, fn, args, kwargs))
            if self._threads_left:
                # If no thread can be started, a busy thread takes the call later, or the next call tries again.
                threading.Thread(target=self._work, name="elasticjob-call", daemon=True).start()
                self._threads_left -= 1
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Do nothing: the threads end with their calls, or with the process."""

    def _work(self) -> None:
        while True:
            with self._guard:
                if not self._calls:
                    self._threads_left += 1
                    return
                future, function, args, kwargs = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)


def run_without_joining(main: Coroutine[Any, Any, T]) -> T:
    """Do what asyncio.run does, without a wait for threads that still run calls, such as look-ups of names."""
    return asyncio.run(with_daemon_threads(main))


async def with_daemon_threads(main: Coroutine[Any, Any, T]) -> T:
    """Await `main` in an event loop that does not wait for its threads at its end."""
    asyncio.get_running_loop().set_default_executor(DaemonExecutor())
    return await main

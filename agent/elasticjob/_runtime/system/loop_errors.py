"""What happens to an error that nothing handles, in a callback of the event loop, in a task or in a thread.

asyncio only logs such an error and continues, although the callback has done just a part of its work. For instance, a
timer that was not set again never fires, and the job would wait for ever. So the error ends its process: the job
survives the loss of a process.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


def call_on_error(loop: asyncio.AbstractEventLoop, end: Callable[[BaseException], None]) -> None:
    """Log each error that nothing handles in this event loop, with its traceback, and call `end` with it.

    `end` is not called for an error of a single connection, which asyncio then closes. It is not called either if a
    server has no descriptor left to accept a connection, because asyncio tries again.
    """

    def handle(_: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        error = context.get("exception")
        log.error("%s", context["message"], exc_info=error)
        if error is not None and "transport" not in context and "socket" not in context:
            end(error)

    loop.set_exception_handler(handle)


@contextmanager
def call_on_thread_error(loop: asyncio.AbstractEventLoop, end: Callable[[BaseException], None]) -> Iterator[None]:
    """Log each error that ends a thread of this process in this context, and call `end` with it in the event loop."""

    def handle(hook: threading.ExceptHookArgs) -> None:
        error, name = hook.exc_value, hook.thread.name if hook.thread else "a thread"
        if error is not None and hook.exc_type is not SystemExit:
            log.error("Exception in thread %s", name, exc_info=error)
            with suppress(RuntimeError):  # the event loop is closed: the process ends
                loop.call_soon_threadsafe(end, error)

    before, threading.excepthook = threading.excepthook, handle
    try:
        yield
    finally:
        threading.excepthook = before


def background_task(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a task that no caller awaits. If it raises an error, the event loop handles that error at once.

    The error of any other task reaches the event loop only when the task is garbage-collected.
    """
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(_raise_error)
    return task


def _raise_error(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error

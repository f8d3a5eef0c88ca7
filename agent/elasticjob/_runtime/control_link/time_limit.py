"""A time limit for a connection that is being opened."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def open_within(seconds: float, opening: Coroutine[Any, Any, T], close: Callable[[T], object]) -> T:
    """Return what `opening` returns. asyncio.TimeoutError: it took longer.

    `close` closes a connection that was opened after the caller had stopped waiting.

    `asyncio.wait_for` loses a cancellation that comes as the inner task ends, before Python 3.12. If one such call
    is inside another, this can wait for ever: the outer one cancels the inner one, which has no time limit left, loses
    the cancellation, and waits for a peer that does not answer.
    """
    task = asyncio.ensure_future(opening)
    try:
        await asyncio.wait([task], timeout=seconds)
    except asyncio.CancelledError:
        _abandon(task, close)
        raise
    if task.done():
        return task.result()
    _abandon(task, close)
    raise asyncio.TimeoutError


def _abandon(task: asyncio.Task[T], close: Callable[[T], object]) -> None:
    def ended(task: asyncio.Task[T]) -> None:
        if not task.cancelled() and task.exception() is None:
            close(task.result())

    task.cancel()
    task.add_done_callback(ended)

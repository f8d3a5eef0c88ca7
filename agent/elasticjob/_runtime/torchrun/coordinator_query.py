"""Ask the coordinator one question without joining the rendezvous. This module does not import torch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from elasticjob._runtime.contract.messages import Close, Closed, QueryClosed, Standby
from elasticjob._runtime.control_link.coordinator_client import FIRST_BACKOFF, MAX_BACKOFF, NoCoordinatorError
from elasticjob._runtime.control_link.link import ControlLink, LinkError
from elasticjob._runtime.system.daemon_threads import DaemonExecutor, run_without_joining

Dial = Callable[[], Awaitable[ControlLink]]


class NoAnswerError(Exception):
    """The coordinator did not answer in time."""


def ask_coordinator(
    dial: Dial, message: Close | QueryClosed, *, connect_timeout: float, answer_timeout: float
) -> Closed | Standby:
    """Send one message without joining the rendezvous, and return the answer. Times in seconds.

    NoCoordinatorError: no store accepted a link within `connect_timeout`. NoAnswerError: it did not answer.
    """
    # In a thread of its own, because the caller's thread may run an event loop.
    query = _ask(dial, message, connect_timeout, answer_timeout)
    answer: Closed | Standby = DaemonExecutor().submit(run_without_joining, query).result()
    return answer


async def _ask(
    dial: Dial, message: Close | QueryClosed, connect_timeout: float, answer_timeout: float
) -> Closed | Standby:
    give_up, backoff, problem = time.monotonic() + connect_timeout, FIRST_BACKOFF, ""
    while True:
        try:
            link = await asyncio.wait_for(dial(), give_up - time.monotonic())
            return await _answer(link, message, answer_timeout)
        except (OSError, LinkError, asyncio.TimeoutError) as error:
            # The time-out cuts the last attempt short. The error of an earlier attempt may say more.
            if not problem or not isinstance(error, asyncio.TimeoutError):
                problem = str(error) or type(error).__name__
            if time.monotonic() + backoff >= give_up:
                raise NoCoordinatorError(problem) from error
        await asyncio.sleep(backoff)
        backoff = min(2 * backoff, MAX_BACKOFF)


async def _answer(link: ControlLink, message: Close | QueryClosed, timeout: float) -> Closed | Standby:
    try:
        link.send(message)
        answer = await asyncio.wait_for(link.receive(), timeout)
    except asyncio.TimeoutError:
        raise NoAnswerError from None
    finally:
        link.close()
        await asyncio.sleep(0)  # the closed link flushes its buffers
    if isinstance(answer, (Closed, Standby)):
        return answer
    raise LinkError("the store closed the connection" if answer is None else "the store sent another message")

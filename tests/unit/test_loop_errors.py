"""Errors that nothing handles, in an event loop and in threads."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from elasticjob._runtime.system.loop_errors import background_task, call_on_error, call_on_thread_error


class Server(asyncio.Protocol):
    """Fails at the first data of a connection."""

    def data_received(self, data: bytes) -> None:
        raise ValueError("this peer sent nonsense")


async def first_error(cause: object) -> BaseException:
    """Return the error with which the event loop ends after `cause` was called in it."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[BaseException] = loop.create_future()
    call_on_error(loop, ended.set_result)
    cause()  # type: ignore[operator]
    return await asyncio.wait_for(ended, 20)


def fail() -> None:
    raise ValueError("broken")


async def fail_later() -> None:
    raise ValueError("broken")


async def test_an_error_in_a_callback_or_in_a_task_for_which_no_caller_waits_ends_the_loop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = asyncio.get_running_loop()
    for cause in (
        lambda: loop.call_soon(fail),
        lambda: loop.call_later(0, fail),
        lambda: background_task(fail_later()),
    ):
        caplog.clear()
        assert str(await first_error(cause)) == "broken"
        assert [bool(record.exc_info) for record in caplog.records] == [True]


async def test_an_error_in_a_thread_ends_the_loop() -> None:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[BaseException] = loop.create_future()
    before = threading.excepthook
    with call_on_thread_error(loop, ended.set_result):
        threading.Thread(target=fail).start()
        assert str(await asyncio.wait_for(ended, 20)) == "broken"
    assert threading.excepthook is before


async def test_an_error_over_what_a_peer_sent_closes_its_connection_only(caplog: pytest.LogCaptureFixture) -> None:
    loop, errors = asyncio.get_running_loop(), list[BaseException]()
    call_on_error(loop, errors.append)
    server = await loop.create_server(Server, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"x")
    with caplog.at_level(logging.ERROR):
        assert await asyncio.wait_for(reader.read(), 20) == b""
    assert not errors
    assert "this peer sent nonsense" in caplog.text
    writer.close()
    server.close()

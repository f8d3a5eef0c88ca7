"""The event loop of a store: its turns stay short, and each connection gets one."""

from __future__ import annotations

import asyncio
import selectors
import socket
from collections.abc import Iterator

import pytest

from elasticjob._runtime.store_pod import event_loop
from elasticjob._runtime.store_pod.event_loop import READY_AT_ONCE, TurnSelector

MANY = READY_AT_ONCE * 5 // 4


@pytest.fixture
def readable() -> Iterator[list[socket.socket]]:
    """Sockets that all have a byte to read, more of them than are served in one turn."""
    pairs = [socket.socketpair() for _ in range(MANY)]
    for _, other in pairs:
        other.send(b"x")
    yield [one for one, _ in pairs]
    for pair in pairs:
        for sock in pair:
            sock.close()


def test_a_turn_serves_some_connections_and_the_next_ones_the_others(readable: list[socket.socket]) -> None:
    turns, left = [], {sock.fileno(): sock for sock in readable}
    with TurnSelector() as selector:
        for sock in readable:
            selector.register(sock, selectors.EVENT_READ)
        while left:
            ready = [key.fd for key, _ in selector.select(10)]
            turns.append(len(ready))
            assert [left.pop(fd).recv(1) for fd in ready] == [b"x"] * len(ready)
        assert selector.select(0) == []
    assert turns == [READY_AT_ONCE, MANY - READY_AT_ONCE]


def test_connections_that_always_have_something_to_read_do_not_keep_others_waiting(
    readable: list[socket.socket],
) -> None:
    served: set[object] = set()
    with TurnSelector() as selector:
        for sock in readable:
            selector.register(sock, selectors.EVENT_READ)
        for _ in range(100):  # nothing is read; a turn leaves out a given one with a probability of a fifth
            served |= {key.fileobj for key, _ in selector.select(10)}
    assert served == set(readable)


def test_a_program_runs_in_the_event_loop_and_its_result_is_returned() -> None:
    async def main() -> str:
        await asyncio.sleep(0)
        return type(asyncio.get_running_loop()).__name__

    assert "EventLoop" in event_loop.run_in_turns(main())

"""How several connections share a budget of bytes that have arrived and were not received."""

from __future__ import annotations

import asyncio
import struct
import time
from typing import cast

import pytest

from elasticjob._runtime.control_link import frames as frames_module
from elasticjob._runtime.control_link.frames import ForgedFrame, FrameProtocol, ReceiveBudget

LIMIT = 1_000_000
KEY = b"k" * 32


class Transport:
    """A transport whose peer is the test."""

    def __init__(self) -> None:
        self.closed = False

    def abort(self) -> None:
        self.closed = True

    close = abort

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def connection(budget: ReceiveBudget, group: str = "a") -> FrameProtocol:
    """Return one after its handshake."""
    frames = FrameProtocol()
    frames.connection_made(Transport())  # type: ignore[arg-type]
    frames.limit = LIMIT
    frames.protect("hmac-sha256", send_key=KEY, receive_key=KEY)
    frames.share(budget, group)
    return frames


def is_closed(frames: FrameProtocol) -> bool:
    return cast("Transport", frames.transport).closed


def frame(size: int) -> bytes:
    """Return so many bytes of one frame, whose tag is wrong."""
    return struct.pack("!I", size - 4) + b"x" * (size - 4)


async def test_a_connection_that_is_closed_while_frames_wait_leaves_the_budget() -> None:
    budget = ReceiveBudget(LIMIT)
    for _ in range(3):
        frames = connection(budget)
        frames.data_received(frame(200_000) + frame(300_000)[:-1])
        assert budget.total == 499_999
        frames.close()
        assert budget.total == 0
        assert await frames.receive() is None
        frames.connection_lost(None)
        assert budget.total == 0


async def test_what_a_peer_sent_before_it_closed_counts_until_it_is_received_or_dropped() -> None:
    budget = ReceiveBudget(LIMIT)
    frames = connection(budget)
    frames.data_received(frame(200_000) + frame(300_000)[:-1])
    frames.connection_lost(None)
    assert budget.total == 200_000
    assert frames.waiting
    frames.close()
    assert budget.total == 0


async def test_what_follows_a_forged_frame_does_not_count() -> None:
    budget = ReceiveBudget(LIMIT)
    frames = connection(budget)
    frames.data_received(frame(100) + frame(200_000) + frame(300_000)[:-1])
    with pytest.raises(ForgedFrame):
        await frames.receive()
    assert budget.total == 0
    assert is_closed(frames)


async def test_the_group_that_holds_most_loses_a_connection_though_each_of_its_own_holds_little() -> None:
    budget = ReceiveBudget(10 * LIMIT)
    greedy = [connection(budget, "greedy") for _ in range(200)]
    for frames in greedy[:190]:
        frames.data_received(frame(LIMIT)[:50_000])
    honest = [connection(budget, f"honest {number}") for number in range(3)]
    for frames in honest:
        frames.data_received(frame(300_000))
    for frames in greedy[190:]:
        frames.data_received(frame(LIMIT)[:50_000])
    assert [is_closed(frames) for frames in honest] == [False] * 3
    closed = [frames for frames in greedy if is_closed(frames)]
    assert budget.total == 900_000 + (200 - len(closed)) * 50_000 <= budget.limit
    assert "50000 bytes from it wait, 9500000 bytes with others of greedy" in str(closed[0].error)


async def test_the_largest_connection_of_its_group_is_closed() -> None:
    budget = ReceiveBudget(LIMIT)
    small, large, other = connection(budget), connection(budget), connection(budget, "b")
    other.data_received(frame(450_000))
    small.data_received(frame(200_000))
    large.data_received(frame(300_000))
    large.data_received(frame(100_000))
    assert [is_closed(frames) for frames in (small, large, other)] == [False, True, False]


async def test_a_connection_whose_partial_frame_makes_no_progress_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames_module, "STALL_SECONDS", 0.5)
    budget = ReceiveBudget(10 * LIMIT)
    arrives, whole, unread = (connection(budget) for _ in range(3))
    whole.data_received(frame(200_000))
    unread.data_received(frame(600_000) * 2 + frame(600_000)[:-1])  # reading pauses: it cannot make progress
    arrives.data_received(frame(LIMIT)[:10])
    stalled = connection(budget)
    stalled.data_received(frame(200_000) + frame(300_000)[:-1])
    deadline = time.monotonic() + 20
    while not is_closed(stalled):
        assert time.monotonic() < deadline
        arrives.data_received(b"x")
        await asyncio.sleep(0.001)
    assert [is_closed(frames) for frames in (arrives, whole, unread)] == [False] * 3
    assert "299999 bytes of a frame have arrived, and no more within 0.5 s" in str(stalled.error)
    for frames in (arrives, whole, unread, stalled):
        frames.close()
        frames.connection_lost(None)
    assert budget.total == 0

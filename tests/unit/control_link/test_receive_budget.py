"""How several connections share a budget of bytes that have arrived and were not received."""

from __future__ import annotations

import struct
from typing import cast

import pytest

from elasticjob.control_link.frames import ForgedFrame, FrameProtocol, ReceiveBudget

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


def connection(budget: ReceiveBudget) -> FrameProtocol:
    """Return one after its handshake."""
    frames = FrameProtocol()
    frames.connection_made(Transport())  # type: ignore[arg-type]
    frames.limit = LIMIT
    frames.protect("hmac-sha256", send_key=KEY, receive_key=KEY)
    frames.share(budget)
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

"""How long an answer of a peer counts, and how old it is."""

from __future__ import annotations

import socket
import time

import pytest

from elasticjob._runtime.system.sockets.keep_alive import KeepAlive, seconds_since_answer


@pytest.mark.parametrize(
    ("interval", "attempts", "timeout", "trust"),
    [(1, 3, 3, 1.75), (1, 1, 3, 1.75), (0.2, 2, 3, 1.75), (5, 3, 15, 8.75), (2, 10, 20, 17.5)],
)
def test_an_answer_counts_for_less_than_the_peer_may_take_to_close_the_link(
    interval: float, attempts: int, timeout: int, trust: float
) -> None:
    """The peer's own last answer is an interval old at most when the network parts."""
    keep_alive = KeepAlive(interval, attempts)
    assert (keep_alive.timeout, keep_alive.trusted_seconds) == (timeout, trust)
    seconds = max(1, interval)
    assert seconds < keep_alive.trusted_seconds - keep_alive.resend_window, "an answer to a probe is as old"
    assert keep_alive.trusted_seconds < timeout - seconds
    with socket.socket() as sock:
        keep_alive.apply(sock)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * timeout


def test_data_and_acknowledgements_are_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        peer, _ = server.accept()
        with peer:
            connected = time.monotonic()
            for side in (client, peer):
                while (old := seconds_since_answer(side)) < 0.3:
                    time.sleep(0.01)
                assert old < time.monotonic() - connected + 0.02  # the kernel counts in ticks of up to 10 ms
            client.send(b"x")
            for side in (client, peer):  # the acknowledgement may be delayed
                while seconds_since_answer(side) >= 0.3:
                    time.sleep(0.01)

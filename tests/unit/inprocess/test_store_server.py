"""The port of the wrapper's store."""

from __future__ import annotations

import socket
import time

import pytest

from elasticjob.inprocess._stores import store_server


def test_the_port_of_a_job_that_has_just_ended_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    last = socket.create_server(("0.0.0.0", 0))
    port = last.getsockname()[1]
    monkeypatch.setattr(time, "sleep", lambda _: last.close())
    with store_server.listen(port) as listener:
        assert listener.getsockname()[1] == port


def test_a_port_that_stays_in_use_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_server, "BIND_TIMEOUT", 0.05)
    with socket.create_server(("0.0.0.0", 0)) as other, pytest.raises(OSError, match="in use"):
        store_server.listen(other.getsockname()[1])

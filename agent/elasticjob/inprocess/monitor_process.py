"""The rank's side of its monitor process."""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from elasticjob._runtime.system.code_root import python_command

_END_TIMEOUT = 5.0
"""Seconds that the monitor process has to end; it may wait for the store's answer."""


@dataclass(frozen=True)
class MonitorConfig:
    """What a monitor process knows from its start. Times in seconds."""

    initial_rank: int
    initial_world_size: int
    pid: int
    """Process id of the rank."""
    interval: float
    heartbeat_interval: float
    heartbeat_timeout: float
    hard_timeout: float
    termination_grace_time: float
    connect_timeout: float
    log_file: str | None


class MonitorProcess:
    """A process that notices the end of this one, and records it in the store.

    It is a new program and no fork: a fork of a process with threads may have locks that no thread releases.
    """

    def __init__(self, config: MonitorConfig) -> None:
        self._channel, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self._process = subprocess.Popen(
                python_command(
                    "elasticjob.inprocess._monitors.monitor_main", str(other.fileno()), json.dumps(asdict(config))
                ),
                stdin=subprocess.DEVNULL,
                pass_fds=(other.fileno(),),
                start_new_session=True,  # the rank's signals and its terminal's are for the rank
            )
        self.pid = self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the monitor process has not ended."""
        try:
            return bool(self._channel.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def can_create_store(
        self, endpoint: tuple[str, int] | None, factory: bytes, prefix: str, *, knows_lost_clients: bool
    ) -> None:
        """Let the monitor process connect to the store, at an endpoint or with a pickled (factory, arguments)."""
        pickled = base64.b64encode(factory).decode()
        store = {"endpoint": endpoint, "factory": pickled, "path": sys.path, "knows_lost_clients": knows_lost_clients}
        self._send(store=store, prefix=prefix)

    def start_iteration(self, rank: int, world_size: int, iteration: int) -> None:
        """Send the rank's place in an iteration, before the rank takes it."""
        self._send(iteration=[rank, world_size, iteration])

    def report_progress(self) -> None:
        """Report progress in any thread. It never waits: a monitor process that does not read gets the next one."""
        with suppress(OSError):
            self._channel.send(b'{"progress": true}', socket.MSG_DONTWAIT)

    def shutdown(self) -> None:
        """End the monitor process: this process may end now without a record."""
        self._send(close=True)
        self._channel.close()
        try:
            self._process.wait(_END_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, **message: Any) -> None:
        with suppress(OSError):  # it has ended: the monitor thread notices that
            self._channel.send(json.dumps(message).encode())


def monitor_config(
    initial_rank: int,
    initial_world_size: int,
    *,
    interval: timedelta,
    heartbeat_interval: timedelta,
    heartbeat_timeout: timedelta,
    hard_timeout: timedelta,
    termination_grace_time: timedelta,
    connect_timeout: timedelta,
    log_file: str | None,
) -> MonitorConfig:
    """Return the configuration of the monitor process of this process."""
    return MonitorConfig(
        initial_rank,
        initial_world_size,
        os.getpid(),
        interval.total_seconds(),
        heartbeat_interval.total_seconds(),
        heartbeat_timeout.total_seconds(),
        hard_timeout.total_seconds(),
        termination_grace_time.total_seconds(),
        connect_timeout.total_seconds(),
        log_file and log_file.format(rank=initial_rank),
    )

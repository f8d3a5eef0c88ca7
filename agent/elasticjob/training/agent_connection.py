"""The connection of a training process to its agent in one round: a page of shared memory, and a socket.

The environment names the agent's socket, so the connection does not depend on how the process was started.
"""

from __future__ import annotations

import json
import operator
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import SupportsFloat, SupportsIndex

from elasticjob._runtime.contract.names import Env
from elasticjob._runtime.contract.shared_memory.progress_page import MAX_TEXT, PageWord, open_page, write_text

_TIMEOUT = 5.0
"""Seconds that a connection waits for a busy agent."""
_MAX_DESCRIPTORS = 16
_PUBLISH_NANOSECONDS = 1_000_000_000
"""How often the values of metrics are read: reading one from a GPU waits for its queued work."""
NEVER = 1 << 63


@dataclass(eq=False)
class AgentConnection:
    """What this process shares with its agent until the end of the round."""

    words: memoryview
    """The page in which the process writes its progress and reads the agent's limits, by `PageWord`."""
    socket: socket.socket
    """The agent sends a byte on it when a held process may read the limit again, and closes it when it ends."""
    publish_at: int = NEVER
    """When `publish_metrics` is due, as PageWord.TIME. NEVER, unless this process is rank 0."""

    def publish_metrics(
        self, step: int, now: int, total: SupportsIndex | None, metrics: Mapping[str, SupportsFloat]
    ) -> None:
        """Write `total` and `metrics` for the agent, if this process is rank 0."""
        if self.publish_at == NEVER:
            return
        self.publish_at = now + _PUBLISH_NANOSECONDS
        values = {name: _number(name, value) for name, value in metrics.items()}
        text = json.dumps({"total": total if total is None else _whole_number(total), "metrics": values}).encode()
        if len(text) > MAX_TEXT:
            raise ValueError(
                f"the metrics need {len(text)} bytes as JSON, at most {MAX_TEXT} are possible: report fewer"
            )
        if self.words[PageWord.TEXT_VERSION] == 0:
            self.words[PageWord.FIRST_STEP], self.words[PageWord.FIRST_TIME] = step, now
        write_text(self.words, text)

    def wait_for_limit(self) -> bool:
        """Wait until the agent may have set another last step; False: the agent has ended."""
        return bool(self.socket.recv(1))


def connect_to_agent() -> tuple[AgentConnection, tuple[int, ...]] | None:
    """Connect to the agent in the environment, for the round in the environment.

    Returns:
        The connection, and the descriptors of the memory that the agent keeps for its pod across rounds: the caller
        closes them. None without an agent, or if the environment is of another round.
    """
    path, round_id, local_rank = (os.environ.get(n, "") for n in (Env.AGENT_SOCKET, Env.ROUND, "LOCAL_RANK"))
    if not path:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_TIMEOUT)
        connection.connect(path)
        connection.sendall(json.dumps({"local_rank": int(local_rank), "round": round_id}).encode() + b"\n")
        _, descriptors, _, _ = socket.recv_fds(connection, 1, _MAX_DESCRIPTORS)
        if descriptors:
            connection.settimeout(None)
            page, *memory = descriptors
            words = open_page(page)
            os.close(page)
            publish_at = 0 if os.environ.get("RANK") == "0" else NEVER
            return AgentConnection(words, connection, publish_at), tuple(memory)
    except (OSError, ValueError):
        pass  # the environment is of another round, or the agent has ended
    connection.close()
    return None


def send_received(size: int, seconds: float, interface: str) -> None:
    """Send that this rank has received a state of `size` bytes, over a connection of its own; nothing without an agent.

    `interface`: the network interface that it came through; empty if unknown.
    """
    received = {"size": size, "seconds": seconds, "interface": interface, "rank": int(os.environ.get("RANK", "0"))}
    with suppress(OSError, KeyError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_TIMEOUT)
        connection.connect(os.environ[Env.AGENT_SOCKET])
        connection.sendall(json.dumps({"received": received, "round": os.environ[Env.ROUND]}).encode() + b"\n")


def _whole_number(total: SupportsIndex) -> int:
    try:
        return operator.index(total)
    except TypeError:
        raise TypeError(f"total is {total!r}: use a whole number of steps, or leave it out") from None


def _number(name: str, value: SupportsFloat) -> str:
    try:
        return f"{float(value):.6g}"
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"the metric {name!r} is no number: {error}; use a number or a tensor of one element") from None

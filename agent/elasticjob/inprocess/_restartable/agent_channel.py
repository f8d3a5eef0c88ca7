"""The worker's end of the socket on which its agent interrupts the function and has it called again."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

from elasticjob._runtime.contract import restart_messages
from elasticjob._runtime.contract.names import Env
from elasticjob._runtime.contract.restart_messages import MAX_MESSAGE, AgentToWorker, WorkerToAgent


class AgentChannel:
    """A connection to the agent."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    @classmethod
    def open(cls) -> AgentChannel | None:
        """Connect to the agent; None without an agent."""
        path = os.environ.get(Env.RESTART_SOCKET)
        if not path:
            return None
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(path)
        except OSError:  # the environment is a stranger's, or the agent has ended
            connection.close()
            return None
        return cls(connection)

    def send(self, message: WorkerToAgent) -> None:
        """Send a message. An agent that has ended gets none: this process ends with it."""
        try:
            self._connection.send(restart_messages.to_packet(message))
        except OSError:
            return

    def receive(self) -> AgentToWorker | None:
        """Wait for a message; None: the agent has ended, or has refused this process, or `close` was called."""
        try:
            packet = self._connection.recv(MAX_MESSAGE)
        except OSError:
            return None
        if not packet:
            return None
        message: AgentToWorker = restart_messages.from_packet(packet)
        return message

    def close(self) -> None:
        """End the connection, also for a thread that waits in `receive`."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

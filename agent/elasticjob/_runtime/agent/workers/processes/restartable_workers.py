"""The agent's side of `contract.restart_messages`: the workers whose function can be called again."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from elasticjob._runtime.agent.processes import peer_pid
from elasticjob._runtime.contract import restart_messages
from elasticjob._runtime.contract.codec import MessageError
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.contract.restart_messages import (
    MAX_MESSAGE,
    AgentToWorker,
    BreakCollectives,
    CallAgain,
    Calling,
    CollectiveFailed,
    End,
    Guarded,
    Interrupt,
    Interrupted,
    Kept,
    Parked,
    Raised,
    ResultsEnded,
)

log = logging.getLogger(__name__)


Reported: TypeAlias = Calling | Guarded | CollectiveFailed | ResultsEnded | Raised | Parked | Kept | None


@dataclass
class _Peer:
    """A connected worker."""

    connection: socket.socket
    round: RoundId | None = None
    """The round in which its function runs or ran last; None before it says so."""
    spare_process: bool = False
    """As in `Calling`."""
    interrupted: bool = False
    """Whether it has left its function."""
    results_ended: bool = False
    """Whether it counts no step any more, and waits for `BreakCollectives`."""
    guarded: Guarded | None = None
    """The time-outs of its process groups, as it has reported them last."""
    failed: CollectiveFailed | None = None
    """The first collective that torch has found to fail."""
    raised: Raised | None = None
    """What its function raised."""
    parked: Parked | None = None
    """Set while its function does not run."""
    copying_state: bool = False
    """Whether it copies its state, because no round follows for it."""


class RestartableWorkers:
    """The connections of workers, by process id."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "restart.sock")
        """The Unix socket to which workers connect."""
        self.on_message: Callable[[int, Reported], None] = lambda _pid, _message: None
        """Called with the process id when a worker calls its function, and when that has failed or has ended; None: the
        worker disconnected, and can only be stopped by a signal from now on."""
        self._peers: dict[int, _Peer] = {}
        self._allowed: set[int] | None = None
        """The processes that may connect; None while workers start, before their ids are known."""
        self._loop = asyncio.get_running_loop()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(self.path)
        self._listener.listen(64)
        self._loop.add_reader(self._listener, self._accept)

    def allow(self, pids: set[int] | None) -> None:
        """Refuse processes other than these, such as a program that a worker's shell has started; None: refuse none."""
        self._allowed = pids
        for pid in tuple(self._peers):
            if pids is not None and pid not in pids:
                self._disconnect(pid)

    def repeat(self, pid: int) -> None:
        """Call `on_message` again for what a worker has sent: its process id was not known before."""
        if peer := self._peers.get(pid):
            if peer.round is not None:
                self.on_message(pid, Calling(peer.round, peer.spare_process))
            for message in (peer.guarded, peer.failed, peer.raised, peer.parked):
                if message is not None:
                    self.on_message(pid, message)

    def parked(self, pid: int) -> Parked | None:
        """Return how the function of a worker has ended, if it waits for the next round; else None."""
        peer = self._peers.get(pid)
        return peer.parked if peer else None

    def interrupted(self, pid: int) -> bool:
        """Return whether a worker has left its function because it was interrupted."""
        peer = self._peers.get(pid)
        return peer is not None and peer.interrupted

    def results_ended(self, pid: int) -> bool:
        """Return whether a worker counts no step any more, and waits for `break_collectives`."""
        peer = self._peers.get(pid)
        return peer is not None and peer.results_ended

    def all_results_ended(self, pids: Iterable[int]) -> bool:
        """Return whether some of these interrupted workers wait for `break_collectives`, and no other counts a step."""
        waiting = [pid for pid in pids if self.parked(pid) is None]
        return bool(waiting) and all(map(self.results_ended, waiting))

    def break_collectives(self, pid: int) -> None:
        """Let a worker that waits with it break its collectives."""
        peer = self._peers.get(pid)
        if peer is not None and peer.results_ended and peer.round is not None:
            self._send(pid, BreakCollectives(peer.round))

    def interrupt(self, pid: int) -> bool:
        """Let a worker leave its function; return False if it has to be stopped by a signal."""
        peer = self._peers.get(pid)
        if peer is None or peer.round is None:
            return False
        return peer.parked is not None or self._send(pid, Interrupt(peer.round))

    def call_again(self, pid: int, round_id: RoundId, env: Mapping[str, str]) -> bool:
        """Let a parked worker call its function in a round; return False if it cannot be reached."""
        peer = self._peers.get(pid)
        if peer is None or not self._send(pid, CallAgain(round_id, restart_messages.variables(env))):
            return False
        self._peers[pid] = _Peer(peer.connection, round_id, peer.spare_process)
        return True

    def end(self, pid: int, *, at_once: bool) -> bool:
        """Let a parked worker raise what its function raised, or exit; return False if it is not parked.

        `at_once`: no more of its script runs.
        """
        if self.parked(pid) is None or not self._send(pid, End(at_once)):
            return False
        self._peers[pid].copying_state = True
        return True

    def copying_state(self, pid: int) -> bool:
        """Return whether a worker still copies its state to the memory of the pod before it ends."""
        peer = self._peers.get(pid)
        return peer is not None and peer.copying_state

    def close(self) -> None:
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for pid in tuple(self._peers):
            self._disconnect(pid)

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            pid = peer_pid(connection)
            self._disconnect(pid)
            if self._allowed is not None and pid not in self._allowed:
                connection.close()
                return
            self._peers[pid] = _Peer(connection)
            self._loop.add_reader(connection, self._receive, pid)

    def _receive(self, pid: int) -> None:
        peer = self._peers[pid]
        try:
            packet = peer.connection.recv(MAX_MESSAGE)
            message = restart_messages.from_packet(packet) if packet else None
        except BlockingIOError:
            return
        except (OSError, MessageError) as error:
            log.warning("the connection of worker process %d was closed: %s", pid, error)
            message = None
        match message:
            case Calling(round_id, spare_process):
                self._peers[pid] = _Peer(peer.connection, round_id, spare_process)
                self.on_message(pid, message)
            case Guarded():
                peer.guarded = message
                self.on_message(pid, message)
            case CollectiveFailed():
                peer.failed = peer.failed or message
                self.on_message(pid, message)
            case Interrupted():
                peer.interrupted = True
            case ResultsEnded():
                peer.results_ended = True
                self.on_message(pid, message)
            case Kept():
                peer.copying_state = False
                self.on_message(pid, message)
            case Raised():
                peer.raised = message
                self.on_message(pid, message)
            case Parked():
                peer.parked = message
                self.on_message(pid, message)
            case _:
                self._disconnect(pid)
                self.on_message(pid, None)

    def _send(self, pid: int, message: AgentToWorker) -> bool:
        try:
            self._peers[pid].connection.send(restart_messages.to_packet(message))
        except OSError:
            return False
        return True

    def _disconnect(self, pid: int) -> None:
        if peer := self._peers.pop(pid, None):
            self._loop.remove_reader(peer.connection)
            peer.connection.close()

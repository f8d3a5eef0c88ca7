"""What the agent knows of its workers' steps, and where it lets them stop: the agent's side of `contract.page`.

Workers write their steps into memory that this process reads when it wants to know: nobody is woken by a step.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elasticjob.contract.names import RoundId
from elasticjob.contract.progress_page import HOLD, NO_LIMIT, NO_STEP, PAGE_SIZE, PageWord, open_page

log = logging.getLogger(__name__)

HOLD_TIMEOUT = 3.0
"""Seconds that workers stand still for a last step that nobody names: longer than a coordinator takes to name it."""
SETTLE = 0.001
"""Seconds until a worker on another processor has surely seen a HOLD, or this process the step that it wrote before."""
STATE_BUFFERS = 2
"""Pieces of memory kept for the node: one is whole while the other is written."""
_MAX_HELLO = 1024


@dataclass(frozen=True)
class ProgressReport:
    """One worker's latest report; `time` is this host's CLOCK_MONOTONIC in seconds (time.monotonic)."""

    local_rank: int
    step: int
    time: float
    own_seconds: float = 0.0
    """Seconds so far in which it waited for no other rank; 0 where nobody knows."""


@dataclass
class _Rank:
    """A worker of the current round that has met us."""

    page: int
    words: memoryview
    peer: socket.socket | None = None
    pid: int = 0
    """The process that is the rank: not one that it started, and that has its environment."""


class WorkerProgress:
    """The workers of the current round, as far as they report. `path` is the socket where they meet us."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "agent.sock")
        self.on_worker_connected: Callable[[], None] = lambda: None
        """Called when a worker has come to report here."""
        self.memory = tuple(os.memfd_create(f"elasticjob-{i}", os.MFD_CLOEXEC) for i in range(STATE_BUFFERS))
        self._round: RoundId | None = None
        self._ranks: dict[int, _Rank] = {}
        self._limit = NO_LIMIT
        self._expiry: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._listener.bind(self.path)
        self._listener.listen(64)
        self._loop.add_reader(self._listener, self._accept)

    def begin_round(self, round_id: RoundId) -> None:
        """A new round: its workers have reported nothing yet, and may run."""
        self._forget()
        self._round = round_id
        self._set_limit(NO_LIMIT)

    def reports(self) -> tuple[ProgressReport, ...]:
        """The latest report of every worker of the round that made one, by local rank."""
        found = ((rank, r.words) for rank, r in sorted(self._ranks.items()))
        return tuple(
            ProgressReport(rank, step, words[PageWord.TIME] / 1e9, words[PageWord.OWN] / 1e9)
            for rank, words in found
            if (step := words[PageWord.STEP]) != NO_STEP
        )

    def heartbeats(self) -> tuple[ProgressReport, ...]:
        """The last sign of life of every worker that gave one: its latest report, else its optimizers' last step.

        Whose program is over is no longer asked for signs.
        """
        reported = {report.local_rank: report for report in self.reports()}
        for rank, r in sorted(self._ranks.items()):
            if rank not in reported and (heartbeats := r.words[PageWord.HEARTBEATS]) > 0:
                reported[rank] = ProgressReport(
                    rank, heartbeats, r.words[PageWord.HEARTBEAT_TIME] / 1e9, r.words[PageWord.OWN] / 1e9
                )
        return tuple(sign for rank, sign in reported.items() if not self._ranks[rank].words[PageWord.ENDING])

    def process(self, local_rank: int) -> int | None:
        """The process that is this rank, which may have been started by the worker; None before it has met us."""
        return self._ranks[local_rank].pid or None if local_rank in self._ranks else None

    def stopped(self, local_rank: int) -> bool:
        """Whether this worker said that it stopped at the last step, with everything saved."""
        return local_rank in self._ranks and self._ranks[local_rank].words[PageWord.STOPPED] == 1

    async def hold(self, workers: int) -> int | None:
        """Let no worker pass its next report; the latest step that any of them may have done by then.

        None where not all of the `workers` report: then none is held. The hold ends by itself after HOLD_TIMEOUT.
        """
        self._set_limit(HOLD)
        await asyncio.sleep(SETTLE)
        reports = self.reports()
        if len(reports) < workers:
            self._set_limit(NO_LIMIT)
            return None
        self._expiry = self._loop.call_later(HOLD_TIMEOUT, self._set_limit, NO_LIMIT)
        return max(report.step for report in reports) + 1

    def stop_at(self, step: int) -> bool:
        """Let the workers stop at this step; False where they are no longer held, and may be past it."""
        if self._limit not in (HOLD, step):
            return False
        self._set_limit(step)
        return True

    def release(self) -> None:
        """Let held workers go on: they are told to stop in another way."""
        if self._limit == HOLD:
            self._set_limit(NO_LIMIT)

    def close(self) -> None:
        self._forget()
        self._set_limit(NO_LIMIT)
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for descriptor in self.memory:
            os.close(descriptor)

    def _set_limit(self, limit: int) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        self._limit = limit
        for rank in self._ranks.values():
            rank.words[PageWord.LIMIT] = limit
            if rank.peer is not None:
                with suppress(OSError):
                    rank.peer.send(b"\0")

    def _forget(self) -> None:
        for rank in self._ranks.values():
            self._hang_up(rank)
            os.close(rank.page)
        self._ranks = {}

    # ---- meeting -----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        with suppress(OSError):
            peer, _ = self._listener.accept()
            peer.setblocking(False)
            self._loop.add_reader(peer, self._meet, peer)

    def _meet(self, peer: socket.socket) -> None:
        """The first words of a connection; a worker says them in one write."""
        self._loop.remove_reader(peer)
        try:
            hello = json.loads(peer.recv(_MAX_HELLO))
            local_rank, round_id = int(hello["local_rank"]), RoundId.parse(hello["round"])
            if round_id != self._round:
                raise ValueError(f"round {round_id} is over")
            rank, pid = self._rank(local_rank), _pid(peer)
            if self._taken(rank, pid):
                peer.close()
                return
            socket.send_fds(peer, [b"\0"], [rank.page, *self.memory])
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("a worker's words were not understood: %s", error)
            peer.close()
            return
        rank.peer, rank.pid = peer, pid
        self._loop.add_reader(peer, self._hang_up, rank)
        self.on_worker_connected()

    def _rank(self, local_rank: int) -> _Rank:
        if local_rank not in self._ranks:
            page = os.memfd_create("elasticjob-page", os.MFD_CLOEXEC)
            os.ftruncate(page, PAGE_SIZE)
            words = open_page(page)
            words[PageWord.STEP], words[PageWord.LIMIT] = NO_STEP, self._limit
            self._ranks[local_rank] = _Rank(page, words)
        return self._ranks[local_rank]

    def _taken(self, rank: _Rank, pid: int) -> bool:
        """Whether another living process is this rank."""
        if rank.peer is not None and rank.pid != pid:
            with suppress(BlockingIOError):
                rank.peer.recv(1)
                self._hang_up(rank)
        elif rank.peer is not None:
            self._hang_up(rank)
        return rank.peer is not None

    def _hang_up(self, rank: _Rank) -> None:
        """Workers say nothing more: what can be read is the end."""
        if rank.peer is not None:
            self._loop.remove_reader(rank.peer)
            rank.peer.close()
            rank.peer = None


def _pid(peer: socket.socket) -> int:
    """The process at the other end (SO_PEERCRED)."""
    pid: int = struct.unpack("iII", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    return pid

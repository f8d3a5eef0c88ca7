"""The agent's side of `contract.shared_memory.progress_page`: read the workers' steps, and set the step they stop at.

Workers write their steps into shared memory, which the agent reads when it needs them: a step wakes no process.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticjob._runtime.agent.processes import peer_pid
from elasticjob._runtime.contract import codec
from elasticjob._runtime.contract.messages import Metric, StateReceived, TrainingProgress
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.contract.shared_memory.progress_page import (
    HOLD,
    NO_LIMIT,
    NO_STEP,
    PAGE_SIZE,
    AgentPage,
    PageWord,
    open_agent_page,
    read_text,
)
from elasticjob._runtime.contract.snapshot_format.state_block import ABSENT, HEADER_SIZE, read_header
from elasticjob._runtime.contract.text import printable
from elasticjob._runtime.system.memory_file import fixed_memory_file, memory_file

log = logging.getLogger(__name__)

HOLD_TIMEOUT = 3.0
"""Workers wait at most this many seconds for their last step. A coordinator needs less to send it."""
SETTLE = 0.001
"""Seconds after which a worker on another processor sees HOLD, and this process sees the step that it wrote before."""
STATE_BUFFERS = 3
"""Memory buffers that outlive a round, for `elasticjob.State`: two copies, because one must be complete while the other
is written, and one buffer for what each worker keeps for itself."""
SHARD_BUFFERS = 4
"""Memory buffers of each worker, for `elasticjob.ShardedState`: two for its shard, and two for the copy of another."""
_MAX_HELLO = 1024
"""Bytes."""
_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, OverflowError)
"""Errors that occur when a worker has sent something that our own code does not send."""
_MAX_STEP = NO_LIMIT - 2
"""The highest step: the one after it is below NO_LIMIT."""
MIN_SECONDS = 1e-6
"""A transfer that took less did not go over a network, and its speed would not be a number that the status can have."""
MAX_INTERFACE = 64
"""Characters of an interface's name. Linux allows 15, and InfiniBand devices have up to 64."""


@dataclass(frozen=True)
class ProgressReport:
    """The latest step of one worker, reported by the script or counted by its optimizers."""

    local_rank: int
    step: int
    time: float
    """When the step was done, in seconds of this host's CLOCK_MONOTONIC (time.monotonic)."""
    own_seconds: float = 0.0
    """Seconds so far that the worker spent in its own work, not waiting for other ranks; 0 if not measured."""


@dataclass
class _Rank:
    """A worker of the current round that has connected."""

    page: int
    """Descriptor of its page."""
    words: AgentPage
    peer: socket.socket | None = None
    pid: int = 0
    """The rank's own process. Its child processes have the same environment, and their connections are refused."""


class WorkerProgress:
    """The progress of the current round's workers, as far as they connect and report."""

    def __init__(self, folder: Path, workers: int = 1024) -> None:
        """`workers`: how many local ranks there are; others are refused."""
        self._workers = workers
        self.path = str(folder / "agent.sock")
        """The Unix socket to which workers connect."""
        self.on_worker_connected: Callable[[], None] = lambda: None
        """Called whenever a worker has connected."""
        self.on_state_received: Callable[[StateReceived], None] = lambda _: None
        """Called when a worker of the round has received a state from another rank."""
        self.memory = tuple(memory_file(f"elasticjob-{i}") for i in range(STATE_BUFFERS))
        """Descriptors of the buffers that every worker gets."""
        self._shards: dict[int, tuple[int, ...]] = {}
        """Descriptors of each worker's own buffers, by local rank."""
        self._had_steps = False
        """Whether a worker of any earlier round has reported a step."""
        self._round: RoundId | None = None
        self.ranks: dict[int, _Rank] = {}
        self._prestarted: dict[int, AgentPage] = {}
        """Words of the last page of each prestarted worker, by local rank."""
        self._limit = NO_LIMIT
        self._deadline = NO_LIMIT
        self._expiry: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self.listener.bind(self.path)
        self.listener.listen(64)
        self._loop.add_reader(self.listener, self._accept)

    def begin_round(self, round_id: RoundId) -> None:
        """Forget the workers of the last round. The workers of the new one are not held."""
        self._had_steps = self.has_steps
        self._forget()
        self._round = round_id
        self._set_limit(NO_LIMIT)

    def end_stage(self) -> None:
        """Forget the workers of a launcher that has ended: those of the next one count their steps from the start.

        Between the two no worker can be held at a step.
        """
        self._had_steps = self.has_steps
        self._forget()

    def reports(self) -> tuple[ProgressReport, ...]:
        """Return the last step that each worker of the round has reported, sorted by local rank."""
        found = ((rank, r.words) for rank, r in sorted(self.ranks.items()))
        return tuple(
            ProgressReport(rank, step, words[PageWord.TIME] / 1e9, words[PageWord.OWN] / 1e9)
            for rank, words in found
            if (step := min(words[PageWord.STEP], _MAX_STEP)) != NO_STEP
        )

    def heartbeats(self) -> tuple[ProgressReport, ...]:
        """Return the last step of each worker: the last one reported, else the last one of its optimizers or State.

        Workers without a step, and workers whose script has ended (Python cleans up), are left out.
        """
        reported = {report.local_rank: report for report in self.reports()}
        for rank, r in sorted(self.ranks.items()):
            only_began = r.words[PageWord.STEP] == r.words[PageWord.BEGIN_STEP]
            if only_began and (heartbeats := r.words[PageWord.HEARTBEATS]) > 0:
                step = min(max(0, r.words[PageWord.BEGIN_STEP]) + heartbeats, _MAX_STEP)
                reported[rank] = ProgressReport(
                    rank, step, r.words[PageWord.HEARTBEAT_TIME] / 1e9, r.words[PageWord.OWN] / 1e9
                )
        return tuple(report for rank, report in reported.items() if not self.ranks[rank].words[PageWord.ENDING])

    def made_step(self, local_rank: int) -> bool:
        """Return whether this worker has made a step in this round. A step that `State.sync` reports is none."""
        if local_rank not in self.ranks:
            return False
        words = self.ranks[local_rank].words
        return words[PageWord.STEP] != words[PageWord.BEGIN_STEP] or words[PageWord.HEARTBEATS] > 0

    @property
    def has_steps(self) -> bool:
        """Whether any worker of this pod has ever reported a step. The step that `State.sync` reports counts."""
        words = (rank.words for rank in self.ranks.values())
        return self._had_steps or any(w[PageWord.STEP] != NO_STEP or w[PageWord.HEARTBEATS] > 0 for w in words)

    def began(self, local_rank: int) -> float | None:
        """Return when `State.sync` restored the round's state in this worker, as `ProgressReport.time`; None: never."""
        at = self.ranks[local_rank].words[PageWord.BEGIN_TIME] if local_rank in self.ranks else 0
        return at / 1e9 if at else None

    @property
    def has_copy(self) -> bool:
        """Whether the memory of this pod has a copy of a State, or a shard."""
        return self.has_shard or any(read_header(descriptor) != ABSENT for descriptor in self.memory)

    @property
    def has_shard(self) -> bool:
        """Whether the memory of this pod has a shard of a ShardedState, or the copy of another pod's."""
        return any(read_header(descriptor) != ABSENT for descriptor in self._all_shard_buffers())

    def _all_shard_buffers(self) -> tuple[int, ...]:
        return tuple(descriptor for buffers in self._shards.values() for descriptor in buffers)

    def discard_copies(self) -> None:
        """Forget all copies. Call it when no worker runs any more that could write another one."""
        for descriptor in (*self.memory, *self._all_shard_buffers()):
            os.pwrite(descriptor, bytes(HEADER_SIZE), 0)

    def training(self) -> TrainingProgress | None:
        """Return what rank 0 reports about the training; None if it is in another pod, or reports only its steps."""
        texts = ((r.words, text) for r in self.ranks.values() if (text := read_text(r.words)) is not None)
        words, text = next(texts, (None, b""))
        if words is None or self._round is None:
            return None
        first, step = words[PageWord.FIRST_STEP], words[PageWord.STEP]
        seconds = (words[PageWord.TIME] - words[PageWord.FIRST_TIME]) / 1e9
        try:
            raw = codec.loads(text)
            metrics = tuple(Metric(printable(str(k)), printable(str(v))) for k, v in raw["metrics"].items())
            total = None if raw["total"] is None else min(int(raw["total"]), _MAX_STEP)
        except _MALFORMED:
            return None
        step_seconds = round(seconds / (step - first), 6) if step > first and seconds > 0 else None
        return TrainingProgress(self._round, step, total, step_seconds, metrics)

    def pid(self, local_rank: int) -> int | None:
        """Return the rank's process, which may be a child of the agent's worker process; None before it connects."""
        return self.ranks[local_rank].pid or None if local_rank in self.ranks else None

    def stopped(self, local_rank: int) -> bool:
        """Return whether this worker has stopped at the last step and has run its `on_stop` callbacks."""
        return local_rank in self.ranks and self.ranks[local_rank].words[PageWord.STOPPED] == 1

    async def hold(self, workers: int) -> int | None:
        """Hold all workers at their next report, and return the latest step that any of them may have done by then.

        If fewer than `workers` report their steps, hold none of them and return None. The hold ends after HOLD_TIMEOUT.
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
        """Let held workers continue and stop at this step; return False if they are not held and may be past it."""
        if self._limit not in (HOLD, step):
            return False
        self._set_limit(step)
        return True

    @property
    def stops_at_step(self) -> bool:
        """Whether the workers will stop at a step, which is known already or will be soon."""
        return self._limit != NO_LIMIT

    def set_deadline(self, at: float) -> None:
        """Let the workers know when they must have ended, in seconds of this host's CLOCK_MONOTONIC; inf: never."""
        nanoseconds = at * 1e9
        self._deadline = max(0, int(nanoseconds)) if abs(nanoseconds) < NO_LIMIT else NO_LIMIT if at > 0 else 0
        for words in (*(rank.words for rank in self.ranks.values()), *self._prestarted.values()):
            words[PageWord.DEADLINE] = self._deadline

    def release(self) -> None:
        """Let held workers continue, because the agent stops them by a signal."""
        if self._limit == HOLD:
            self._set_limit(NO_LIMIT)

    def close(self) -> None:
        self._forget()
        self._set_limit(NO_LIMIT)
        self._loop.remove_reader(self.listener)
        self.listener.close()
        for descriptor in (*self.memory, *self._all_shard_buffers()):
            os.close(descriptor)

    def _set_limit(self, limit: int) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        self._limit = limit
        for rank in self.ranks.values():
            rank.words[PageWord.LIMIT] = limit
            if rank.peer is not None:
                with suppress(OSError):
                    rank.peer.send(b"\0")

    def _forget(self) -> None:
        for rank in self.ranks.values():
            self._disconnect(rank)
            os.close(rank.page)
        self.ranks = {}

    # ---- connections -------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        with suppress(OSError):
            peer, _ = self.listener.accept()
            peer.setblocking(False)
            self._loop.add_reader(peer, self.handshake, peer)

    def handshake(self, peer: socket.socket) -> None:
        """Read a worker's hello, which it sends in one write, and send it its page and the memory buffers.

        A worker that has received a state sends that instead, on a connection of its own.
        """
        self._loop.remove_reader(peer)
        try:
            hello = codec.loads(peer.recv(_MAX_HELLO))
            if "received" in hello:
                self._state_received(peer, RoundId.parse(hello["round"]), hello["received"])
                return
            local_rank, round_id = int(hello["local_rank"]), RoundId.parse(hello["round"])
            if not 0 <= local_rank < self._workers:
                raise ValueError(f"there is no local rank {str(local_rank)[:20]}")
            if round_id.is_prestarted:
                self._serve_prestarted(peer, local_rank)
                return
            if round_id != self._round:
                raise ValueError(f"round {round_id} is over")
            rank, pid = self.rank_of(local_rank), peer_pid(peer)
            if self._taken_by_other(rank, pid):
                peer.close()
                return
            socket.send_fds(peer, [b"\0"], [rank.page, *self.memory, *self._shard_buffers(local_rank)])
        except (OSError, *_MALFORMED) as error:
            log.warning("refused a worker's connection for progress reports: %s", error)
            peer.close()
            return
        rank.peer, rank.pid = peer, pid
        self._loop.add_reader(peer, self._disconnect, rank)
        self.on_worker_connected()

    def _state_received(self, peer: socket.socket, round_id: RoundId, received: Mapping[str, Any]) -> None:
        peer.close()
        size, seconds, rank = int(received["size"]), float(received["seconds"]), int(received["rank"])
        plausible = 0 < size < 1 << 63 and MIN_SECONDS <= seconds < math.inf and 0 <= rank < 1 << 31
        if round_id == self._round and plausible:
            interface = printable(str(received["interface"])[:MAX_INTERFACE])
            self.on_state_received(StateReceived(round_id, rank, size, seconds, interface))

    def _serve_prestarted(self, peer: socket.socket, local_rank: int) -> None:
        """Send a prestarted worker the memory buffers, and a page that is never read."""
        page, self._prestarted[local_rank] = self._new_page()
        try:
            socket.send_fds(peer, [b"\0"], [page, *self.memory, *self._shard_buffers(local_rank)])
        finally:
            os.close(page)
            peer.close()

    def _new_page(self) -> tuple[int, AgentPage]:
        """Return descriptor and words of a page for one worker."""
        page = fixed_memory_file("elasticjob-page", PAGE_SIZE)
        words = open_agent_page(page)
        words[PageWord.STEP] = words[PageWord.BEGIN_STEP] = NO_STEP
        words[PageWord.LIMIT] = NO_LIMIT
        words[PageWord.DEADLINE] = self._deadline
        return page, words

    def _shard_buffers(self, local_rank: int) -> tuple[int, ...]:
        if local_rank not in self._shards:
            self._shards[local_rank] = tuple(memory_file(f"elasticjob-shard-{i}") for i in range(SHARD_BUFFERS))
        return self._shards[local_rank]

    def rank_of(self, local_rank: int) -> _Rank:
        if local_rank not in self.ranks:
            page, words = self._new_page()
            words[PageWord.LIMIT] = self._limit
            self.ranks[local_rank] = _Rank(page, words)
        return self.ranks[local_rank]

    def _taken_by_other(self, rank: _Rank, pid: int) -> bool:
        """Return whether another live process is connected as this rank; disconnect an earlier connection otherwise."""
        if rank.peer is not None and rank.pid != pid:
            with suppress(BlockingIOError):
                rank.peer.recv(1)
                self._disconnect(rank)
        elif rank.peer is not None:
            self._disconnect(rank)
        return rank.peer is not None

    def _disconnect(self, rank: _Rank) -> None:
        """Close a worker's connection. A worker sends nothing after its hello, so a readable connection has ended."""
        if rank.peer is not None:
            self._loop.remove_reader(rank.peer)
            rank.peer.close()
            rank.peer = None

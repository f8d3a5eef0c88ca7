"""The monitor process: what it watches and records. It imports the standard library only, for the default store.

It ends with the rank that started it. When that rank ends without notice, it first records this for the other ranks.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import pickle
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

from elasticjob.inprocess._monitors.heartbeats import LossDetector, RunningClock, watched_ranks
from elasticjob.inprocess._stores.lost_rank import record_when_lost
from elasticjob.inprocess._stores.socket_store import SocketStore
from elasticjob.inprocess._stores.store_mixin import StoreMixin
from elasticjob.inprocess.attribution import Interruption, InterruptionRecord
from elasticjob.inprocess.monitor_process import MonitorConfig

log = logging.getLogger("elasticjob.inprocess.monitor")

_MAX_MESSAGE = 1 << 20
_KILL_TIMEOUT = 60.0
"""Seconds until a killed process counts as ended although the kernel still takes it apart."""


def main(arguments: list[str]) -> None:
    """Monitor a rank. Arguments: the descriptor of the channel to it, and the configuration in JSON."""
    config = MonitorConfig(**json.loads(arguments[1]))
    logging.basicConfig(
        filename=config.log_file,
        level=logging.INFO if config.log_file else logging.WARNING,
        format=f"%(asctime)s [monitor of rank {config.initial_rank}] %(message)s",
    )
    with socket.socket(fileno=int(arguments[0])) as channel:
        try:
            Monitor(config, channel, RankProcess(config.pid)).run()
        except (OSError, RuntimeError) as error:
            log.error("the monitor process of rank %d ends: %s", config.initial_rank, error)
            sys.exit(1)


class RankProcess:
    """The process of the rank: the parent of this one."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.descriptor: int | None = None
        """Readable once the process has ended; None if the kernel is too old."""
        with suppress(OSError, AttributeError):
            self.descriptor = os.pidfd_open(pid)

    @property
    def has_ended(self) -> bool:
        if os.getppid() != self._pid:
            return True
        return self.descriptor is not None and bool(select.select([self.descriptor], [], [], 0)[0])

    def send(self, number: signal.Signals) -> None:
        if not self.has_ended:
            with suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def wait(self, timeout: float) -> bool:
        """Wait until the process has ended; return whether it has."""
        deadline = time.monotonic() + timeout
        while not self.has_ended and (left := deadline - time.monotonic()) > 0:
            if self.descriptor is None:
                time.sleep(min(left, 0.05))
            else:
                select.select([self.descriptor], [], [], left)
        return self.has_ended

    def terminate(self, grace_time: float) -> None:
        """End the process, also a stopped one: SIGTERM first, SIGKILL after the grace time."""
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)
        if not self.wait(grace_time):
            self.send(signal.SIGKILL)
            self.wait(_KILL_TIMEOUT)


class Monitor:
    """Watches one rank, and the heartbeats of other ranks' monitors."""

    def __init__(self, config: MonitorConfig, channel: socket.socket, process: RankProcess) -> None:
        self._config = config
        self._channel = channel
        self._process = process
        self._tick = min(config.interval, config.heartbeat_interval)
        self._clock = RunningClock(time.monotonic(), self._tick + 1)
        self._detector = LossDetector(config.heartbeat_timeout)
        self._next_heartbeat = 0.0
        self._store: StoreMixin | None = None
        """The store of the call, once its server runs."""
        self._knows_lost_clients = False
        """As in `StoreMixin`."""
        self._place: tuple[int, int, int] | None = None
        """(rank, world size, iteration) of the rank."""
        self._last_progress = 0.0
        self._closed = False

    def run(self) -> None:
        """Watch until the rank ends, or closes the channel on purpose."""
        while not self._closed:
            self._receive(self._tick)
            now = self._clock.advance(time.monotonic())
            if self._closed:
                return
            if self._process.has_ended:
                self._record_own_end(Interruption.TERMINATED)
                return
            if self._store is not None and now >= self._next_heartbeat:
                self._next_heartbeat = now + self._config.heartbeat_interval
                self._exchange_heartbeats(self._store, now)
            if self._place is not None and now - self._last_progress > self._config.hard_timeout:
                self._end_rank()
                return

    # ---- the rank

    def _receive(self, timeout: float) -> None:
        """Wait for messages, at most `timeout` seconds, or until the rank ends; act on all that have arrived."""
        sources: list[Any] = [self._channel, *([] if self._process.descriptor is None else [self._process.descriptor])]
        select.select(sources, [], [], timeout)
        while not self._closed:
            try:
                packet = self._channel.recv(_MAX_MESSAGE, socket.MSG_DONTWAIT)
            except OSError:  # no further message, or the rank has ended
                return
            if not packet:
                self._process.wait(self._tick)  # the kernel closes descriptors before the process has ended
                return
            self._act(json.loads(packet))

    def _act(self, message: dict[str, Any]) -> None:
        self._last_progress = self._clock.advance(time.monotonic())
        if "close" in message:
            self._closed = True
        elif "store" in message:
            self._store = _open_store(message["store"], self._config.connect_timeout).with_prefix(message["prefix"])
            self._knows_lost_clients = bool(message["store"]["knows_lost_clients"])
        elif "iteration" in message:
            rank, world_size, iteration = message["iteration"]
            self._place = rank, world_size, iteration
            if self._store is not None and self._knows_lost_clients:
                record_when_lost(self._store, self._config.initial_rank, rank, iteration)
            log.info("rank %d of %d in iteration %d", rank, world_size, iteration)

    def _end_rank(self) -> None:
        log.warning(
            "rank %d made no progress for %g s: its process %d is terminated",
            self._config.initial_rank, self._config.hard_timeout, self._config.pid,
        )  # fmt: skip
        store, place = self._store, self._place
        if store is not None and place is not None:  # the other ranks need not wait until it has ended
            store.for_iteration(place[2]).record_interrupted(InterruptionRecord(place[0], Interruption.HARD_TIMEOUT))
        self._process.terminate(self._config.termination_grace_time)
        self._record_own_end(Interruption.HARD_TIMEOUT)

    def _record_own_end(self, kind: Interruption) -> None:
        """Record that the rank's process has ended, unless it had left on purpose."""
        self._receive(0)  # what it sent last: the others may wait for it in a later iteration
        if self._closed:
            return
        log.info("the process of rank %d has ended: %s", self._config.initial_rank, kind.value)
        if self._store is None:
            return
        if self._place is not None:
            rank, world_size, iteration = self._place
            self._store.for_iteration(iteration).record_end(rank, world_size, kind)
        # Last: ranks that wait for it subtract those that the iteration's store has as terminated.
        self._store.record_base_terminated_rank(self._config.initial_rank)
        self._store.get_base_terminated_count()  # an answer: the server has all records

    # ---- other ranks

    def _exchange_heartbeats(self, store: StoreMixin, now: float) -> None:
        own = self._config.initial_rank
        store.send_heartbeat(own)
        left = store.get_base_terminated_ranks()
        for other in watched_ranks(own, self._config.initial_world_size, left):
            if self._detector.observe(other, store.count_heartbeats(other), now):
                self._record_lost(store, other)

    def _record_lost(self, store: StoreMixin, other: int) -> None:
        log.warning("rank %d sends no heartbeats: it counts as lost", other)
        if self._place is not None:
            _, world_size, iteration = self._place
            current = store.for_iteration(iteration)
            rank = current.find_rank(other)
            if rank is not None:
                current.record_end(rank, world_size, Interruption.UNRESPONSIVE)
        store.record_base_terminated_rank(other)


def _open_store(description: dict[str, Any], timeout: float) -> StoreMixin:
    if description["endpoint"] is not None:
        host, port = description["endpoint"]
        return SocketStore.open(host, port, timedelta(seconds=timeout))
    sys.path[:] = description["path"]
    factory, kwargs = pickle.loads(base64.b64decode(description["factory"]))  # noqa: S301  (from our own parent)
    store: StoreMixin = factory(**kwargs)
    return store

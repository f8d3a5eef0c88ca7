"""Leader election by a Lease. An operator that loses the Lease stops its work and drops what it knows of the jobs.

Clocks of different hosts are never compared. A candidate measures on its own clock for how long the record has not
changed, and takes the Lease over once that is longer than the record's `leaseDurationSeconds`. A leader counts its own
deadline from the moment that it sent its last renewal: the candidate can have seen that renewal only later.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elasticjob_operator.kube import LEASES, AlreadyExists, Conflict, KubeApi, KubeError, NotFound
from elasticjob_operator.model.cluster.raw import integer, mapping, text, timestamp

log = logging.getLogger(__name__)

DURATION = 6
"""Seconds. Short, because the leader may have run on the lost node whose pods must be replaced. Two leaders at once do
the same work twice, but no harm."""
RENEW_EVERY = 1.0
"""Seconds."""
RENEW_DEADLINE = 4.0
"""Seconds after it sent the last successful renewal at which a leader steps down. A candidate counts `DURATION` from a
later moment, so the leader has 2 s to stop its work. An event loop that is busy may need longer: `may_write` bounds
what it does then."""
RETRY_AFTER = 0.25
"""Seconds between a failed renewal and the next try."""
REQUEST_TIMEOUT = 1.5
"""Seconds of one request about the Lease: one that gets no answer leaves time for another one before the deadline."""
LONGEST_SILENCE = 10.0
"""Seconds without an answer of the event loop that does the leader's work, from which on the Lease is not renewed. A
loop that lists thousands of pods answers within a second or two. If it hangs for ever, a candidate leads 7 s after the
last renewal: before the kubelet ends the process, whose liveness probe must fail three times, for 25 s, until then."""


class LeaseLost(Exception):  # noqa: N818
    """Another operator leads, or may lead soon."""


@dataclass(frozen=True)
class ObservedLease:
    """The spec of the Lease, and since when it has not changed on this process's clock."""

    record: Mapping[str, Any]
    since: float


def may_acquire(observed: ObservedLease, identity: str, now: float) -> bool:
    """Return whether `identity` may take or renew the Lease: it is the holder, or the Lease is released or expired."""
    holder = text(observed.record, "holderIdentity")
    duration = integer(observed.record, "leaseDurationSeconds", default=DURATION)
    return holder in ("", identity) or now >= observed.since + duration


def next_record(record: Mapping[str, Any], identity: str, now: float) -> dict[str, Any]:
    """Return the spec with `identity` as holder; a change of holder raises `leaseTransitions`. `now`: Unix seconds."""
    stamp = timestamp(now, precise=True)
    renewed = {**record, "holderIdentity": identity, "leaseDurationSeconds": DURATION, "renewTime": stamp}
    if text(record, "holderIdentity") != identity:
        renewed["acquireTime"] = stamp
        renewed["leaseTransitions"] = integer(record, "leaseTransitions") + 1
    return renewed


@dataclass
class Election:
    """Acquires, renews and releases the Lease for one operator process."""

    api: KubeApi
    """A client of its own: no other request may delay a renewal. Its requests end within `REQUEST_TIMEOUT`."""
    namespace: str
    name: str
    identity: str
    """Name of this process in the Lease."""
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    sleep: Callable[[float], Any] = asyncio.sleep
    silence: Callable[[], float] = lambda: 0.0
    """Returns for how many seconds the event loop that does the leader's work has not answered."""
    deadline: float = RENEW_DEADLINE
    """Seconds."""
    generation: int = 0
    """`leaseTransitions` of the Lease this process holds: each change of holder raises it. 0 before that."""
    _lease: dict[str, Any] = field(default_factory=dict)
    """The Lease as this process last wrote it."""
    _current: bool = False
    """Whether no write of this process has failed since: `_lease` may then be written again without reading it."""
    _held_since: float = 0.0
    """When this process sent its last successful write. The API server committed it later."""
    _observed: ObservedLease = ObservedLease({}, 0.0)

    async def acquire(self) -> None:
        """Wait until this process is the leader. While the event loop that is to do its work hangs, take no Lease."""
        logged = ""
        while not (self.silence() < LONGEST_SILENCE and await self.try_acquire()):
            holder = text(self._observed.record, "holderIdentity")
            if holder != logged:
                log.info("%s leads; waiting for the Lease", holder)
                logged = holder
            await self.sleep(RENEW_EVERY)
        log.info("%s leads, generation %d", self.identity, self.generation)

    async def renew(self) -> None:
        """Renew every second; raise LeaseLost when another process holds the Lease, or at the deadline.

        The leader's work runs in another event loop. While that one hangs, the Lease is not renewed.
        """
        renewed = True
        while True:
            pause = self._held_since + RENEW_EVERY - self.clock() if renewed else RETRY_AFTER
            await self.sleep(min(self._seconds_left(), max(RETRY_AFTER, pause)))
            silence = self.silence()
            renewed = silence < LONGEST_SILENCE and await self._renew_in_time()
            holder = text(self._observed.record, "holderIdentity")
            if not renewed and holder not in ("", self.identity):
                raise LeaseLost(f"{holder} leads")
            if not self._seconds_left():
                if silence >= LONGEST_SILENCE:
                    raise LeaseLost(f"the event loop of {self.identity} has not answered for {silence:.0f} s")
                raise LeaseLost(f"{self.identity} could not renew the Lease for {self.deadline:.0f} s")

    def may_write(self) -> bool:
        """Return whether no other process can lead yet. Another thread may call this."""
        return self.clock() < self._held_since + DURATION

    def _seconds_left(self) -> float:
        """Return the seconds until the deadline, at least 0."""
        return max(0.0, self._held_since + self.deadline - self.clock())

    async def release(self) -> None:
        """Release the Lease, so that a candidate may lead at once. Errors are only logged: the Lease expires anyway."""
        try:
            lease = self._lease if self._current else await self._read()
            record = mapping(lease, "spec")
            if text(record, "holderIdentity") == self.identity:
                body = {**lease, "spec": {**record, "holderIdentity": "", "leaseDurationSeconds": 1}}
                await self.api.update(LEASES, self.namespace, body)
        except KubeError as error:
            log.warning("the Lease was not released: %s", error)

    async def _renew_in_time(self) -> bool:
        """Try to renew; return False at the deadline at the latest, even if a request ignores its cancellation."""
        attempt = asyncio.create_task(self.try_acquire())
        try:
            await asyncio.wait({attempt}, timeout=self._seconds_left())
            return attempt.done() and attempt.result()
        finally:
            attempt.cancel()

    async def try_acquire(self) -> bool:
        """Take or renew the Lease where allowed; return whether this process holds it. On errors return False."""
        try:
            lease = self._lease if self._current else await self._read()
            self._current = False
            record = mapping(lease, "spec")
            if record != self._observed.record:
                self._observed = ObservedLease(record, self.clock())
            if not may_acquire(self._observed, self.identity, self.clock()):
                return False
            sent = self.clock()
            self._lease = await self._write(lease, next_record(record, self.identity, self.wall()))
        except (AlreadyExists, Conflict):
            return False
        except KubeError as error:
            log.warning("the Lease was neither taken nor renewed: %s", error)
            return False
        self._current, self._held_since = True, sent
        self._observed = ObservedLease(mapping(self._lease, "spec"), self.clock())
        self.generation = integer(self._observed.record, "leaseTransitions")
        return True

    async def _read(self) -> dict[str, Any]:
        try:
            return await self.api.get(LEASES, self.namespace, self.name)
        except NotFound:
            return {}

    async def _write(self, lease: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
        if lease:
            return await self.api.update(LEASES, self.namespace, {**lease, "spec": record})
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self.name, "namespace": self.namespace},
            "spec": record,
        }
        return await self.api.create(LEASES, self.namespace, body)

"""Leader election by a Lease. An operator that loses the Lease exits, so that no stale state survives in memory.

Clocks of different hosts are never compared. A candidate measures on its own clock for how long the record has not
changed, and takes the Lease over once that is longer than the record's `leaseDurationSeconds`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elasticjob_operator.kube import LEASES, AlreadyExists, Conflict, KubeApi, KubeError, NotFound
from elasticjob_operator.model.raw import integer, mapping, text, timestamp

log = logging.getLogger(__name__)

DURATION = 6
"""Seconds. Short, because the leader may have run on the lost node whose pods must be replaced. Two leaders at once do
the same work twice, but no harm."""
RENEW_EVERY = 1.0
"""Seconds."""
RENEW_DEADLINE = 4.0
"""Seconds. A leader that could not renew for this long exits, before a candidate may take over."""


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
    namespace: str
    name: str
    identity: str
    """Name of this process in the Lease."""
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    sleep: Callable[[float], Any] = asyncio.sleep
    generation: int = 0
    """`leaseTransitions` of the Lease this process holds: each change of holder raises it. 0 before that."""
    _lease: dict[str, Any] = field(default_factory=dict)
    _observed: ObservedLease = ObservedLease({}, 0.0)

    async def acquire(self) -> None:
        """Wait until this process is the leader."""
        logged = ""
        while not await self._try_acquire():
            holder = text(self._observed.record, "holderIdentity")
            if holder != logged:
                log.info("%s leads; waiting for the Lease", holder)
                logged = holder
            await self.sleep(RENEW_EVERY)
        log.info("%s leads, generation %d", self.identity, self.generation)

    async def renew(self) -> None:
        """Renew every second; raise LeaseLost when another process holds the Lease or renewing failed for 4 s."""
        renewed = self.clock()
        while True:
            await self.sleep(RENEW_EVERY)
            if await self._try_acquire():
                renewed = self.clock()
            elif text(self._observed.record, "holderIdentity") not in ("", self.identity):
                raise LeaseLost(f"{text(self._observed.record, 'holderIdentity')} leads")
            elif self.clock() > renewed + RENEW_DEADLINE:
                raise LeaseLost(f"{self.identity} could not renew the Lease for {RENEW_DEADLINE:.0f} s")

    async def release(self) -> None:
        """Release the Lease, so that a candidate may lead at once. Errors are only logged: the Lease expires anyway."""
        record = mapping(self._lease, "spec")
        if text(record, "holderIdentity") != self.identity:
            return
        body = {**self._lease, "spec": {**record, "holderIdentity": "", "leaseDurationSeconds": 1}}
        try:
            await self.api.update(LEASES, self.namespace, body)
        except KubeError as error:
            log.warning("the Lease was not released: %s", error)

    async def _try_acquire(self) -> bool:
        """Take or renew the Lease where allowed; return whether this process holds it. On errors return False."""
        try:
            lease = await self._read()
            record = mapping(lease, "spec")
            if record != self._observed.record:
                self._observed = ObservedLease(record, self.clock())
            if not may_acquire(self._observed, self.identity, self.clock()):
                return False
            self._lease = await self._write(lease, next_record(record, self.identity, self.wall()))
        except (AlreadyExists, Conflict):
            return False
        except KubeError as error:
            log.warning("the Lease was neither taken nor renewed: %s", error)
            return False
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

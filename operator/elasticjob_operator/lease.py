"""Leader election by a Lease. Losing it ends the process: a new one starts from nothing and knows nothing stale.

Clocks of different hosts are never compared: a candidate takes the Lease over once it has seen the same record for the
record's own duration.
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
"""Seconds. Short, because the leader may have been on the very node whose pods must be replaced, and because two
leaders at once would be wasteful, never wrong."""
RENEW_EVERY = 1.0
RENEW_DEADLINE = 4.0
"""A leader that could not renew for this long steps down, before anybody may take over."""


class LeaseLost(Exception):  # noqa: N818
    """Another process may lead now."""


@dataclass(frozen=True)
class ObservedLease:
    """A record as a candidate saw it, and since when it has not changed (its own clock)."""

    record: Mapping[str, Any]
    since: float


def may_acquire(seen: ObservedLease, me: str, now: float) -> bool:
    """Whether the Lease is free: released, expired before our eyes, or ours."""
    holder = text(seen.record, "holderIdentity")
    return holder in ("", me) or now >= seen.since + integer(seen.record, "leaseDurationSeconds", default=DURATION)


def next_record(record: Mapping[str, Any], me: str, wall: float) -> dict[str, Any]:
    """The record that makes, or keeps, `me` the holder. Each change of holder raises `leaseTransitions`."""
    stamp = timestamp(wall, precise=True)
    renewed = {**record, "holderIdentity": me, "leaseDurationSeconds": DURATION, "renewTime": stamp}
    if text(record, "holderIdentity") != me:
        renewed["acquireTime"] = stamp
        renewed["leaseTransitions"] = integer(record, "leaseTransitions") + 1
    return renewed


@dataclass
class Election:
    """One process's part in the election."""

    api: KubeApi
    namespace: str
    name: str
    me: str
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    sleep: Callable[[float], Any] = asyncio.sleep
    generation: int = 0
    """Number of the present leadership; grows with every change of holder."""
    _lease: dict[str, Any] = field(default_factory=dict)
    _seen: ObservedLease = ObservedLease({}, 0.0)

    async def acquire(self) -> None:
        """Wait until this process is the leader."""
        told = ""
        while not await self._try():
            holder = text(self._seen.record, "holderIdentity")
            if holder != told:
                log.info("waiting: %s leads", holder)
                told = holder
            await self.sleep(RENEW_EVERY)
        log.info("leading, generation %d", self.generation)

    async def renew(self) -> None:
        """Renew until that fails; `LeaseLost` then."""
        renewed = self.clock()
        while True:
            await self.sleep(RENEW_EVERY)
            if await self._try():
                renewed = self.clock()
            elif text(self._seen.record, "holderIdentity") not in ("", self.me):
                raise LeaseLost(f"{text(self._seen.record, 'holderIdentity')} leads")
            elif self.clock() > renewed + RENEW_DEADLINE:
                raise LeaseLost(f"could not renew the Lease for {RENEW_DEADLINE:.0f} s")

    async def release(self) -> None:
        """Let the next one lead at once. Best effort."""
        record = mapping(self._lease, "spec")
        if text(record, "holderIdentity") != self.me:
            return
        body = {**self._lease, "spec": {**record, "holderIdentity": "", "leaseDurationSeconds": 1}}
        try:
            await self.api.update(LEASES, self.namespace, body)
        except KubeError as error:
            log.warning("the Lease could not be released: %s", error)

    async def _try(self) -> bool:
        """Take or renew the Lease if that is right. An error is a no: the next try is soon."""
        try:
            lease = await self._read()
            record = mapping(lease, "spec")
            if record != self._seen.record:
                self._seen = ObservedLease(record, self.clock())
            if not may_acquire(self._seen, self.me, self.clock()):
                return False
            self._lease = await self._write(lease, next_record(record, self.me, self.wall()))
        except (AlreadyExists, Conflict):
            return False
        except KubeError as error:
            log.warning("Lease: %s", error)
            return False
        self._seen = ObservedLease(mapping(self._lease, "spec"), self.clock())
        self.generation = integer(self._seen.record, "leaseTransitions")
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

"""Events about jobs. An Event's name is a hash of its cause: recording it twice makes one Event or raises its count."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections import deque
from dataclasses import dataclass
from typing import Any

from elasticjob._runtime.contract.names import GROUP, KIND, VERSION
from elasticjob._runtime.contract.text import with_noun
from elasticjob_operator.actions import EventRecord
from elasticjob_operator.kube import EVENTS, AlreadyExists, KubeApi
from elasticjob_operator.model.cluster.raw import timestamp
from elasticjob_operator.model.observed import Job

log = logging.getLogger(__name__)

COMPONENT = "elasticjob-operator"
MAX_MESSAGE = 1000
"""Characters; the API server refuses Events with more than 1024."""
MOST_WAITING = 10_000
"""Events that wait at most: some 10 MB, and more than a thousand jobs record as they start."""
FINISH_SECONDS = 1.0
"""How long an operator that stops goes on to write Events: its successor waits for its Lease."""
_MAX_COUNTS = 10_000


@dataclass(frozen=True)
class _Waiting:
    """An Event that is not written yet."""

    namespace: str
    job: str
    reason: str
    repeats: bool
    body: dict[str, Any]


class Recorder:
    """Writes Events one after the other while `run` runs: no reconcile waits for them.

    An Event that the API server does not take is logged and dropped, and so is one beyond `MOST_WAITING`.
    """

    def __init__(self, api: KubeApi, identity: str) -> None:
        self._api = api
        self._identity = identity
        self._counts: dict[str, int] = {}
        self._waiting: deque[_Waiting] = deque()
        self._added = asyncio.Event()

    def record(self, job: Job, record: EventRecord, now: float) -> None:
        """Log an Event, which is written later; `now` is Unix seconds."""
        level = logging.WARNING if record.warning else logging.INFO
        log.log(level, "%s/%s: %s: %s", job.namespace, job.name, record.reason, record.message)
        if len(self._waiting) >= MOST_WAITING:
            log.warning("%s/%s: Event %s was not written: too many wait", job.namespace, job.name, record.reason)
            return
        body = event_manifest(job, record, self._identity, now)
        self._waiting.append(_Waiting(job.namespace, job.name, record.reason, record.repeats, body))
        self._added.set()

    async def run(self) -> None:
        """Write Events until cancelled."""
        while True:
            await self.flush()
            self._added.clear()
            await self._added.wait()

    async def flush(self) -> None:
        """Write all Events that wait."""
        while self._waiting:
            await self._write(self._waiting[0])
            self._waiting.popleft()

    async def finish(self) -> None:
        """Write the Events that still wait when `run` has been cancelled, for `FINISH_SECONDS` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FINISH_SECONDS):
                await self.flush()
        if self._waiting:
            log.warning("%s not written before this operator stopped", with_noun(len(self._waiting), "Event"))

    async def _write(self, waiting: _Waiting) -> None:
        try:
            await self._api.create(EVENTS, waiting.namespace, waiting.body)
        except AlreadyExists:
            if waiting.repeats:
                await self._raise_count(waiting)
        except Exception as error:  # no Event is worth the end of the operator
            log.warning("%s/%s: Event %s was not written: %s", waiting.namespace, waiting.job, waiting.reason, error)

    async def _raise_count(self, waiting: _Waiting) -> None:
        body = waiting.body
        name = body["metadata"]["name"]
        if len(self._counts) >= _MAX_COUNTS:
            self._counts.clear()
        count = self._counts[name] = self._counts.get(name, 1) + 1
        change = {"count": count, "lastTimestamp": body["lastTimestamp"], "message": body["message"]}
        try:
            await self._api.patch(EVENTS, waiting.namespace, name, change)
        except Exception as error:
            log.warning("%s/%s: the count of Event %s was not raised: %s", waiting.namespace, waiting.job, name, error)


def event_manifest(job: Job, record: EventRecord, identity: str, now: float) -> dict[str, Any]:
    """Return the core/v1 Event."""
    digest = hashlib.sha256(f"{job.uid}|{record.reason}|{record.key}".encode()).hexdigest()[:16]
    when = timestamp(now)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{job.name}.{digest}", "namespace": job.namespace},
        "involvedObject": {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "namespace": job.namespace,
            "name": job.name,
            "uid": job.uid,
        },
        "type": "Warning" if record.warning else "Normal",
        "reason": record.reason,
        "message": record.message[:MAX_MESSAGE],
        "source": {"component": COMPONENT, "host": identity},
        "reportingComponent": COMPONENT,
        "reportingInstance": identity,
        "firstTimestamp": when,
        "lastTimestamp": when,
        "count": 1,
    }

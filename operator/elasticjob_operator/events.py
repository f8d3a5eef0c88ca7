"""Events about jobs. An Event's name is a hash of its cause: recording it twice makes one Event or raises its count."""

from __future__ import annotations

import hashlib
import logging
from typing import Any

from elasticjob.contract.names import GROUP, KIND, VERSION
from elasticjob_operator.actions import EventRecord
from elasticjob_operator.kube import EVENTS, AlreadyExists, KubeApi, KubeError
from elasticjob_operator.model.observed import Job
from elasticjob_operator.model.raw import timestamp

log = logging.getLogger(__name__)

COMPONENT = "elasticjob-operator"
MAX_MESSAGE = 1000
"""Characters; the API server refuses Events with more than 1024."""
_MAX_COUNTS = 10_000


class Recorder:
    """Writes Events. An Event that the API server does not take is logged and dropped."""

    def __init__(self, api: KubeApi, identity: str) -> None:
        self._api = api
        self._identity = identity
        self._counts: dict[str, int] = {}

    async def record(self, job: Job, record: EventRecord, now: float) -> None:
        """Log and write one Event; `now` is Unix seconds."""
        level = logging.WARNING if record.warning else logging.INFO
        log.log(level, "%s/%s: %s: %s", job.namespace, job.name, record.reason, record.message)
        body = event_manifest(job, record, self._identity, now)
        try:
            await self._api.create(EVENTS, job.namespace, body)
        except AlreadyExists:
            if record.repeats:
                await self._raise_count(job, body, now)
        except KubeError as error:
            log.warning("%s/%s: Event %s was not written: %s", job.namespace, job.name, record.reason, error)

    async def _raise_count(self, job: Job, body: dict[str, Any], now: float) -> None:
        name = body["metadata"]["name"]
        if len(self._counts) >= _MAX_COUNTS:
            self._counts.clear()
        count = self._counts[name] = self._counts.get(name, 1) + 1
        change = {"count": count, "lastTimestamp": timestamp(now), "message": body["message"]}
        try:
            await self._api.patch(EVENTS, job.namespace, name, change)
        except KubeError as error:
            log.warning("%s/%s: the count of Event %s was not raised: %s", job.namespace, job.name, name, error)


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

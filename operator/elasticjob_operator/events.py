"""Events about jobs. Names are made from what happened, so telling it again changes nothing, or raises its count."""

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
LONGEST = 1000
_REMEMBERED = 10_000


class Recorder:
    """Writes Events; one that cannot be written is logged and let go."""

    def __init__(self, api: KubeApi, identity: str) -> None:
        self._api = api
        self._identity = identity
        self._counts: dict[str, int] = {}

    async def record(self, job: Job, note: EventRecord, now: float) -> None:
        """Tell one happening."""
        level = logging.WARNING if note.warning else logging.INFO
        log.log(level, "%s/%s: %s: %s", job.namespace, job.name, note.reason, note.message)
        body = event(job, note, self._identity, now)
        try:
            await self._api.create(EVENTS, job.namespace, body)
        except AlreadyExists:
            if note.repeats:
                await self._count(job, body, now)
        except KubeError as error:
            log.warning("%s/%s: no Event %s: %s", job.namespace, job.name, note.reason, error)

    async def _count(self, job: Job, body: dict[str, Any], now: float) -> None:
        name = body["metadata"]["name"]
        if len(self._counts) >= _REMEMBERED:
            self._counts.clear()
        count = self._counts[name] = self._counts.get(name, 1) + 1
        change = {"count": count, "lastTimestamp": timestamp(now), "message": body["message"]}
        try:
            await self._api.patch(EVENTS, job.namespace, name, change)
        except KubeError as error:
            log.warning("%s/%s: Event %s: %s", job.namespace, job.name, name, error)


def event(job: Job, note: EventRecord, identity: str, now: float) -> dict[str, Any]:
    """The Event as the core API wants it."""
    digest = hashlib.sha256(f"{job.uid}|{note.reason}|{note.key}".encode()).hexdigest()[:16]
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
        "type": "Warning" if note.warning else "Normal",
        "reason": note.reason,
        "message": note.message[:LONGEST],
        "source": {"component": COMPONENT, "host": identity},
        "reportingComponent": COMPONENT,
        "reportingInstance": identity,
        "firstTimestamp": when,
        "lastTimestamp": when,
        "count": 1,
    }

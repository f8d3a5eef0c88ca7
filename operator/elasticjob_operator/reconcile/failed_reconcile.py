"""A reconcile that raised an error is shown in its job: in the condition `ReconcileFailed` and in an Event.

`plan` makes all other conditions. It may be what fails, so this one is written around it, from the status as it is, and
`plan` leaves it alone.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elasticjob_operator.actions import EventRecord
from elasticjob_operator.kube import JOBS, KubeApi, KubeError, Refused
from elasticjob_operator.model.cluster.raw import Raw, integer, mapping, objects, text, timestamp
from elasticjob_operator.model.job.status import Status
from elasticjob_operator.model.observed import Job
from elasticjob_operator.reconcile.events import Recorder

log = logging.getLogger(__name__)

CONDITION = "ReconcileFailed"
MAX_ERROR = 500
"""Characters of an error that are shown."""
REWRITE_SECONDS = 60.0
"""Seconds for which a failure that differs from the shown one in its message alone is not written. A message may have a
time or an address, and differ each time."""


@dataclass(frozen=True)
class FailedReconcile:
    """Why a reconcile failed: reason and message of the condition."""

    reason: str
    message: str


def failed_reconcile_of(error: Exception) -> FailedReconcile | None:
    """Return what the job shows; None for an error that is not the job's: the API server fails, or throttles."""
    if isinstance(error, Refused):
        return FailedReconcile("RequestRefused", f"the API server refuses a request for this job: {_shown(error)}")
    if isinstance(error, KubeError):
        return None
    frame = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" ({Path(frame[0].filename).name}:{frame[0].lineno})" if frame else ""
    return FailedReconcile(
        "InternalError",
        f"the operator fails to reconcile this job: {type(error).__name__}: {_shown(error)}{where}. It tries again at "
        "least once a minute, and changes nothing for this job until it succeeds. Please report this error",
    )


def _shown(error: Exception) -> str:
    printable = "".join(c if c.isprintable() else " " for c in str(error))
    return printable if len(printable) <= MAX_ERROR else printable[:MAX_ERROR] + "..."


def shown_failure(raw: Raw) -> FailedReconcile | None:
    """Return the failure that the job shows; None if it shows none."""
    for condition in objects(raw, "status", "conditions"):
        if text(condition, "type") == CONDITION and text(condition, "status") == "True":
            return FailedReconcile(text(condition, "reason"), text(condition, "message"))
    return None


def with_condition(raw: Raw, failure: FailedReconcile | None, now: float) -> dict[str, Any]:
    """Return the job's status with this failure, or with its end (None); all else stays. `now`: Unix seconds."""
    status, before = mapping(raw, "status"), shown_failure(raw)
    others = [dict(c) for c in objects(status, "conditions") if text(c, "type") != CONDITION]
    old = next((c for c in objects(status, "conditions") if text(c, "type") == CONDITION), {})
    unchanged = bool(old) and (before is None) == (failure is None)
    new = {
        "type": CONDITION,
        "status": "False" if failure is None else "True",
        "reason": "Reconciled" if failure is None else failure.reason,
        "message": "the operator reconciles the job again" if failure is None else failure.message,
        "observedGeneration": integer(raw, "metadata", "generation"),
        "lastTransitionTime": text(old, "lastTransitionTime") if unchanged else timestamp(now),
    }
    return {**status, "conditions": [*others, new]}


@dataclass
class FailedReconciles:
    """Shows failures of reconciles in their jobs. `clock` returns Unix seconds."""

    api: KubeApi
    recorder: Recorder
    clock: Callable[[], float]
    _written: dict[str, float] = field(default_factory=dict)
    """When a failure was last written, by UID of the job; only those of the last REWRITE_SECONDS."""

    async def show(self, raw: Mapping[str, Any], failure: FailedReconcile) -> Raw | None:
        """Show a failure in the job; return the job as written, None if it shows this already, or another message for
        the same reason that has been written within REWRITE_SECONDS."""
        shown, uid, now = shown_failure(raw), text(raw, "metadata", "uid"), self.clock()
        self._written = {other: at for other, at in self._written.items() if 0 <= now - at < REWRITE_SECONDS}
        if shown == failure or (shown and shown.reason == failure.reason and uid in self._written):
            return None
        self._written[uid] = now  # also if the write fails: no failure may cause requests without a limit
        event = EventRecord(CONDITION, failure.message, key=failure.message, warning=True, repeats=True)
        self.recorder.record(_job(raw), event, self.clock())
        return await self._write(raw, failure)

    async def clear(self, raw: Mapping[str, Any]) -> Raw | None:
        """Show that a reconcile of the job has succeeded; return the job as written, None if it could not be."""
        try:
            return await self._write(raw, None)
        except Refused as error:
            log.warning("%s: the end of its failure cannot be shown: %s", text(raw, "metadata", "name"), error)
            return None

    async def _write(self, raw: Mapping[str, Any], failure: FailedReconcile | None) -> Raw:
        body = {**raw, "status": with_condition(raw, failure, self.clock())}
        return await self.api.update(JOBS, text(raw, "metadata", "namespace"), body, "status")


def _job(raw: Raw) -> Job:
    """Return what an Event needs of the job. To parse all of it may be what fails."""
    namespace, name, uid = (text(raw, "metadata", field) for field in ("namespace", "name", "uid"))
    return Job(namespace, name, uid, 0, deleting=False, spec=None, spec_error="", status=Status())

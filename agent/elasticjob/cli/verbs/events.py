"""`elasticjob events`: what happened to a job and its pods, in the order of time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from elasticjob._runtime.contract.names import KIND
from elasticjob._runtime.contract.text import printable
from elasticjob.cli.cluster.connection import Cluster
from elasticjob.cli.cluster.errors import GONE, RefusedError
from elasticjob.cli.cluster.resources import ELASTICJOBS, EVENT_LIST, KubeObject
from elasticjob.cli.views.event_text import event_lines
from elasticjob.cli.views.output import VerbOutput, without_empty

_OF_JOB = r"{job}(-\d+-\d+|-rdzv-\d+|-rdzv|-nodes)?"
"""Names of a job and of what the operator creates for it."""


def show_events(
    cluster: Cluster, output: VerbOutput, job: str | None, now: float, *, warnings: bool = False, watch: bool = False
) -> int:
    """Show the Events of a job and its pods, or those of all jobs; return the exit code."""
    if job is not None:
        cluster.get(ELASTICJOBS, job)  # a wrong name is an error, and not a job without Events
    found, version = cluster.list_with_version(EVENT_LIST)
    view = event_views(found, job, warnings=warnings)
    output.show(view, lambda painter: event_lines(view, painter, now, with_header=True) or ["no Events"])
    while watch:
        try:
            for kind, event in cluster.watch(EVENT_LIST, version=version):
                version = str(event["metadata"]["resourceVersion"])
                if kind != "DELETED":
                    _show_new(output, event_views([event], job, warnings=warnings), now)
        except RefusedError as error:
            if error.status != GONE:
                raise
            version = cluster.list_with_version(EVENT_LIST)[1]
    return 0


def _show_new(output: VerbOutput, view: list[dict[str, Any]], now: float) -> None:
    if view:
        output.show(view[0], lambda painter: event_lines(view, painter, now, with_header=False))


def event_views(events: Iterable[KubeObject], job: str | None, *, warnings: bool = False) -> list[dict[str, Any]]:
    """Return the Events of a job and its pods, or those of all jobs, oldest first. Pure."""
    chosen = [e for e in events if is_about(e, job) and not (warnings and e.get("type") != "Warning")]
    return [_view(event) for event in sorted(chosen, key=last_seen)]


def is_about(event: KubeObject, job: str | None) -> bool:
    """Return whether an Event is about the job or an object of it; without a job, whether it is about one."""
    about = event.get("involvedObject") or {}
    name = str(about.get("name", ""))
    if job is None:
        return bool(about.get("kind") == KIND)
    return re.fullmatch(_OF_JOB.format(job=re.escape(job)), name) is not None


def last_seen(event: KubeObject) -> str:
    """Return when an Event last happened, as an RFC 3339 text."""
    series = event.get("series") or {}
    times: Sequence[object] = (
        series.get("lastObservedTime"),
        event.get("lastTimestamp"),
        event.get("eventTime"),
        event.get("firstTimestamp"),
        event["metadata"].get("creationTimestamp"),
    )
    return str(next((time for time in times if time), ""))


def _view(event: KubeObject) -> dict[str, Any]:
    about = event.get("involvedObject") or {}
    count = (event.get("series") or {}).get("count") or event.get("count") or 1
    return without_empty(
        {
            "time": last_seen(event),
            "type": event.get("type", "Normal"),
            "reason": event.get("reason", ""),
            "object": f"{str(about.get('kind', '')).lower()}/{about.get('name', '')}",
            "count": count if count > 1 else None,
            "message": printable(str(event.get("message", "")).strip()),
        }
    )

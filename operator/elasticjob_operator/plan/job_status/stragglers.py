"""The straggler, the rank that slows all others: in status and as an Event."""

from __future__ import annotations

from typing import Any

from elasticjob._runtime.contract.messages import RoundPhase
from elasticjob_operator.actions import EventRecord
from elasticjob_operator.model.cluster.raw import integer, mapping, text, timestamp
from elasticjob_operator.plan.job_status.conditions import JobContext


def straggler_record(job: JobContext) -> dict[str, Any] | None:
    """Return `status.straggler`; None if no round runs, or its coordinator names no straggler.

    The last one stays while the coordinator is unavailable or recovers.
    """
    if job.outcome is not None or not job.world.formed:
        return None
    report = job.ctx.report
    if report is None or report.phase in (RoundPhase.RECOVERING, RoundPhase.STANDBY):
        return dict(mapping(job.ctx.status.raw, "straggler")) or None
    straggler = report.straggler
    if straggler is None:
        return None
    record = {
        "rank": straggler.rank,
        "pod": straggler.pod,
        "node": job.ctx.node_of(straggler.pod),
        "stepSeconds": round(straggler.own_seconds, 4),
        "medianSeconds": round(straggler.median_seconds, 4),
        "time": timestamp(straggler.time),
    }
    return {name: value for name, value in record.items() if value != ""}


def straggler_event(job: JobContext) -> tuple[EventRecord, ...]:
    """Return an Event if the straggler is new to status."""
    now, before = straggler_record(job), mapping(job.ctx.status.raw, "straggler")
    if now is None or (now["time"], now["rank"]) == (text(before, "time"), integer(before, "rank", default=-1)):
        return ()
    node = f" on {now['node']}" if "node" in now else ""
    message = (
        f"rank {now['rank']} in {now['pod']}{node} slows every step: its own work takes {now['stepSeconds']:g} s per "
        f"step, {now['medianSeconds']:g} s in the median of the other ranks"
    )
    return (EventRecord("Straggler", message, key=f"{now['time']}/{now['rank']}", warning=True),)

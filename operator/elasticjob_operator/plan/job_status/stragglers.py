"""The straggler, the rank that slows all others: in status and as an Event."""

from __future__ import annotations

from typing import Any

from elasticjob._runtime.contract.messages import RoundPhase
from elasticjob_operator.actions import EventRecord
from elasticjob_operator.model.cluster.raw import integer, mapping, text, timestamp
from elasticjob_operator.plan.job_status.decisions import Decisions


def straggler_record(decisions: Decisions) -> dict[str, Any] | None:
    """Return `status.straggler`; None if no round runs, or its coordinator names no straggler.

    The last one stays while the coordinator is unavailable or recovers.
    """
    if decisions.outcome is not None or not decisions.training.formed:
        return None
    report = decisions.inputs.report
    if report is None or report.phase in (RoundPhase.RECOVERING, RoundPhase.STANDBY):
        return dict(mapping(decisions.inputs.status.raw, "straggler")) or None
    straggler = report.straggler
    if straggler is None:
        return None
    record = {
        "rank": straggler.rank,
        "pod": straggler.pod,
        "node": decisions.inputs.node_of(straggler.pod),
        "stepSeconds": round(straggler.own_seconds, 4),
        "medianSeconds": round(straggler.median_seconds, 4),
        "time": timestamp(straggler.time),
    }
    return {name: value for name, value in record.items() if value != ""}


def straggler_event(decisions: Decisions) -> tuple[EventRecord, ...]:
    """Return an Event if the straggler is new to status."""
    now, before = straggler_record(decisions), mapping(decisions.inputs.status.raw, "straggler")
    if now is None or (now["time"], now["rank"]) == (text(before, "time"), integer(before, "rank", default=-1)):
        return ()
    node = f" on {now['node']}" if "node" in now else ""
    message = (
        f"rank {now['rank']} in {now['pod']}{node} slows every step: its own work takes {now['stepSeconds']:g} s per "
        f"step, {now['medianSeconds']:g} s in the median of the other ranks"
    )
    return (EventRecord("Straggler", message, key=f"{now['time']}/{now['rank']}", warning=True),)

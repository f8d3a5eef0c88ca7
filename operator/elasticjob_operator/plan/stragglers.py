"""The rank that all others wait for, as status and an Event tell it."""

from __future__ import annotations

from typing import Any

from elasticjob.contract.messages import RoundPhase
from elasticjob_operator.actions import EventRecord
from elasticjob_operator.model.raw import integer, mapping, text, timestamp
from elasticjob_operator.plan.conditions import JobContext


def straggler_record(f: JobContext) -> dict[str, Any] | None:
    """`status.straggler`; None while a round runs in which nobody is one. It stays while nobody can be asked."""
    if f.outcome is not None or not f.world.formed:
        return None
    report = f.ctx.report
    if report is None or report.phase is RoundPhase.RECOVERING:
        return dict(mapping(f.ctx.status.raw, "straggler")) or None
    slow = report.straggler
    if slow is None:
        return None
    told = {
        "rank": slow.rank,
        "pod": slow.pod,
        "node": f.ctx.node_of(slow.pod),
        "stepSeconds": round(slow.own_seconds, 4),
        "medianSeconds": round(slow.median_seconds, 4),
        "time": timestamp(slow.time),
    }
    return {name: value for name, value in told.items() if value != ""}


def straggler_event(f: JobContext) -> tuple[EventRecord, ...]:
    """Told once, when it is named."""
    now, before = straggler_record(f), mapping(f.ctx.status.raw, "straggler")
    if now is None or (now["time"], now["rank"]) == (text(before, "time"), integer(before, "rank", default=-1)):
        return ()
    where = f" on {now['node']}" if "node" in now else ""
    message = (
        f"rank {now['rank']} in {now['pod']}{where} holds up every step: {now['stepSeconds']:g} s of its own, "
        f"{now['medianSeconds']:g} s in the other ranks"
    )
    return (EventRecord("Straggler", message, key=f"{now['time']}/{now['rank']}", warning=True),)

"""`status.stateTransfer`: how fast a node that joined got the training state, and over which network interface."""

from __future__ import annotations

from typing import Any

from elasticjob_operator.model.raw import mapping, timestamp
from elasticjob_operator.plan.conditions import JobContext


def state_transfer(job: JobContext) -> dict[str, Any] | None:
    """Return the field; None if no rank has ever received a state. The last one stays until the next transfer."""
    transfer = job.ctx.report.state_transfer if job.ctx.report else None
    if transfer is None:
        return dict(mapping(job.ctx.status.raw, "stateTransfer")) or None
    received = transfer.received
    record = {
        "rank": received.rank,
        "pod": transfer.pod,
        "bytes": received.size,
        "seconds": round(received.seconds, 3),
        "gigabytesPerSecond": round(received.size / received.seconds / 1e9, 2),
        "interface": received.interface,
        "time": timestamp(transfer.time),
    }
    return {name: value for name, value in record.items() if value != ""}

"""`status.stateTransfer`: how fast a pod that joined got the training state, and over which network interface."""

from __future__ import annotations

from typing import Any

from elasticjob_operator.model.cluster.raw import mapping, timestamp
from elasticjob_operator.plan.job_status.decisions import Decisions

_SHORTEST = 1e-6
"""Seconds of a transfer at least: the rank that measured them is not trusted, and it may have sent none."""


def state_transfer(decisions: Decisions) -> dict[str, Any] | None:
    """Return the field; None if no rank has ever received a state. The last one stays until the next transfer."""
    transfer = decisions.inputs.report.state_transfer if decisions.inputs.report else None
    if transfer is None:
        return dict(mapping(decisions.inputs.status.raw, "stateTransfer")) or None
    received = transfer.received
    record = {
        "rank": received.rank,
        "pod": transfer.pod,
        "bytes": received.size,
        "seconds": round(received.seconds, 3),
        "gigabytesPerSecond": round(received.size / max(received.seconds, _SHORTEST) / 1e9, 2),
        "interface": received.interface,
        "time": timestamp(transfer.time),
    }
    return {name: value for name, value in record.items() if value != ""}

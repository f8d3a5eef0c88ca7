"""How worker pods name the operator as a responder to their Evictions, and what it reports there."""

from __future__ import annotations

from typing import Any

from elasticjob_operator.model.cluster.evictions import RESPONDER, RESPONDER_PRIORITY, own_report
from elasticjob_operator.model.cluster.raw import Raw, moment, objects, text, timestamp


def add_responder(pod: dict[str, Any]) -> None:
    """Make the operator a responder to Evictions of this pod, in place. The API has none for members of a PodGroup.

    An API server that does not have the API drops the field.
    """
    if "schedulingGroup" not in pod["spec"]:
        pod["spec"]["evictionResponders"] = [{"name": RESPONDER, "priority": RESPONDER_PRIORITY}]


def answered_status(raw: Raw, now: float, message: str, *, completed: bool) -> Raw:
    """Return the status of an Eviction with the operator's report; `now` is Unix seconds."""
    before = own_report(raw)
    # The API server refuses a time before the controller's, whose clock may be ahead, or before the last report.
    at = max(now, moment(before, "startTime") or 0.0, moment(before, "heartbeatTime") or 0.0)
    report = {**before, "heartbeatTime": timestamp(at), "message": message}
    if completed:
        report["completionTime"] = timestamp(at)
    reports = [report if text(r, "name") == RESPONDER else r for r in objects(raw, "status", "responders")]
    return {**raw["status"], "responders": reports}

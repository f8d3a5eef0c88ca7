"""`status.stages`: how many launchers of the command are finished in all pods, and what each of them runs."""

from __future__ import annotations

from typing import Any

from elasticjob_operator.model.cluster.raw import integer, mapping
from elasticjob_operator.plan.job_status.decisions import Decisions

FIELD = "stages"
_MAX_LENGTH = 256


def finished_stages(decisions: Decisions) -> dict[str, Any] | None:
    """Return the field; None before the first stage is finished. What is finished stays so, also when a job resumes."""
    before = mapping(decisions.inputs.status.raw, FIELD)
    known = before.get("launchers")
    finished, launchers = integer(before, "finished"), [str(name) for name in known] if isinstance(known, list) else []
    report = decisions.inputs.report
    if report is not None:
        finished = max(finished, report.finished_stages)
        if len(report.launchers) > len(launchers):
            launchers = [name[:_MAX_LENGTH] for name in report.launchers]
    return {"finished": finished, "launchers": launchers} if finished else None

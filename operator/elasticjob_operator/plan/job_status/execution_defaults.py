"""`status.defaults`: what the platform's defaults give the job. They are recorded when an execution starts, so that a
change of them leaves the jobs that run as they are."""

from __future__ import annotations

from typing import Any

from elasticjob_operator.manifests.names import attempt
from elasticjob_operator.plan.job_status.decisions import Decisions

FIELD = "defaults"


def execution_defaults(decisions: Decisions) -> dict[str, Any] | None:
    """Return the field; None without defaults."""
    ctx = decisions.inputs
    starts = decisions.resumes or not (decisions.suspended or "startTime" in ctx.status.raw)
    if decisions.suspended and not starts:
        last = ctx.status.raw.get(FIELD)
        return dict(last) if isinstance(last, dict) else None
    record = (ctx.job.current_defaults if starts else ctx.job.defaults).record
    fields = {"fields": dict(ctx.job.default_sources)} if ctx.job.default_sources else {}
    execution = ctx.status.execution_attempts + 1 if decisions.resumes else attempt(ctx.job)
    return {"execution": execution, **record, **fields} if record else None

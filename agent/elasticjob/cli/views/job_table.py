"""Jobs as a table. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elasticjob.cli.views.style import Painter
from elasticjob.cli.views.table import text_table
from elasticjob.cli.views.times import age_text

_HEADER = ("NAME", "PHASE", "PODS", "WORKERS", "RESTARTS", "PROGRESS", "GOODPUT", "AGE")
_PHASES = {
    "Running": "green", "Succeeded": "green", "Failed": "red", "Degraded": "yellow", "Restarting": "yellow",
    "Pending": "yellow", "Scaling": "cyan", "Starting": "cyan", "Suspended": "dim",
}  # fmt: skip


def job_table(jobs: Sequence[Mapping[str, Any]], painter: Painter, now: float, *, all_namespaces: bool) -> list[str]:
    """Return the lines of a table with a row for each `job_summary`."""
    rows = [_row(job, painter, now) for job in jobs]
    if not all_namespaces:
        return text_table(_HEADER, rows)
    spaced = [(job.get("namespace", ""), *row) for job, row in zip(jobs, rows, strict=True)]
    return text_table(("NAMESPACE", *_HEADER), spaced)


def phase_text(phase: str, painter: Painter) -> str:
    """Return a phase in its colour; a job without one was seen by no operator."""
    return painter.paint(phase or "no status", _PHASES.get(phase, "yellow"))


def percent_text(value: Any) -> str:
    """Return a percentage without needless digits; `-` if there is none."""
    return "-" if value is None else f"{float(value):.4g}%"


def _row(job: Mapping[str, Any], painter: Painter, now: float) -> tuple[str, ...]:
    return (
        str(job["name"]),
        phase_text(job.get("phase", ""), painter),
        f"{job['training']}/{job['wanted']}",
        str(job["worldSize"]),
        str(job["restarts"]),
        percent_text(job.get("progressPercentage")),
        percent_text(job.get("goodputPercent")),
        age_text(job.get("created"), now),
    )

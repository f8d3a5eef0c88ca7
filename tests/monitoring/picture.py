"""Draw panels of a job's dashboard from what Prometheus returns for their queries. Grafana has no part in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.cluster.install import CHART
from support.cluster.prometheus import Prometheus, with_variables

TITLES = (
    "Phases", "Worker pods", "Rounds and restarts", "Steps per second", "What the script reports",
    "Time that faults have cost",
)  # fmt: skip
BEFORE, AFTER = 50.0, 60.0
"""Seconds around the fault."""


def draw(server: Prometheus, namespace: str, job: str, killed: float, path: Path) -> None:
    """Write the picture. `killed`: when the worker was killed, in Unix seconds, the origin of all axes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    variables = {"namespace": namespace, "job_name": job, "__rate_interval": "1m"}
    dashboard = json.loads((CHART / "files/dashboards/job.json").read_text())
    by_title = {panel["title"]: panel for panel in dashboard["panels"]}
    figure, grid = plt.subplots(2, 3, figsize=(13, 6), sharex=True)
    for axes, title in zip(grid.flat, TITLES, strict=True):
        for target in by_title[title]["targets"]:
            query = with_variables(target["expr"], variables)
            for series in server.query_range(query, killed - BEFORE, killed + AFTER, 1):
                _plot(axes, series, target["legendFormat"], killed)
        axes.axvline(0, color="crimson", linestyle=":")
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7)
    for axes in grid[-1]:
        axes.set_xlabel("seconds since a worker was killed")
    figure.suptitle("ElasticJobs: one job", fontsize=12)
    figure.tight_layout()
    figure.savefig(path, dpi=90, metadata={"Software": None})
    plt.close(figure)


def _plot(axes: Any, series: dict[str, Any], legend: str, origin: float) -> None:
    points = [(float(moment) - origin, float(value)) for moment, value in series["values"]]
    if "phase" in series["metric"] and not any(value for _, value in points):
        return  # a phase that the job was never in
    label = legend
    for name, value in series["metric"].items():
        label = label.replace(f"{{{{{name}}}}}", value)
    axes.step(*zip(*points, strict=True), where="post", label=label)

#!/usr/bin/env python3
"""Write the Grafana dashboards of the chart: `make dashboards`. An argument is another folder.

Grafana's JSON repeats the same thirty lines for each panel; here a panel is one entry. Commit the JSON: a unit test
compares it with what this program writes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "elasticjob/files/dashboards"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24
FLEET = 'namespace=~"$namespace"'
"""All namespaces include the empty label, which metrics about jobs have without `metrics.namespaceLabel`."""
JOB = 'namespace="$namespace", job_name="$job_name"'
PHASES = {
    "Running": "green", "Succeeded": "blue", "Scaling": "light-green", "Degraded": "yellow", "Starting": "light-blue",
    "Pending": "purple", "Restarting": "orange", "Suspended": "text", "Failed": "red",
}  # fmt: skip


@dataclass(frozen=True)
class Panel:
    """One panel. `queries`: (legend, PromQL) pairs. `width`: of 24 columns. `unit`: Grafana's id of a unit."""

    title: str
    queries: Sequence[tuple[str, str]]
    kind: str = "timeseries"
    unit: str = "short"
    width: int = 8
    height: int = 7
    help: str = ""
    stacked: bool = False
    thresholds: Sequence[tuple[float | None, str]] = ((None, "green"),)
    options: dict[str, Any] = field(default_factory=dict)

    def render(self, number: int, x: int, y: int) -> dict[str, Any]:
        table = self.kind == "table"
        targets = [
            {
                "refId": chr(ord("A") + index),
                "expr": query,
                "legendFormat": legend,
                "datasource": SOURCE,
                **({"instant": True, "format": "table"} if table else {"instant": self.kind == "stat"}),
            }
            for index, (legend, query) in enumerate(self.queries)
        ]
        steps = [{"color": color, "value": value} for value, color in self.thresholds]
        defaults: dict[str, Any] = {"unit": self.unit, "thresholds": {"mode": "absolute", "steps": steps}}
        if self.kind == "timeseries":
            stacking = {"stacking": {"mode": "normal", "group": "A"}} if self.stacked else {}
            defaults["custom"] = {"fillOpacity": 30 if self.stacked else 10, "showPoints": "never", **stacking}
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.help,
            "datasource": SOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "targets": targets,
            "fieldConfig": {"defaults": defaults, "overrides": self.options.get("overrides", [])},
            "options": {name: value for name, value in self.options.items() if name not in ("overrides", "transform")},
            "transformations": self.options.get("transform", []),
        }


def stat(title: str, query: str, **options: Any) -> Panel:
    return Panel(title, [("", query)], kind="stat", width=options.pop("width", 4), height=4, **options)


def quantiles(title: str, metric: str, by: str, legend: str, selector: str = "", help_: str = "") -> Panel:
    """Return a panel with the median and the 90th percentile of a histogram, by a label."""
    labels = ", ".join(name for name in ("le", by) if name)

    def query(share: float) -> str:
        rate = f"sum by ({labels}) (rate({metric}_bucket{{{selector}}}[$__rate_interval]))"
        return f"histogram_quantile({share}, {rate})"

    pairs = [(f"{legend} {name}".strip(), query(share)) for name, share in (("median", 0.5), ("p90", 0.9))]
    return Panel(title, pairs, unit="s", help=help_)


def table(title: str, query: str, hidden: Sequence[str], width: int, help_: str, names: dict[str, str]) -> Panel:
    hide = dict.fromkeys(("Time", "__name__", *hidden), True)
    organize = {"id": "organize", "options": {"excludeByName": hide, "renameByName": names}}
    return Panel(
        title, [("", query)], kind="table", width=width, height=8, help=help_, options={"transform": [organize]}
    )


KSM_LABELS = (
    "customresource_group", "customresource_kind", "customresource_version", "instance", "job", "container", "endpoint",
    "service",
)  # fmt: skip

FLEET_PANELS = [
    stat("Jobs that train", f'sum(elasticjob_jobs{{phase=~"Running|Scaling|Degraded", {FLEET}}})'),
    stat(
        "Jobs that wait or restart", f'sum(elasticjob_jobs{{phase=~"Pending|Starting|Restarting", {FLEET}}})',
        thresholds=((None, "green"), (1, "yellow")),
    ),
    stat(
        "Goodput", f"1 - sum(increase(elasticjob_lost_seconds_total{{{FLEET}}}[$__range]))"
        f" / sum(increase(elasticjob_training_seconds_total{{{FLEET}}}[$__range]))",
        unit="percentunit", help="Share of the training time of all jobs that faults have left.",
        thresholds=((None, "red"), (0.9, "yellow"), (0.97, "green")),
    ),
    stat("Restarts", f"sum(increase(elasticjob_restarts_total{{{FLEET}}}[$__range]))"),
    stat(
        "Operator leads", "max(elasticjob_leader)",
        thresholds=((None, "red"), (1, "green")),
    ),
    stat("Watches that fail", "sum(elasticjob_failing_watches)", thresholds=((None, "green"), (1, "red"))),
    Panel(
        "Jobs by phase", [("{{phase}}", f"sum by (phase) (elasticjob_jobs{{{FLEET}}})")], stacked=True, width=12,
        options={
            "overrides": [
                {
                    "matcher": {"id": "byName", "options": phase},
                    "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": color}}],
                }
                for phase, color in PHASES.items()
            ]
        },
    ),
    Panel(
        "Failures by class",
        [("{{class}}", f"sum by (class) (increase(elasticjob_pod_failures_total{{{FLEET}}}[$__rate_interval]))")],
        width=12, help="Charged or not, as status.lastFailure.class names them.",
    ),
    Panel(
        "Restarts by reason",
        [
            (
                "{{reason}} ({{strategy}})",
                f"sum by (reason, strategy) (increase(elasticjob_restarts_total{{{FLEET}}}[$__rate_interval]))",
            )
        ],
    ),
    quantiles(
        "Recoveries, by phase", "elasticjob_recovery_seconds", "phase", "{{phase}}", FLEET,
        "From a failure to the next round: detect, stop, rendezvous, start, and total.",
    ),
    Panel(
        "Lost seconds per second of training",
        [
            (
                "lost",
                f"sum(rate(elasticjob_lost_seconds_total{{{FLEET}}}[$__rate_interval]))"
                f" / sum(rate(elasticjob_training_seconds_total{{{FLEET}}}[$__rate_interval]))",
            )
        ],
        unit="percentunit", help="A job that reports no progress adds hours at once: read it over hours.",
    ),
    quantiles("From start to the first round", "elasticjob_rendezvous_seconds", "", "", FLEET),
    quantiles("Changes of size", "elasticjob_scale_seconds", "direction", "{{direction}}", FLEET),
    quantiles("Reconciles", "elasticjob_reconcile_seconds", "", ""),
    Panel(
        "Errors of reconciles", [("errors", "sum(increase(elasticjob_reconcile_errors_total[$__rate_interval]))")],
    ),
    Panel(
        "Queue of the operator",
        [("jobs that wait", "max(elasticjob_queue_depth)"), ("seconds late", "max(elasticjob_queue_wait_seconds)")],
    ),
    Panel(
        "Requests to the API server",
        [
            (
                "{{verb}} {{resource}} {{code}}",
                "sum by (verb, resource, code) (rate(elasticjob_api_requests_total[$__rate_interval]))",
            )
        ],
        unit="reqps",
    ),
    Panel(
        "Age of the watches", [("{{resource}}", "max by (resource) (elasticjob_watch_age_seconds)")], unit="s",
        help="Since the API server last answered a watch: about 60 s at most while all work.",
        thresholds=((None, "green"), (300, "red")),
    ),
    Panel("Silence of the API server", [("{{pod}}", "elasticjob_api_silence_seconds")], unit="s"),
    Panel(
        "Operators",
        [("{{pod}} leads", "elasticjob_leader"), ("version {{version}}", "count by (version) (elasticjob_build_info)")],
    ),
    table(
        "Last failures", 'topk(50, elasticjob_job_last_failure_time_seconds{namespace=~"$namespace"} * 1000)',
        KSM_LABELS, 14, "The newest failure of each job. Needs kube-state-metrics.",
        {"Value": "time (ms)", "job_name": "job"},
    ),
    table(
        "Nodes that jobs avoid",
        "count by (node, reason) (elasticjob_job_avoided_node_since_seconds)", (), 10,
        "Needs kube-state-metrics.", {"Value": "jobs"},
    ),
]  # fmt: skip

TIMELINE = {"mergeValues": True, "showValue": "never", "rowHeight": 0.9}


def one(metric: str, more: str = "") -> str:
    return f"elasticjob_job_{metric}{{{JOB}{', ' + more if more else ''}}}"


JOB_PANELS = [
    stat("Phase", f"{one('phase')} == 1", options={"textMode": "name"}, width=4),
    stat("Pods that train", one("active_pods")),
    stat("Progress", one("progress_percent"), unit="percent"),
    stat("Remaining", one("remaining_seconds"), unit="s"),
    stat(
        "Goodput", f"{one('productive_seconds')} / ({one('productive_seconds')} + {one('lost_seconds')})",
        unit="percentunit", thresholds=((None, "red"), (0.9, "yellow"), (0.97, "green")),
    ),
    stat(
        "Restarts left", f"{one('restarts_max')} - {one('restarts_counted')}",
        thresholds=((None, "red"), (1, "green")),
    ),
    Panel("Phases", [("{{phase}}", one("phase"))], kind="state-timeline", width=12, options=TIMELINE),
    Panel(
        "Conditions", [("{{type}}", f"max by (type) ({one('condition')})")], kind="state-timeline", width=12,
        options=TIMELINE,
    ),
    Panel(
        "Worker pods",
        [
            ("asked for", one("replicas")), ("target", one("target_pods")), ("training", one("active_pods")),
            ("ready", one("ready_pods")), ("standby", one("standby_pods")),
        ],
        width=12,
    ),
    Panel("Rounds and restarts", [("rounds", one("rounds")), ("restarts", one("restarts"))], width=12),
    Panel(
        "Steps per second", [("steps", f"deriv({one('step')}[$__rate_interval])")],
        help="Needs elasticjob.progress in the script.",
    ),
    Panel("What the script reports", [("{{metric}}", one("trainer_metric"))]),
    Panel("Workers", [("world size", one("world_size"))]),
    Panel(
        "Last recovery, by phase", [("{{phase}}", one("last_recovery_seconds"))], unit="s", stacked=True,
    ),
    Panel("Time that faults have cost", [("lost", one("lost_seconds"))], unit="s"),
    Panel(
        "Straggler",
        [
            ("rank {{rank}} in {{pod}}", one("straggler_step_seconds")),
            ("median", one("straggler_median_seconds")),
        ],
        unit="s",
    ),
    Panel("Failed starts of pods", [("starts", one("failed_starts"))]),
    table(
        "Last failure", f"{one('last_failure_time_seconds')} * 1000", (*KSM_LABELS, "namespace", "job_name"), 16,
        "What failed, where, and when.", {"Value": "time (ms)"},
    ),
]  # fmt: skip


def place(panels: Sequence[Panel]) -> Iterator[dict[str, Any]]:
    """Yield the panels in rows from the left, each below those of the row before."""
    x = y = height = 0
    for number, panel in enumerate(panels, 1):
        if x + panel.width > COLUMNS:
            x, y, height = 0, y + height, 0
        yield panel.render(number, x, y)
        x, height = x + panel.width, max(height, panel.height)


def variable(name: str, query: str, *, label: str, every: bool = False) -> dict[str, Any]:
    more: dict[str, Any] = {"includeAll": True, "multi": True, "allValue": ".*"} if every else {}
    return {
        "name": name, "label": label, "type": "query", "datasource": SOURCE, "query": query, "refresh": 2, "sort": 1,
        **more,
    }  # fmt: skip


DATASOURCE = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def dashboard(uid: str, title: str, panels: Sequence[Panel], variables: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "uid": uid,
        "title": title,
        "tags": ["elasticjob"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [DATASOURCE, *variables]},
        "links": [{"type": "dashboards", "tags": ["elasticjob"], "title": "elasticjob", "asDropdown": True}],
        "panels": list(place(panels)),
    }


def dashboards() -> dict[str, dict[str, Any]]:
    """Return the dashboards by the names of their files."""
    fleet = [variable("namespace", "label_values(elasticjob_jobs, namespace)", label="Namespace", every=True)]
    job = [
        variable("namespace", "label_values(elasticjob_job_phase, namespace)", label="Namespace"),
        variable("job_name", 'label_values(elasticjob_job_phase{namespace="$namespace"}, job_name)', label="Job"),
    ]
    return {
        "fleet.json": dashboard("elasticjob-fleet", "ElasticJobs: fleet", FLEET_PANELS, fleet),
        "job.json": dashboard("elasticjob-job", "ElasticJobs: one job", JOB_PANELS, job),
    }


def main(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, content in dashboards().items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")
        print(folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)

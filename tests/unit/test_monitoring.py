"""The chart's alerts, dashboards and series: each name in them exists, and promtool's tests pass where it is built."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import Counter, Histogram
from prometheus_client.metrics import MetricWrapperBase

from cluster import build
from cluster.layout import Layout
from elasticjob_operator import metrics

REPOSITORY = Path(__file__).resolve().parents[2]
CHART = REPOSITORY / "charts/elasticjob"
ALERTS = CHART / "files/alerts.yaml"
TESTS = REPOSITORY / "tests/monitoring/alerts.yaml"
PAGE = REPOSITORY / "docs/operate/monitoring.md"
TARGET = {"namespace", "service", "pod", "job", "instance"}
"""Labels that Prometheus adds for what it reads."""
Json = dict[str, Any]


def operator_series() -> dict[str, set[str]]:
    """Return the labels of each series that the operator serves."""
    found: dict[str, set[str]] = {}
    for metric in vars(metrics).values():
        if isinstance(metric, MetricWrapperBase):
            name, labels = next(iter(metric.describe())).name, set(metric._labelnames)
            if isinstance(metric, Histogram):
                found |= {f"{name}_{end}": labels | {"le"} for end in ("bucket", "sum", "count")}
            else:
                found[name + ("_total" if isinstance(metric, Counter) else "")] = labels
    return found


def job_resource() -> Json:
    (resource,) = yaml.safe_load((CHART / "files/kube-state-metrics.yaml").read_text())["spec"]["resources"]
    return dict(resource)


def settings(metric: Json) -> Json:
    """Return what a metric of a job reads: its path and labels."""
    (found,) = (value for key, value in metric["each"].items() if key != "type")
    return dict(found)


def job_series() -> dict[str, set[str]]:
    """Return the labels of each series that kube-state-metrics makes of a job."""
    resource = job_resource()
    found = {}
    for metric in resource["metrics"]:
        read = settings(metric)
        labels = {*resource["labelsFromPath"], *read.get("labelsFromPath", {})}
        labels |= {read[name] for name in ("labelName", "labelFromKey") if name in read}
        found[f"{resource['metricNamePrefix']}_{metric['name']}"] = labels
    return found


SERIES = operator_series() | job_series()


def alerts() -> dict[str, Json]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def dashboard_queries() -> Iterator[tuple[str, str]]:
    for path in sorted((CHART / "files/dashboards").glob("*.json")):
        content = json.loads(path.read_text())
        for panel in content["panels"]:
            for target in panel["targets"]:
                yield f"{path.stem}: {panel['title']}", target["expr"]
        for variable in content["templating"]["list"]:
            yield f"{path.stem}: ${variable['name']}", variable["query"]


QUERIES = [(name, rule["expr"]) for name, rule in alerts().items()]
QUERIES += list(dashboard_queries())
QUERIES += [(str(test["name"]), s["series"]) for test in yaml.safe_load(TESTS.read_text())["tests"]
            for s in test["input_series"]]  # fmt: skip


def unknown_names(query: str) -> set[str]:
    """Return the metrics of a query that do not exist, and labels that none of its metrics has."""
    names = set(re.findall(r"\belasticjob_\w+", query))
    wrong = names - SERIES.keys()
    known = set().union(TARGET, {"alertname"}, *(SERIES.get(name, ()) for name in names))
    for name, selector in re.findall(r"\b(elasticjob_\w+)\{([^}]*)\}", query):
        wrong |= set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector)) - SERIES.get(name, set()) - TARGET
    for grouping in re.findall(r"\b(?:by|on) \(([^)]*)\)", query):
        wrong |= {label.strip() for label in grouping.split(",")} - known
    return wrong


def test_each_metric_and_label_of_a_query_exists() -> None:
    assert len(QUERIES) > 150
    assert {where: unknown_names(query) for where, query in QUERIES if unknown_names(query)} == {}
    assert unknown_names('sum by (cause) (elasticjob_restart{a="b"})') == {"cause", "elasticjob_restart", "a"}


def test_the_operators_metrics_are_on_the_fleet_dashboard() -> None:
    shown = " ".join(query for where, query in dashboard_queries() if where.startswith("fleet"))
    families = {re.sub("_(bucket|sum|count)$", "", name) for name in operator_series()}
    assert {name for name in families if name not in shown} == {"elasticjob_job_defaults_refused"}


def test_the_series_of_a_job_are_on_its_dashboard_or_in_an_alert() -> None:
    used = " ".join(query for _, query in QUERIES)
    assert {name for name in job_series() if name not in used} == {
        "elasticjob_job_info", "elasticjob_job_created_time_seconds", "elasticjob_job_start_time_seconds",
    }  # fmt: skip


DEFINITION = yaml.safe_load((REPOSITORY / "crds/elasticjobs.in.yaml").read_text())["spec"]["versions"][0]


def field(path: list[str], schema: Json = DEFINITION["schema"]["openAPIV3Schema"]) -> Json:
    """Return the schema of a field of a job, or of a part of a job; an empty one where there is no such field."""
    for name in path:
        schema = schema.get("items", {}) if name == "-1" else schema.get("properties", {}).get(name, {})
    return schema


def types(metric: Json) -> list[str | None]:
    """Return the types of the fields that a metric reads, after that at its path: its value, its labels."""
    read = settings(metric)
    found = field(read["path"]) or {}
    inner = found.get("items", found)
    if "labelFromKey" in read:
        return [value["type"] for value in inner["properties"].values()]
    return [
        field(path, inner).get("type") for path in (read.get("valueFrom", []), *read.get("labelsFromPath", {}).values())
    ]


def test_each_field_that_kube_state_metrics_reads_is_in_the_definition() -> None:
    read = [m for m in job_resource()["metrics"] if settings(m)["path"] and settings(m)["path"][0] != "metadata"]
    assert len(read) > 20
    scalars = {"string", "integer", "number"}
    assert [(metric["name"], types(metric)) for metric in read if not set(types(metric)) <= scalars] == []
    assert types({"each": {"type": "Gauge", "gauge": {"path": ["status", "restart"]}}}) == [None]


CONDITIONS_PAGE = (REPOSITORY / "docs/reference/conditions-and-events.md").read_text()


def test_the_phases_are_those_of_the_reference() -> None:
    (phase,) = (metric for metric in job_resource()["metrics"] if metric["name"] == "phase")
    table = CONDITIONS_PAGE.split("\n## Phases")[1].split("\n## ")[0]
    listed = [name for line in table.splitlines() if line.startswith("| `") for name in line.split("|")[1].split(",")]
    assert settings(phase)["list"] == [name.strip(" `") for name in listed]


def test_an_alert_names_a_condition_that_the_operator_writes() -> None:
    for where, query in QUERIES:
        for kind in re.findall(r'elasticjob_job_condition\{[^}]*type="(\w+)"', query):
            assert f"`{kind}`" in CONDITIONS_PAGE, where


def test_each_alert_says_what_to_do_is_tested_and_is_documented() -> None:
    tests, page = TESTS.read_text(), PAGE.read_text()
    for name, rule in alerts().items():
        assert {"summary", "description"} <= rule["annotations"].keys(), name
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), name
        assert name in tests, name
        assert f"`{name}`" in page, name


def test_each_series_of_a_job_is_documented() -> None:
    table = (
        (REPOSITORY / "docs/reference/metrics.md").read_text().split("\n## Series of each job\n")[1].split("\n## ")[0]
    )
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    documented = {
        name: set(re.findall(r"`(\w+)`", labels)) for names, labels in rows for name in re.findall(r"`(\w+)`", names)
    }
    assert documented == {name: labels - {"namespace", "job_name"} for name, labels in job_series().items()}


def test_the_dashboards_are_what_their_program_writes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, REPOSITORY / "charts/dashboards.py", tmp_path], check=True, capture_output=True)
    kept = {path.name: path.read_text() for path in (CHART / "files/dashboards").glob("*.json")}
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == kept
    assert len(kept) == 2


def test_the_alerts_pass_the_tests_of_promtool() -> None:
    promtool = build.module_program(Layout.default(), build.MONITORING) / "promtool"
    if not promtool.exists():
        pytest.skip("promtool is not built: `make alerts` builds it")
    for command in (["check", "rules", str(ALERTS)], ["test", "rules", str(TESTS)]):
        done = subprocess.run([promtool, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

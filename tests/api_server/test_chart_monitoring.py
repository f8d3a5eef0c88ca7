"""What the chart gives to Prometheus, Grafana and kube-state-metrics. It needs only helm."""

from __future__ import annotations

import json

import pytest
import yaml

from api_server.test_chart_values import CHART, of_kind, rendered

FILES = CHART / "files"


def test_the_alerts_are_those_of_the_file_without_the_disabled_ones() -> None:
    assert not of_kind("PrometheusRule")
    groups = yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]
    on = {"metrics.prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}}}
    (rule,) = of_kind("PrometheusRule", on)
    assert rule["spec"] == {"groups": groups}
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    operators = [rule["alert"] for rule in groups[0]["rules"]]
    disabled = [*operators, "ElasticJobFailed"]
    (rule,) = of_kind("PrometheusRule", on | {"metrics.prometheusRule.disabled": disabled})
    assert [group["name"] for group in rule["spec"]["groups"]] == [group["name"] for group in groups[1:]]
    assert "ElasticJobFailed" not in json.dumps(rule)
    with pytest.raises(AssertionError, match="there is no alert ElasticJobFaild"):
        of_kind("PrometheusRule", on | {"metrics.prometheusRule.disabled": ["ElasticJobFaild"]})


def test_the_dashboards_are_where_grafana_looks_for_them() -> None:
    config = of_kind("ConfigMap")
    values = {"enabled": True, "namespace": "monitoring", "annotations": {"grafana_folder": "Training"}}
    maps = [item for item in of_kind("ConfigMap", {"metrics.dashboards": values}) if item not in config]
    assert {item["metadata"]["name"] for item in maps} == {"r-elasticjob-dashboard-fleet", "r-elasticjob-dashboard-job"}
    for item in maps:
        assert item["metadata"]["namespace"] == "monitoring"
        assert item["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert item["metadata"]["annotations"] == {"grafana_folder": "Training"}
        ((name, content),) = item["data"].items()
        file = FILES / "dashboards" / name.removeprefix("elasticjob-")
        assert json.loads(content) == json.loads(file.read_text())


def test_kube_state_metrics_gets_its_configuration_and_may_read_jobs() -> None:
    account = {"name": "ksm", "namespace": "monitoring"}
    values = {"metrics.kubeStateMetrics": {"enabled": True, "serviceAccount": account}}
    known = rendered()
    config, role, binding = sorted(
        (item for item in rendered(values) if item not in known), key=lambda item: len(item["kind"])
    )
    assert (config["metadata"]["name"], config["metadata"]["namespace"]) == (
        "r-elasticjob-kube-state-metrics", "monitoring",
    )  # fmt: skip
    assert yaml.safe_load(config["data"]["config.yaml"]) == yaml.safe_load(
        (FILES / "kube-state-metrics.yaml").read_text()
    )
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"list", "watch"}
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", **account}]
    assert not [item for item in rendered(values | {"rbac.create": False}) if "Role" in item["kind"]]

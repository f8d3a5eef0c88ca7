"""What the chart has for platform teams: roles for people, limits of the operator, defaults for jobs, metrics.

Nearly all of it needs only helm.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from api_server.conftest import Cluster
from cluster import build
from cluster.layout import Layout
from elasticjob_operator.model.job.job_defaults import PlatformDefaults, read_platform_defaults
from elasticjob_operator.settings import OperatorSettings, parse_settings

CHART = Path(__file__).resolve().parents[2] / "charts/elasticjob"


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = build.programs(Layout.default()).path("helm")
    return subprocess.run([str(program), *arguments], capture_output=True, text=True, timeout=60)


def rendered(values: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return the objects of a release `r` in namespace `place`. AssertionError: helm refuses the values."""
    setting = [f"--set-json={name}={json.dumps(value)}" for name, value in (values or {}).items()]
    # Without the CRD, which takes seconds to parse.
    line = ["template", "r", str(CHART), "-n", "place", "--kube-version", "1.34.0", "--set=crds.install=false"]
    done = helm(*line, *setting)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def of_kind(kind: str, values: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    return [document for document in rendered(values) if document["kind"] == kind]


def settings_of(values: dict[str, Any] | None = None) -> OperatorSettings:
    """Return the settings of an operator that the chart starts with these values."""
    (deployment,) = of_kind("Deployment", values)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return parse_settings([], {item["name"]: item["value"] for item in container["env"] if "value" in item})


def test_the_chart_passes_strict_lint() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert "0 chart(s) failed" in done.stdout, done.stdout + done.stderr


def images_of(values: dict[str, Any]) -> set[str]:
    """Return the image of the operator, and that of stores and agents."""
    (deployment,) = of_kind("Deployment", values)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return {container["image"], settings_of(values).image}


def test_a_digest_pins_the_image_of_the_operator_and_of_jobs() -> None:
    digest = f"sha256:{'0f' * 32}"
    assert images_of({"image.repository": "r/e", "image.tag": "2"}) == {"r/e:2"}
    assert images_of({"image.repository": "r/e", "image.tag": "2", "image.digest": digest}) == {f"r/e@{digest}"}
    for wrong in ("--set=image.digest=sha256:0f", f"--set=image.repository=r/e@{digest}"):
        done = helm("template", "r", str(CHART), "--set=crds.install=false", wrong)
        assert (done.returncode, "values don't meet the specifications" in done.stderr) == (1, True), done.stderr


def test_the_notes_say_what_is_left_to_check(tmp_path: Path) -> None:
    # Without a server, helm installs only what needs no version of Kubernetes.
    chart = Path(shutil.copytree(CHART, tmp_path / "elasticjob"))
    described = (chart / "Chart.yaml").read_text().splitlines()
    (chart / "Chart.yaml").write_text("\n".join(line for line in described if not line.startswith("kubeVersion")))

    def notes(*settings: str) -> str:
        line = ["install", "r", str(chart), "-n", "place", "--dry-run=client"]
        done = helm(*line, "--set=crds.install=false", *(f"--set={setting}" for setting in settings))
        assert done.returncode == 0, done.stderr
        return done.stdout.partition("NOTES:")[2]

    assert [word in notes() for word in ("jobDefaults is empty", "priorityClassName is empty", "replicas is 1")] == [
        True, True, False,
    ]  # fmt: skip
    found = notes("replicas=1", "priorityClassName=a", "jobDefaults.cluster.waitForMinSeconds=60")
    assert [word in found for word in ("jobDefaults is", "priorityClassName is", "replicas is 1")] == [
        False, False, True,
    ]  # fmt: skip
    pulled = notes("image.repository=registry.example.com/me/elasticjob")
    assert [("names no registry" in found, "REGISTRY=" in found) for found in (notes(), pulled)] == [
        (True, False), (False, True),
    ]  # fmt: skip
    assert "  REGISTRY=registry.example.com/me\n" in pulled


def test_the_operators_limits_are_values_whose_defaults_are_its_own() -> None:
    names = ("workers", "qps", "burst", "resync_seconds", "log_level", "label_namespaces")
    found = settings_of()
    assert [getattr(found, name) for name in names] == [getattr(OperatorSettings, name) for name in names]
    changed = {"operator": {"workers": 4, "qps": 20.5, "burst": 40, "resyncSeconds": 1200000}, "log.level": "DEBUG"}
    found = settings_of(changed | {"metrics.namespaceLabel": True})
    assert [getattr(found, name) for name in names] == [4, 20.5, 40, 1200000, "DEBUG", True]


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("operator.qps=0", "at '/operator/qps'"),
        ("operator.workers=many", "at '/operator/workers': got string, want integer"),
        ("operator.resyncSecond=5", "additional properties 'resyncSecond' not allowed"),
        ("jobDefaults.cluster.hangPolicy.progressTimeoutSecond=5", "'progressTimeoutSecond' not allowed"),
        ("jobDefaults.cluster.hangPolicy.progressTimeoutSeconds=5", "minimum: got 5, want 10"),
        ("jobDefaults.cluster.failurePolicy.maxRestarts=5", "additional properties 'maxRestarts' not allowed"),
        ("jobDefaults.namespaces.a.preload=torch", "at '/jobDefaults/namespaces/a/preload': got string, want array"),
        ("jobDefaults.namespaces.A.preload=null", "'A' does not match pattern"),
        ("podDisruptionBudget.enabled=maybe", "at '/podDisruptionBudget/enabled': got string, want boolean"),
        ("metrics.serviceMonitor.interval=often", "'often' does not match pattern"),
        ("metrics.serviceMonitor.enable=true", "additional properties 'enable' not allowed"),
    ],
)
def test_a_wrong_value_is_refused_before_anything_is_installed(setting: str, sentence: str) -> None:
    done = helm("template", "r", str(CHART), "--kube-version", "1.34.0", "--set", setting)
    assert done.returncode != 0
    assert sentence in done.stderr


def test_defaults_for_jobs_reach_the_operator_as_a_file_without_a_permission() -> None:
    cluster = {"hangPolicy": {"progressTimeoutSeconds": 600}, "ttlSecondsAfterFinished": 1209600}
    team = {"preload": [], "rendezvous": {"store": {"resources": {"limits": {"memory": "1Gi", "cpu": 2}}}}}
    documents = rendered({"jobDefaults": {"cluster": cluster, "namespaces": {"team-a": team}}})
    (config,) = [document for document in documents if document["kind"] == "ConfigMap"]
    found = read_platform_defaults(config["data"]["job-defaults.yaml"], PlatformDefaults())
    assert found == PlatformDefaults(cluster, {"team-a": team})
    (deployment,) = [document for document in documents if document["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    (mount,), (volume,) = pod["containers"][0]["volumeMounts"], pod["volumes"]
    assert volume == {"name": mount["name"], "configMap": {"name": config["metadata"]["name"]}}
    assert settings_of().job_defaults == f"{mount['mountPath']}/job-defaults.yaml"
    roles = [document for document in documents if document["kind"] in ("Role", "ClusterRole")]
    assert "configmaps" not in json.dumps(roles)
    (empty,) = of_kind("ConfigMap")
    assert read_platform_defaults(empty["data"]["job-defaults.yaml"], PlatformDefaults()) == PlatformDefaults()


def test_evictions_leave_an_operator_and_a_single_one_blocks_no_drain() -> None:
    (budget,) = of_kind("PodDisruptionBudget")
    (deployment,) = of_kind("Deployment")
    assert budget["spec"]["selector"] == deployment["spec"]["selector"]
    assert (budget["spec"]["maxUnavailable"], budget["spec"]["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")
    assert not of_kind("PodDisruptionBudget", {"replicas": 1})
    assert not of_kind("PodDisruptionBudget", {"podDisruptionBudget.enabled": False})


def test_a_service_monitor_selects_the_operators_service() -> None:
    assert not of_kind("ServiceMonitor")
    values = {
        "metrics.serviceMonitor": {
            "enabled": True,
            "labels": {"release": "prometheus"},
            "interval": "15s",
            "scrapeTimeout": "5s",
            "relabelings": [{"targetLabel": "cluster", "replacement": "a"}],
            "metricRelabelings": [{"action": "drop", "regex": "python_.*", "sourceLabels": ["__name__"]}],
            "endpoint": {"scheme": "https"},
        },
        "metrics.namespaceLabel": True,
    }
    documents = rendered(values)
    (monitor,) = [document for document in documents if document["kind"] == "ServiceMonitor"]
    (service,) = [document for document in documents if document["kind"] == "Service"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert endpoint == {
        "port": "metrics",
        "interval": "15s",
        "scrapeTimeout": "5s",
        "honorLabels": True,
        "scheme": "https",
        "relabelings": values["metrics.serviceMonitor"]["relabelings"],  # type: ignore[index]
        "metricRelabelings": values["metrics.serviceMonitor"]["metricRelabelings"],  # type: ignore[index]
    }
    done = helm(
        "template", "r", str(CHART), "--set=metrics.serviceMonitor.enabled=true", "--set=metrics.service=false",
        "--kube-version=1.34.0",
    )  # fmt: skip
    assert "set metrics.service to true" in done.stderr


CAN = [
    ("reader", "get", "", True),
    ("reader", "watch", "", True),
    ("reader", "get", "scale", True),
    ("reader", "create", "", False),
    ("reader", "update", "scale", False),
    ("author", "create", "", True),
    ("author", "deletecollection", "", True),
    ("author", "patch", "scale", True),
    ("author", "update", "status", False),
]


async def may(cluster: Cluster, user: str, verb: str, part: str) -> bool:
    """Ask the API server whether a user may do this to the jobs of a namespace."""
    where = {
        "namespace": "team",
        "group": "elasticjob.dev",
        "resource": "elasticjobs",
        "subresource": part,
        "verb": verb,
    }
    review = {"spec": {"user": user, "resourceAttributes": where}}
    path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
    return bool(json.loads(await cluster.api.request("POST", path, review))["status"]["allowed"])


async def test_people_with_view_and_edit_may_read_and_change_jobs(cluster: Cluster) -> None:
    """Kubernetes' controller that adds rules to `view` and `edit` does not run here: bind the roles that it would."""
    target = ["-n", "place", "--create-namespace", "--kubeconfig", str(cluster.server.kubeconfig)]
    done = await asyncio.to_thread(helm, "install", "r", str(CHART), *target, "--set=crds.install=false")
    assert done.returncode == 0, done.stderr
    rbac = "/apis/rbac.authorization.k8s.io/v1"
    roles = (await cluster.api.get(f"{rbac}/clusterroles?labelSelector=app.kubernetes.io/instance=r"))["items"]
    assert len(roles) == len(of_kind("ClusterRole"))
    for user, to in (("reader", "view"), ("author", "edit")):
        label = f"rbac.authorization.k8s.io/aggregate-to-{to}"
        for name in (r["metadata"]["name"] for r in roles if r["metadata"]["labels"].get(label) == "true"):
            binding = {
                "metadata": {"name": f"{user}-{name}"},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
                "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}],
            }
            await cluster.api.request("POST", f"{rbac}/clusterrolebindings", binding)
    assert [await may(cluster, *question) for *question, _ in CAN] == [allowed for *_, allowed in CAN]
    assert not [r for r in of_kind("ClusterRole", {"rbac.aggregate": False}) if "-jobs-" in r["metadata"]["name"]]

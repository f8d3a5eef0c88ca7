"""The chart: what it renders, which values it refuses, and installing, upgrading and uninstalling it."""

from __future__ import annotations

import json
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from elasticjob_operator.kube import api
from elasticjob_operator.manifests.policies import OPERATOR_LABELS
from elasticjob_operator.model.cluster.notices import NoticeKeys
from elasticjob_operator.settings import parse_settings
from support.cluster.install import RELEASE, SYSTEM, install
from support.cluster.jobs import manifest
from support.cluster.kube import Json, Kube
from support.cluster.kubectl import REPOSITORY, Done, Tools

pytestmark = pytest.mark.cluster

CHART = REPOSITORY / "charts/elasticjob"
CRD = "elasticjobs.elasticjob.dev"


@pytest.fixture(scope="session")
def tools(cluster_dir: Path) -> Tools:
    return Tools(cluster_dir / "bin", cluster_dir / "kubeconfig")


def template(tools: Tools, *settings: str, check: bool = True) -> Done:
    """Run `helm template` with values such as `replicas=1`."""
    options = [part for setting in settings for part in ("--set", setting)]
    return tools.helm("template", "r", str(CHART), "-n", "place", "--kube-version", "1.34.0", *options, check=check)


def rendered(tools: Tools, *settings: str) -> list[Json]:
    documents = yaml.safe_load_all(template(tools, *settings).stdout)
    return [document for document in documents if document]


def of_kind(documents: list[Json], kind: str) -> list[Json]:
    return [document for document in documents if document["kind"] == kind]


# ---- rendering


def test_the_chart_passes_lint(tools: Tools) -> None:
    assert "0 chart(s) failed" in tools.helm("lint", "--strict", str(CHART)).output


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("replicas=0", "at '/replicas': minimum: got 0, want 1"),
        ("replica=3", "additional properties 'replica' not allowed"),
        ("log.level=debug", "at '/log/level': value must be one of 'DEBUG', 'INFO', 'WARNING', 'ERROR'"),
        ("image.pullPolicy=Sometimes", "value must be one of 'Always', 'IfNotPresent', 'Never'"),
        ("image.repository=", "at '/image/repository': minLength: got 0, want 1"),
        ("watchNamespaces=training", "at '/watchNamespaces': got string, want array"),
        ("watchNamespaces={Team_A}", "at '/watchNamespaces/0': 'Team_A' does not match pattern"),
        ("nodeWarnings.taintSeconds.a=0", "at '/nodeWarnings/taintSeconds/a': minimum: got 0, want 1"),
        ("topologyLabels=zone", "at '/topologyLabels': got string, want array"),
        ("topologyLabels={a b}", "at '/topologyLabels/0': 'a b' does not match pattern"),
        ("crds.keep=maybe", "at '/crds/keep': got string, want boolean"),
    ],
)
def test_a_bad_value_is_refused_with_its_path(tools: Tools, setting: str, sentence: str) -> None:
    done = template(tools, setting, check=False)
    assert done.code != 0
    assert sentence in done.output


def permissions(role: Json) -> set[tuple[str, frozenset[str]]]:
    """Return resource and verbs of each rule of a role."""
    return {(resource, frozenset(rule["verbs"])) for rule in role["rules"] for resource in rule["resources"]}


def cluster_roles(documents: list[Json]) -> list[Json]:
    """Return the operator's ClusterRoles: its own, then those for the definition and for nodes."""
    roles = [role for role in of_kind(documents, "ClusterRole") if "-jobs-" not in role["metadata"]["name"]]
    return sorted(roles, key=lambda role: str(role["metadata"]["name"]))


def test_permissions_are_those_that_the_api_module_lists(tools: Tools) -> None:
    listed = re.findall(r"^\s*([a-z/]+)(?: \((.*?)\))?\s{2,}([a-z, ]+?)(?: \(.*\))?$", api.__doc__ or "", re.MULTILINE)
    expected = {(resource, where): frozenset(verbs.split(", ")) for resource, where, verbs in listed}
    assert len(expected) == 26
    documents = rendered(tools)
    cluster, definition, nodes = cluster_roles(documents)
    finalizers = ("elasticjobs/finalizers", frozenset({"update"}))
    assert permissions(cluster) == {(r, v) for (r, where), v in expected.items() if not where and "custom" not in r} | {
        finalizers
    }
    assert permissions(definition) == {("customresourcedefinitions", frozenset({"get"}))}
    assert permissions(nodes) == {("nodes", expected["nodes", "nodeWarnings, topologyLabels"])}
    own, kubelets = sorted(
        of_kind(documents, "Role"), key=lambda role: str(role["metadata"]["namespace"]), reverse=True
    )
    for resource, verbs in (("leases", expected["leases", "own namespace"]), ("secrets", {"create", "get"})):
        assert frozenset().union(*(v for r, v in permissions(own) if r == resource)) == verbs
    assert "get" in expected["secrets", "own namespace"]
    assert "get" not in expected["secrets", ""]
    assert permissions(kubelets) == {("leases", expected["leases", "kube-node-lease"])}


@pytest.mark.parametrize(
    ("provider", "group"),
    [
        ("coscheduling", "scheduling.x-k8s.io"),
        ("volcano", "scheduling.volcano.sh"),
        ("kubernetes", "scheduling.k8s.io"),
    ],
)
def test_permissions_for_gangs_are_only_those_of_the_providers_that_are_switched_on(
    tools: Tools, provider: str, group: str
) -> None:
    groups = rf"^podgroups \({group}\) +([a-z, ]+)$"
    (verbs,) = re.findall(groups, api.__doc__ or "", re.MULTILINE)
    cluster, *_ = cluster_roles(rendered(tools, f"gang.{provider}=true"))
    rules = [rule for rule in cluster["rules"] if "podgroups" in rule["resources"]]
    assert rules == [{"apiGroups": [group], "resources": ["podgroups"], "verbs": verbs.split(", ")}]


@pytest.mark.parametrize(("value", "rules"), [("evictionRequests.enabled", 2), ("kueue.enabled", 5)])
def test_permissions_for_optional_apis_are_those_that_the_api_module_lists(
    tools: Tools, value: str, rules: int
) -> None:
    section = (api.__doc__ or "").partition(f"{value}:")[2].partition("With the chart's value")[0]
    listed = re.findall(r"^([a-z/]+) \((.*?)\) +([a-z, ]+)$", section, re.MULTILINE)
    assert len(listed) == rules
    expected = {(resource, group, frozenset(verbs.split(", "))) for resource, group, verbs in listed}
    roles = of_kind(rendered(tools, f"{value}=true"), "ClusterRole")
    found = {
        (resource, rule["apiGroups"][0], frozenset(rule["verbs"]))
        for role in roles
        for rule in role["rules"]
        for resource in rule["resources"]
    }
    without = {
        (resource, rule["apiGroups"][0], frozenset(rule["verbs"]))
        for role in of_kind(rendered(tools), "ClusterRole")
        for rule in role["rules"]
        for resource in rule["resources"]
    }
    assert found - without == expected


@pytest.mark.parametrize(
    ("value", "variable"),
    [("evictionRequests.enabled", "EVICTION_REQUESTS"), ("kueue.enabled", "ELASTICJOB_KUEUE")],
)
def test_the_operator_watches_optional_apis_only_on_request(tools: Tools, value: str, variable: str) -> None:
    variables = []
    for settings in ((), (f"{value}=true",)):
        (deployment,) = of_kind(rendered(tools, *settings), "Deployment")
        (operator,) = deployment["spec"]["template"]["spec"]["containers"]
        variables.append({item["name"]: item.get("value") for item in operator["env"]}.get(variable))
    assert variables == [None, "true"]


def test_the_operator_has_a_permission_for_nodes_with_warnings_or_topology(tools: Tools) -> None:
    documents = rendered(tools, "nodeWarnings.enabled=false")
    assert "nodes" not in {r for role in cluster_roles(documents) for r, _ in permissions(role)}
    environment = operator_environment(documents)
    assert (environment["NODE_WARNINGS"], parse_settings([], environment).topology_labels) == ("off", ())
    documents = rendered(tools, "nodeWarnings.enabled=false", "topologyLabels={zone,example.com/rack}")
    *_, nodes = cluster_roles(documents)
    assert permissions(nodes) == {("nodes", frozenset({"list", "watch"}))}
    assert nodes["metadata"]["name"] in {b["roleRef"]["name"] for b in of_kind(documents, "ClusterRoleBinding")}
    labels = parse_settings([], operator_environment(documents)).topology_labels
    assert labels == ("zone", "example.com/rack")


def operator_environment(documents: list[Json]) -> dict[str, str]:
    (deployment,) = of_kind(documents, "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return {item["name"]: item["value"] for item in container["env"] if "value" in item}


def test_the_charts_notices_are_the_operators_and_may_be_none(tools: Tools) -> None:
    environment = operator_environment(rendered(tools))
    assert parse_settings([], environment).notice_keys == parse_settings([], {}).notice_keys
    own = operator_environment(rendered(tools, "nodeWarnings.taintSeconds.a/b=30"))
    assert own["NOTICE_SECONDS"] == "a/b=30,aws-node-termination-handler/spot-itn=120"
    names = ("taints", "annotations", "taintSeconds", "conditions", "labels", "drains")
    none = operator_environment(rendered(tools, *(f"nodeWarnings.{name}=null" for name in names)))
    assert parse_settings([], none).notice_keys == NoticeKeys(frozenset(), frozenset())


def test_no_permission_is_a_wildcard(tools: Tools) -> None:
    documents = rendered(tools)
    for role in of_kind(documents, "ClusterRole") + of_kind(documents, "Role"):
        assert "*" not in json.dumps(role["rules"])


def test_permissions_are_limited_to_the_watched_namespaces(tools: Tools) -> None:
    documents = rendered(tools, "watchNamespaces={a,b}")
    everywhere = {binding["roleRef"]["name"].rpartition("-")[2] for binding in of_kind(documents, "ClusterRoleBinding")}
    assert everywhere == {"definition", "nodes"}
    bound = {
        binding["metadata"]["namespace"]
        for binding in of_kind(documents, "RoleBinding")
        if binding["roleRef"]["kind"] == "ClusterRole"
    }
    assert bound == {"a", "b"}
    (policy,) = of_kind(documents, "ValidatingAdmissionPolicyBinding")
    (where,) = policy["spec"]["matchResources"]["namespaceSelector"]["matchExpressions"]
    assert where["values"] == ["a", "b"]


def test_the_network_policies_of_jobs_admit_the_operators_pods(tools: Tools) -> None:
    (deployment,) = of_kind(rendered(tools, "podLabels.team=x"), "Deployment")
    pod = deployment["spec"]["template"]
    assert OPERATOR_LABELS.items() <= pod["metadata"]["labels"].items()
    (container,) = pod["spec"]["containers"]
    fields = {e["name"]: e["valueFrom"]["fieldRef"]["fieldPath"] for e in container["env"] if "valueFrom" in e}
    assert fields == {"POD_NAME": "metadata.name", "POD_NAMESPACE": "metadata.namespace"}


@pytest.mark.parametrize(("keep", "annotations"), [("true", {"helm.sh/resource-policy": "keep"}), ("false", None)])
def test_the_crd_is_that_of_the_repository(tools: Tools, keep: str, annotations: Any) -> None:
    (crd,) = of_kind(rendered(tools, f"crds.keep={keep}"), "CustomResourceDefinition")
    assert crd["metadata"].pop("annotations", None) == annotations
    assert crd == yaml.safe_load((REPOSITORY / "crds/elasticjobs.yaml").read_text())
    assert not of_kind(rendered(tools, "crds.install=false"), "CustomResourceDefinition")


def test_the_operator_passes_pod_security_restricted(tools: Tools, bare: Kube) -> None:
    (deployment,) = of_kind(rendered(tools), "Deployment")
    namespace = f"restricted-{uuid.uuid4().hex[:5]}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    meta = {"name": namespace, "labels": labels}
    bare.create("namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": meta})
    try:
        spec = deployment["spec"]["template"]["spec"] | {"serviceAccountName": "default"}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "operator"}, "spec": spec}
        bare.create("pods", pod, namespace, dry_run=True)
    finally:
        bare.delete("namespaces", namespace)


# ---- on a cluster


def columns(kube: Kube) -> list[str]:
    crd = kube.request("GET", f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{CRD}")
    return [column["name"] for column in crd["spec"]["versions"][0]["additionalPrinterColumns"]]


def older_chart(folder: Path) -> Path:
    """Return a copy of the chart whose CRD lacks a printer column."""
    chart = folder / "elasticjob"
    shutil.copytree(CHART, chart)
    file = chart / "files/elasticjobs.yaml"
    text = "".join(line for line in file.read_text().splitlines(keepends=True) if "{name: World," not in line)
    assert text != file.read_text()
    file.write_text(text)
    return chart


@pytest.mark.alone
def test_install_upgrade_uninstall(bare: Kube, tools: Tools, cluster_dir: Path, tmp_path: Path) -> None:
    install(bare, cluster_dir)
    name = f"kept-{uuid.uuid4().hex[:5]}"
    suspended = manifest(name, ["python3", "-c", "pass"], preload=[], suspend=True)
    job = bare.create("elasticjobs", suspended, "default")
    try:
        tools.helm("upgrade", RELEASE, str(older_chart(tmp_path)), "-n", SYSTEM)
        assert "World" not in columns(bare)
        tools.helm("upgrade", RELEASE, str(CHART), "-n", SYSTEM)
        assert "World" in columns(bare)

        tools.helm("uninstall", RELEASE, "-n", SYSTEM, "--wait")
        assert bare.find("deployments", RELEASE, SYSTEM) is None
        left = tools.kubectl("get", "clusterroles,clusterrolebindings", "-l", f"app.kubernetes.io/instance={RELEASE}")
        assert "No resources found" in left.output
        kept = bare.get("elasticjobs", name, "default")
        assert kept["metadata"]["uid"] == job["metadata"]["uid"]
        bare.patch("elasticjobs", name, {"spec": {"suspend": False}}, "default")

        install(bare, cluster_dir)
        bare.wait(
            "elasticjobs",
            name,
            "default",
            complete,
            timeout=120,
            what="the job from before the reinstallation completes",
        )
    finally:
        bare.delete("elasticjobs", name, "default")


def complete(job: Json) -> bool:
    conditions = job.get("status", {}).get("conditions", [])
    return any(c["type"] == "Complete" and c["status"] == "True" for c in conditions)


PERMISSIONS = [
    ("create", "pods", "own", "yes"),
    ("update", "elasticjobs.elasticjob.dev/status", "own", "yes"),
    ("update", "elasticjobs.elasticjob.dev", "own", "no"),
    ("list", "events", "own", "yes"),
    ("get", "events", "own", "no"),
    ("delete", "secrets", "own", "no"),
    ("list", "secrets", "own", "no"),
    ("get", "secrets", "default", "no"),
    ("create", "pods", "default", "no"),
    ("list", "elasticjobs.elasticjob.dev", "default", "no"),
    ("get", "leases.coordination.k8s.io", "kube-node-lease", "yes"),
    ("watch", "nodes", "", "yes"),
    ("patch", "nodes", "", "no"),
]
"""Verb, resource, namespace, and whether an operator that watches one namespace has the permission."""


@pytest.fixture
def second(kube: Kube, tools: Tools) -> Iterator[str]:
    """The namespace of a second release, whose operator watches only that namespace."""
    namespace = f"second-{uuid.uuid4().hex[:5]}"
    tools.kubectl("create", "namespace", namespace)
    try:
        settings = ["--set", "crds.install=false", "--set", f"watchNamespaces={{{namespace}}}", "--set", "replicas=1"]
        tools.helm("install", "second", str(CHART), "-n", namespace, *settings, "--wait", "--timeout", "120s")
        yield namespace
    finally:
        tools.helm("uninstall", "second", "-n", namespace, "--wait", check=False)
        tools.kubectl("delete", "namespace", namespace, "--wait=false")


def test_an_operator_of_one_namespace_runs_beside_another(kube: Kube, tools: Tools, second: str) -> None:
    account = f"--as=system:serviceaccount:{second}:second-elasticjob"
    for verb, resource, where, answer in PERMISSIONS:
        scope = ["-n", second if where == "own" else where] if where else []
        kind, _, part = resource.partition("/")
        arguments = ["auth", "can-i", verb, kind, f"--subresource={part}", *scope, account]
        found = tools.kubectl(*arguments, check=False).stdout.strip()
        assert found == answer, f"{verb} {resource} in {where}"
    name = f"shared-{uuid.uuid4().hex[:5]}"
    kube.create("elasticjobs", manifest(name, ["python3", "-c", "pass"], preload=[]), second)
    kube.wait("elasticjobs", name, second, complete, timeout=120, what="the job that two operators reconcile completes")
    tools.helm("uninstall", "second", "-n", second, "--wait")
    everywhere = "clusterroles,clusterrolebindings,validatingadmissionpolicies,roles,rolebindings"
    left = tools.kubectl("get", everywhere, "-A", "-l", "app.kubernetes.io/instance=second")
    assert "No resources found" in left.output

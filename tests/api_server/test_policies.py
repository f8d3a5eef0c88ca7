"""A namespace with policies: store pods are admitted with what they take from the template."""

from __future__ import annotations

import json
import subprocess

from benchmarks.kube_requests import Json
from benchmarks.simulated_pods import NAMESPACE

from api_server.conftest import Cluster
from api_server.test_chart_values import of_kind

RESTRICTED = {
    "allowPrivilegeEscalation": False, "runAsNonRoot": True, "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}  # fmt: skip


def policies() -> list[Json]:
    """Return a policy that every pod has a label of its team, a ServiceAccount with a pull secret, and a priority."""
    pods = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    rule = {"expression": "has(object.metadata.labels) && 'team' in object.metadata.labels", "message": "name a team"}
    admission, name = "admissionregistration.k8s.io/v1", {"name": "teams"}
    return [
        {"apiVersion": admission, "kind": "ValidatingAdmissionPolicy", "metadata": name,
         "spec": {"matchConstraints": {"resourceRules": [pods]}, "validations": [rule]}},
        {"apiVersion": admission, "kind": "ValidatingAdmissionPolicyBinding", "metadata": name,
         "spec": {"policyName": "teams", "validationActions": ["Deny"]}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "trainer", "namespace": NAMESPACE},
         "imagePullSecrets": [{"name": "registry"}]},
        {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "research"},
         "value": 1000},
    ]  # fmt: skip


async def test_a_namespace_with_policies_admits_the_store(cluster: Cluster) -> None:
    cluster.kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": policies()}))

    def refused() -> bool:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", "namespace": NAMESPACE},
               "spec": {"containers": [{"name": "x", "image": "x", "securityContext": RESTRICTED}]}}  # fmt: skip
        try:
            cluster.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))
        except subprocess.CalledProcessError as error:
            return "name a team" in error.stderr
        return False

    await cluster.pods.until("the API server enforces the policy", refused, 60)
    body = cluster.job("policed", 1, 2)
    template = body["spec"]["template"]
    template["metadata"] = {"labels": {"team": "vision", "app": "bert"}}
    template["spec"] |= {"serviceAccountName": "trainer", "priorityClassName": "research"}
    template["spec"]["containers"][0]["securityContext"] = RESTRICTED
    cluster.operator.start()
    await cluster.apply(body)
    await cluster.until_running("policed", 2)
    pods = json.loads(cluster.kubectl("get", "pods", "-n", NAMESPACE, "-o", "json"))["items"]
    stores = [pod for pod in pods if "-rdzv-" in pod["metadata"]["name"]]
    assert stores
    for pod in stores:
        assert (pod["metadata"]["labels"]["team"], "app" in pod["metadata"]["labels"]) == ("vision", False)
        spec = pod["spec"]
        assert (spec["serviceAccountName"], spec["priority"], spec["imagePullSecrets"]) == (
            "trainer", 1000, [{"name": "registry"}],
        )  # fmt: skip
        assert "runAsUser" not in json.dumps(spec)
        assert "serviceAccountToken" not in json.dumps(spec)


async def test_a_cluster_that_requires_a_queue_refuses_jobs_without_one_and_to_leave_it(cluster: Cluster) -> None:
    old, free, queued = (cluster.job(name, 1, 2) for name in ("old", "free", "queued"))
    queued["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team-a"}
    await cluster.apply(old)
    required = {"kueue.requireQueue": True}
    kinds = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
    for document in (d for kind in kinds for d in of_kind(kind, required)):
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(document))

    def tried(*arguments: str, stdin: str = "") -> str:
        try:
            cluster.kubectl(*arguments, "--dry-run=server", stdin=stdin)
        except subprocess.CalledProcessError as error:
            return str(error.stderr)
        return ""

    def refused() -> bool:
        return "this cluster requires a queue" in tried("create", "-f", "-", stdin=json.dumps(free))

    await cluster.pods.until("the API server enforces the policy", refused, 60)
    await cluster.apply(queued)
    job, label = ("elasticjob/queued", "-n", NAMESPACE), "kueue.x-k8s.io/queue-name"
    assert "requires a queue" in tried("label", *job, f"{label}-")
    assert tried("label", *job, f"{label}=team-b", "--overwrite") == ""
    assert tried("label", "elasticjob/old", "-n", NAMESPACE, "note=x") == "", "a job that is older than the policy"


def test_kueue_may_read_the_jobs_whose_workloads_it_has() -> None:
    (role,) = [r for r in of_kind("ClusterRole", {"kueue.enabled": True}) if r["metadata"]["name"].endswith("-kueue")]
    assert [(r["resources"], r["verbs"]) for r in role["rules"]] == [(["elasticjobs"], ["get", "list", "watch"])]
    (binding,) = [
        b for b in of_kind("ClusterRoleBinding", {"kueue.enabled": True}) if b["roleRef"]["name"].endswith("-kueue")
    ]
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": "kueue-controller-manager", "namespace": "kueue-system"}
    ]
    without = {"kueue.enabled": True, "kueue.serviceAccount.name": ""}
    assert not [r for r in of_kind("ClusterRole", without) if r["metadata"]["name"].endswith("-kueue")]

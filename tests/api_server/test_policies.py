"""A namespace with policies: store pods are admitted with what they take from the template."""

from __future__ import annotations

import json
import subprocess

from benchmarks.kube_requests import Json
from benchmarks.simulated_pods import NAMESPACE

from api_server.conftest import Cluster

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

"""The policies of a job on the real cluster.

The API server refuses evictions below minReplicas. The network plugin of the test cluster enforces no NetworkPolicy, so
the test compares what the policy selects with the pods that exist. `tests/network_policies` enforces them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.cluster.install import SYSTEM
from support.cluster.jobs import Job, manifest
from support.cluster.kube import ApiError, Json, Kube

Submit = Callable[[Json], Job]


def evict(kube: Kube, namespace: str, pod: str) -> None:
    """Evict a pod as `kubectl drain` does. Raise ApiError (429) if a PodDisruptionBudget refuses it."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace}}
    kube.request("POST", kube.path("pods", namespace, pod, "/eviction"), body)


def wait_budget(job: Job, *, at_least: int, allowed: int) -> Json:
    """Wait until the budget wants `at_least` pods of three Ready ones, and allows so many evictions."""

    def reached(budget: Json) -> bool:
        status = budget.get("status", {})
        current = status.get("observedGeneration") == budget["metadata"]["generation"]
        numbers = (budget["spec"]["minAvailable"], status.get("currentHealthy"), status.get("disruptionsAllowed"))
        return current and numbers == (at_least, 3, allowed)

    what = f"a budget of {at_least} that allows {allowed}"
    return job.kube.wait("poddisruptionbudgets", job.name, job.namespace, reached, timeout=60, what=what)


def selected(kube: Kube, namespace: str, selector: Json) -> set[str]:
    """Return the names of the pods that the `matchLabels` of a selector select."""
    labels = ",".join(f"{key}={value}" for key, value in selector["matchLabels"].items())
    return {pod["metadata"]["name"] for pod in kube.list("pods", namespace, labels)}


def check_network_policy(job: Job) -> None:
    """Check that the pods of the job accept connections from each other, and stores from the operator."""
    policy = job.kube.get("networkpolicies", job.name, job.namespace)
    (owner,) = policy["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["controller"]) == ("ElasticJob", job.name, True)
    of_job, of_operator = policy["spec"]["ingress"]
    pods = {pod["metadata"]["name"] for pod in job.pods() + job.pods(job.stores)}
    assert selected(job.kube, job.namespace, policy["spec"]["podSelector"]) == pods
    assert of_job == {"from": [{"podSelector": policy["spec"]["podSelector"]}]}
    assert of_operator["ports"] == [{"protocol": "TCP", "port": 29400}]
    (source,) = of_operator["from"]
    assert source["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": SYSTEM}}
    operators = {pod["metadata"]["name"] for pod in job.kube.list("pods", SYSTEM)}
    assert selected(job.kube, SYSTEM, source["podSelector"]) == operators != set()


def test_an_eviction_below_min_replicas_is_refused_and_one_above_is_a_planned_end(
    submit: Submit, kube: Kube, namespace: str
) -> None:
    # The cluster has room for three of the four pods, so the number of Ready pods does not change by itself.
    place = {"nodeSelector": {"kubernetes.io/os": "linux"}, "priorityClassName": "system-cluster-critical"}
    job = submit(
        manifest(
            "guarded", ["python3", "-c", "import signal; signal.pause()"], replicas=4, preload=[],
            elasticPolicy={"minReplicas": 3, "maxReplicas": 4},
            resources={"requests": {"cpu": "1100m", "memory": "64Mi"}}, rendezvous={"store": place},
        )
    )  # fmt: skip
    job.wait_status(worldSize=3)
    budget = wait_budget(job, at_least=3, allowed=0)
    (owner,) = budget["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["controller"]) == ("ElasticJob", "guarded", True)
    job.wait_standby_store(timeout=60)
    check_network_policy(job)
    for store in job.pods(job.stores):
        assert {field: store["spec"][field] for field in place} == place
    evicted = job.running()[0]
    with pytest.raises(ApiError) as refused:
        evict(kube, namespace, evicted)
    assert refused.value.code == 429
    kube.patch("elasticjobs", job.name, {"spec": {"elasticPolicy": {"minReplicas": 2}}}, namespace)
    wait_budget(job, at_least=2, allowed=1)
    before = job.status()["rendezvousRound"]
    evict(kube, namespace, evicted)

    def goes_on(current: Json) -> bool:
        status = current.get("status", {})
        return bool(status.get("rendezvousRound", 0) > before and status.get("worldSize", 0) >= 2)

    after = kube.wait("elasticjobs", job.name, namespace, goes_on, timeout=60, what="a round after the eviction")
    assert (after["status"]["restarts"], after["status"]["lastFailure"]["reason"]) == (0, "EvictionByEvictionAPI")
    assert evicted not in {pod["metadata"]["name"] for pod in job.pods()}
    kube.delete("elasticjobs", job.name, namespace)
    for policies in ("poddisruptionbudgets", "networkpolicies"):
        kube.wait_gone(policies, namespace, job.selector, timeout=60)

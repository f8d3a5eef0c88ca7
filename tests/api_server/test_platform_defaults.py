"""The platform's defaults for jobs, with a real API server: who gets which, a mistake in them, and a change of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.kube_requests import MERGE_PATCH, RequestRefusedError
from benchmarks.simulated_pods import NAMESPACE, jobs_path

from api_server.conftest import Cluster
from elasticjob._runtime.contract.names import Env

HANG = {"progressTimeoutSeconds": 600, "action": "Event"}
CLUSTER: dict[str, Any] = {"preload": ["numpy"], "hangPolicy": HANG}
OTHER = "team-b"


def write(file: Path, **cluster: Any) -> None:
    """Replace the file at once, as the kubelet does."""
    team: dict[str, Any] = {"elasticPolicy": {"spares": 1}, "template": {"spec": {"priorityClassName": "team"}}}
    new = file.with_suffix(".new")
    new.write_text(json.dumps({"cluster": cluster, "namespaces": {NAMESPACE: team}}))
    new.replace(file)


async def defaults_of(cluster: Cluster, name: str, namespace: str = NAMESPACE) -> Any:
    """Return the record in a job's status once it has been started."""
    while True:
        job = await cluster.api.get(f"{jobs_path(namespace)}/{name}")
        if "startTime" in job.get("status", {}):
            return job["status"].get("defaults")


async def logged(cluster: Cluster, sentence: str, times: int = 1) -> None:
    log = cluster.folder / cluster.operator.log
    done = lambda: log.read_text().count(sentence) >= times  # noqa: E731
    await cluster.pods.until(f"the operator logs {sentence!r}", done, 30)


async def test_jobs_have_the_defaults_of_their_start(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    file = cluster.folder / "defaults.yaml"
    write(file, **CLUSTER)
    monkeypatch.setenv("ELASTICJOB_JOB_DEFAULTS", str(file))
    await cluster.api.create_namespace(OTHER)
    team_class = {"metadata": {"name": "team"}, "value": 5}
    await cluster.api.request("POST", "/apis/scheduling.k8s.io/v1/priorityclasses", team_class)
    cluster.operator.start()

    await cluster.apply(cluster.job("one", 1, 2))
    await cluster.until_running("one", 2)
    began = await defaults_of(cluster, "one")
    assert began["cluster"] == CLUSTER
    assert began["fields"] == {
        "preload": "Cluster",
        "hangPolicy": "Cluster",
        "elasticPolicy.spares": "Namespace",
        "template.spec.priorityClassName": "Namespace",
    }
    spare = await cluster.api.get(f"/api/v1/namespaces/{NAMESPACE}/pods/one-2-0")
    variables = {item["name"]: item.get("value") for item in spare["spec"]["containers"][0]["env"]}
    assert (spare["spec"]["priorityClassName"], variables[Env.PRELOAD]) == ("team", "numpy")

    own = cluster.job("own", 1, 2)
    own["spec"] |= {"preload": [], "hangPolicy": {"progressTimeoutSeconds": 60}}
    await cluster.apply(own)
    assert (await defaults_of(cluster, "own"))["fields"].keys() == {
        "elasticPolicy.spares",
        "template.spec.priorityClassName",
    }
    await cluster.apply(cluster.job("other", 1, 2, OTHER))
    fields = {"preload": "Cluster", "hangPolicy": "Cluster"}
    assert await defaults_of(cluster, "other", OTHER) == {"execution": 1, "cluster": CLUSTER, "fields": fields}

    write(file, hangPolicy={"progressTimeoutSeconds": 1})
    await logged(cluster, "defaults.yaml: cluster is refused")
    await cluster.apply(cluster.job("later", 1, 2, OTHER))
    later = await defaults_of(cluster, "later", OTHER)
    assert later["cluster"] == CLUSTER
    assert "progressTimeoutSeconds" in later["problem"]

    write(file, hangPolicy=HANG | {"progressTimeoutSeconds": 900})
    await logged(cluster, "jobs that start from now on", times=2)
    await cluster.apply(cluster.job("last", 1, 2, OTHER))
    assert (await defaults_of(cluster, "last", OTHER))["cluster"]["hangPolicy"]["progressTimeoutSeconds"] == 900
    nodes = [node for name, node in cluster.pods.nodes.items() if name.startswith("one-")]
    await cluster.pods.fail(next(node for node in nodes if node.round is not None))
    restarted = lambda: cluster.pods.jobs["one"]["status"].get("restarts") == 1  # noqa: E731
    await cluster.pods.until("one restart is counted", restarted, 60)
    assert await defaults_of(cluster, "one") == began, "the change reached a job that runs"

    # For the rules of the CRD, what a running job leaves open is the operator's own list, as when they filled it in.
    other = f"{jobs_path(OTHER)}/other"
    with pytest.raises(RequestRefusedError, match="preload may not change while the job runs"):
        await cluster.api.request("PATCH", other, {"spec": {"preload": ["torch"]}}, MERGE_PATCH)
    for same in (["torch", "torch._dynamo"], None):
        await cluster.api.request("PATCH", other, {"spec": {"preload": same}}, MERGE_PATCH)
    assert "status.defaults" in cluster.kubectl("explain", "elasticjob.spec.preload")

"""kubectl apply, diff and edit of a job on which the operator works: nothing that it writes is a difference."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cluster.jobs import Job, manifest
from support.cluster.kube import Json, Kube
from support.cluster.kubectl import Tools

pytestmark = pytest.mark.cluster

COMMAND = ["python3", "-c", "import signal; signal.pause()"]
POLICY = {"minReplicas": 1, "maxReplicas": 2}
MANAGER = "--field-manager=deployer"


@pytest.fixture
def tools(cluster_dir: Path) -> Tools:
    return Tools(cluster_dir / "bin", cluster_dir / "kubeconfig")


def running(tools: Tools, kube: Kube, namespace: str, body: Json, *apply: str) -> Job:
    """Apply a manifest and wait until all nodes of the job train."""
    tools.kubectl("apply", *apply, "-n", namespace, "-f", "-", stdin=json.dumps(body))
    job = Job(kube, namespace, body["metadata"]["name"])
    job.wait("FullyScaled")
    return job


def assert_no_difference(tools: Tools, job: Job, manifest: str, *options: str) -> None:
    """Assert that kubectl diff finds nothing. It reads the job twice: try again if that changes meanwhile."""
    while True:
        before = job.read()["metadata"]["resourceVersion"]
        found = tools.kubectl("diff", *options, "-n", job.namespace, "-f", "-", stdin=manifest, check=False)
        if found.output == "" or job.read()["metadata"]["resourceVersion"] == before:
            assert (found.code, found.output) == (0, "")
            return


def spec_owners(job: Json) -> Iterator[str]:
    """Yield the managers of spec and metadata: all but those that wrote only the status."""
    for entry in job["metadata"]["managedFields"]:
        if entry.get("subresource") != "status":
            yield entry["manager"]


def test_a_job_that_runs_has_no_difference_from_its_manifest(
    tools: Tools, kube: Kube, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Client-side: diff, apply again, a change, and an edit."""
    body = manifest("plain", COMMAND, replicas=1, preload=[], elasticPolicy=POLICY)
    job = running(tools, kube, namespace, body)
    before = job.read()
    text = json.dumps(body)
    assert_no_difference(tools, job, text)
    assert "unchanged" in tools.kubectl("apply", "-n", namespace, "-f", "-", stdin=text).output
    assert job.read()["metadata"]["generation"] == before["metadata"]["generation"]
    assert "finalizers" not in before["metadata"]
    body["spec"] |= {"replicas": 2, "stopGraceSeconds": 2}
    text = json.dumps(body)
    changes = tools.kubectl("diff", "-n", namespace, "-f", "-", stdin=text, check=False)
    assert changes.code == 1
    assert "+  stopGraceSeconds: 2" in changes.output
    assert "configured" in tools.kubectl("apply", "-n", namespace, "-f", "-", stdin=text).output
    monkeypatch.setenv("KUBE_EDITOR", "sed -i 's/maxRestarts: 3/maxRestarts: 5/'")
    assert "edited" in tools.kubectl("edit", "-n", namespace, "ej/plain").output
    spec = job.read()["spec"]
    assert (spec["replicas"], spec["stopGraceSeconds"], spec["failurePolicy"]["maxRestarts"]) == (2, 2, 5)
    job.wait_status(targetReplicas=2, active=2)
    assert_no_difference(tools, job, text)


def test_a_job_is_applied_by_the_server_and_applied_again_without_drift(
    tools: Tools, kube: Kube, namespace: str
) -> None:
    """Server-side: the operator owns no field of spec, so that no apply conflicts; an absent field is removed."""
    spec = {"replicas": 1, "stopGraceSeconds": 2, "elasticPolicy": POLICY, "preload": []}
    body = manifest("gitops", COMMAND, **spec)
    server = ("--server-side", MANAGER)
    job = running(tools, kube, namespace, body, *server)
    before = job.read()
    assert set(spec_owners(before)) == {"deployer"}
    text = json.dumps(body)
    assert_no_difference(tools, job, text, *server)
    for extra in ((), ("--dry-run=server",)):
        tools.kubectl("apply", *server, *extra, "-n", namespace, "-f", "-", stdin=text)
    assert job.read()["metadata"]["generation"] == before["metadata"]["generation"]
    del body["spec"]["stopGraceSeconds"]
    tools.kubectl("apply", *server, "-n", namespace, "-f", "-", stdin=json.dumps(body))
    after = job.read()
    assert after["spec"]["stopGraceSeconds"] == 1
    assert after["metadata"]["generation"] == before["metadata"]["generation"] + 1


def test_replicas_that_an_autoscaler_sets_are_no_drift_of_a_manifest_without_them(
    tools: Tools, kube: Kube, namespace: str
) -> None:
    body = manifest("scaled", COMMAND, replicas=1, preload=[], elasticPolicy=POLICY, suspend=True)
    server = ("--server-side", MANAGER)
    tools.kubectl("apply", *server, "-n", namespace, "-f", "-", stdin=json.dumps(body))
    tools.kubectl("scale", "-n", namespace, "ej/scaled", "--replicas=2")
    refused = tools.kubectl("apply", *server, "-n", namespace, "-f", "-", stdin=json.dumps(body), check=False)
    assert "conflict" in refused.output
    assert ".spec.replicas" in refused.output
    del body["spec"]["replicas"]
    for _ in range(2):
        tools.kubectl("apply", *server, "-n", namespace, "-f", "-", stdin=json.dumps(body))
        assert kube.get("elasticjobs", "scaled", namespace)["spec"]["replicas"] == 2
    assert_no_difference(tools, Job(kube, namespace, "scaled"), json.dumps(body), *server)

"""A job of a fixed size with a spare, and changes of it that the API server refuses or accepts."""

from __future__ import annotations

import copy
import json
import subprocess

from benchmarks.kube_requests import Json
from benchmarks.simulated_pods import NAMESPACE

from api_server.conftest import Cluster


async def test_a_fixed_size_with_a_spare_and_what_may_change(cluster: Cluster) -> None:
    def error(body: Json, *arguments: str) -> str:
        """Apply a manifest, and return why it is refused; empty if it is not."""
        try:
            cluster.kubectl("apply", *arguments, "-f", "-", stdin=json.dumps(body))
        except subprocess.CalledProcessError as refused:
            return str(refused.stderr)
        return ""

    job = cluster.job("fixed", 2, 2)
    job["spec"] |= {"replicas": 2, "elasticPolicy": {"spares": 1, "gracefulShutdownSeconds": 7}}
    cluster.operator.start()
    assert error(job) == ""
    await cluster.until_running("fixed", 2)
    has_spare = lambda: cluster.pods.jobs["fixed"]["status"].get("standby") == 1  # noqa: E731
    await cluster.pods.until("the third pod stands by", has_spare, 60)
    pods = json.loads(cluster.kubectl("get", "pods", "-n", NAMESPACE, "-o", "json"))["items"]
    workers = [p for p in pods if "-rdzv-" not in p["metadata"]["name"]]
    assert len(workers) == 3
    trained = cluster.pods.jobs["fixed"]
    assert trained["spec"]["gang"] == {"provider": "None"}

    def changed(**spec: object) -> Json:
        body = copy.deepcopy(job)
        body["spec"] |= spec
        return body

    dry = ("--dry-run=server",)
    assert "is fixed while it runs" in error(changed(replicas=3), *dry)
    assert error(changed(replicas=3, elasticPolicy={"minReplicas": 1, "maxReplicas": 3}), *dry) == ""
    assert "needs both minReplicas and maxReplicas" in error(changed(elasticPolicy={"minReplicas": 1}), *dry)
    assert error(changed(gang={"provider": "none"}), *dry) == "", "the older spelling is the same provider"
    assert "gang may not change" in error(changed(gang={"provider": "volcano"}), *dry)

    def restarts(field: str, value: object) -> str:
        body = cluster.job("restarts", 1, 2)
        body["spec"]["template"]["spec"]["containers"][0][field] = value
        return error(body, *dry)

    rules = [{"action": "Restart", "exitCodes": {"operator": "In", "values": [1]}}]
    for refused in (restarts("restartPolicy", "Always"), restarts("restartPolicyRules", rules)):
        assert "the trainer container must have no restartPolicyRules, and no restartPolicy but Never" in refused
    assert restarts("restartPolicy", "Never") == ""

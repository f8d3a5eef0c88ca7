"""The fixture itself: a job runs, and its pods go with it."""

from __future__ import annotations

from api_server.conftest import Cluster
from elasticjob_operator.model.job.status_lists import incarnation_ranges


async def test_a_job_trains_and_a_lost_worker_is_replaced(cluster: Cluster) -> None:
    cluster.operator.start()
    await cluster.apply(cluster.job("one", 1, 2))
    await cluster.until_running("one", 2)
    await cluster.pods.fail(cluster.pods.node("one", 1))
    restarted = lambda: cluster.pods.jobs["one"]["status"].get("restarts") == 1  # noqa: E731
    await cluster.pods.until("one restart is counted", restarted, 60)
    assert (await cluster.operator.requests())["get", "secrets"] == 1, "only that of the master key is read"
    assert "one" in cluster.kubectl("get", "ej", "-n", "bench")
    status = cluster.pods.jobs["one"]["status"]
    incarnations = [int(number) for number in status["incarnations"].split(",")]
    assert status["incarnationRanges"] == incarnation_ranges(incarnations)
    assert status["rendezvous"]["lastRound"]["executionAttempt"] == 1
    assert [cause["type"] for cause in status["chargedFailures"]] == ["Round"]

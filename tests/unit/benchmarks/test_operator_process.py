"""The operator's requests, as its metrics have them, and the simulated kubelet's statuses."""

from __future__ import annotations

from collections import Counter

import pytest
from benchmarks.goodput import quantile
from benchmarks.operator_process import by_verb, mutating, parse_requests, share_of_limit, total
from benchmarks.simulated_pods import ended_status, running_status

from elasticjob_operator.model.cluster.pods import parse_pod

METRICS = """
# HELP elasticjob_api_requests_total Requests to the API server.
# TYPE elasticjob_api_requests_total counter
elasticjob_api_requests_total{code="201",resource="pods",verb="create"} 4.0
elasticjob_api_requests_total{code="409",resource="pods",verb="create"} 1.0
elasticjob_api_requests_total{code="200",resource="elasticjobs",verb="get"} 7.0
elasticjob_api_requests_total{code="200",resource="pods",verb="list"} 6.0
elasticjob_api_requests_total{code="201",resource="events",verb="create"} 2.0
elasticjob_api_requests_total{code="200",resource="leases",verb="update"} 90.0
elasticjob_api_requests_total{code="200",resource="leases",verb="get"} 1.0
elasticjob_api_requests_created{code="200",resource="leases",verb="get"} 1.7e+09
elasticjob_jobs{phase="Running"} 3.0
"""


def test_requests_are_counted_by_verb_and_resource_without_the_writes_of_the_lease() -> None:
    found = parse_requests(METRICS)
    assert found == Counter(
        {
            ("create", "pods"): 5,
            ("get", "elasticjobs"): 7,
            ("list", "pods"): 6,
            ("create", "events"): 2,
            ("get", "leases"): 1,
        }
    )
    assert total(found) == 21


def test_requests_that_change_the_api_are_counted_without_events() -> None:
    assert mutating(parse_requests(METRICS)) == 5


def test_the_parts_have_only_what_was_requested() -> None:
    before = Counter({("list", "pods"): 6, ("get", "elasticjobs"): 1})
    after = Counter({("list", "pods"): 6, ("get", "elasticjobs"): 3})
    assert by_verb(after - before) == {"get elasticjobs": 2.0}


@pytest.mark.parametrize(
    ("requests", "seconds", "share"),
    [(200, 0.0, 100.0), (1200, 10.0, 100.0), (600, 10.0, 50.0)],
)
def test_the_share_of_the_limit_counts_the_burst_once(requests: int, seconds: float, share: float) -> None:
    assert share_of_limit(requests, seconds, rate=100.0, burst=200) == pytest.approx(share)


def test_p99_is_a_value_that_was_measured() -> None:
    values = [float(n) for n in range(1, 201)]
    assert quantile(values, 0.99) == 198.0
    assert quantile([3.0], 0.99) == 3.0
    assert quantile([], 0.99) is None


def test_the_operator_reads_the_simulated_statuses_as_a_kubelets() -> None:
    pod = {
        "metadata": {"name": "bert-0-0", "creationTimestamp": "2026-11-23T00:00:00Z", "labels": {}},
        "spec": {"restartPolicy": "Never", "containers": [{"name": "trainer", "image": "i"}]},
    }
    running = parse_pod({**pod, "status": running_status(pod, "127.16.0.2")})
    assert (running.running, running.ready, running.ip) == (True, True, "127.16.0.2")
    killed = parse_pod({**pod, "status": ended_status(pod, 137, '{"round":"1.0.1"}')})
    assert killed.end is not None
    assert (killed.end.signal, str(killed.end.round), killed.ready) == ("SIGKILL", "1.0.1", False)

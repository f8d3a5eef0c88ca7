"""Kubeflow's training-operator beside ours: its metrics, its jobs, and how the report compares both."""

from __future__ import annotations

from collections import Counter

from benchmarks.operator_peer import SIDES, find, parse_client_requests, pytorch_job
from benchmarks.operator_process import total
from benchmarks.report import page
from benchmarks.row import OURS

METRICS = """
# HELP rest_client_requests_total Number of HTTP requests, partitioned by status code, method, and host.
# TYPE rest_client_requests_total counter
rest_client_requests_total{code="200",host="127.0.0.1:6443",method="GET"} 12
rest_client_requests_total{code="201",host="127.0.0.1:6443",method="POST"} 1.6e+01
rest_client_requests_total{code="409",host="127.0.0.1:6443",method="PUT"} 1
workqueue_adds_total{name="pytorchjob-controller"} 9
"""


def test_requests_of_client_go_are_counted_by_method_and_status() -> None:
    found = parse_client_requests(METRICS)
    assert found == Counter({("GET", "200"): 12, ("POST", "201"): 16, ("PUT", "409"): 1})
    assert total(found) == 29


def test_a_job_of_four_pods_has_a_master_and_three_workers() -> None:
    replicas = pytorch_job("job-0", 4)["spec"]["pytorchReplicaSpecs"]
    assert {kind: spec["replicas"] for kind, spec in replicas.items()} == {"Master": 1, "Worker": 3}
    # The controller finds its container by this name.
    assert all(spec["template"]["spec"]["containers"][0]["name"] == "pytorch" for spec in replicas.values())


def test_the_definition_lies_beside_the_program() -> None:
    found = find()
    assert found.definition.name == f"{found.program.name}.yaml"


def test_as_shipped_training_operator_has_no_flags_of_ours_and_a_fifth_of_the_jobs() -> None:
    shipped, *others = SIDES.values()
    assert (shipped.flags, shipped.part) == ((), 0.2)
    assert all(("--qps=100" in side.flags, side.part) == (True, 1.0) for side in others)


def test_the_report_has_the_ratio_to_the_fastest_side_of_training_operator() -> None:
    shipped, in_all, each = SIDES
    sides = {OURS: 30.0, shipped: 10.0, in_all: 20.0, each: 40.0}
    figures = {
        "row": "operator-pods",
        "title": "pods created a second",
        "unit": "/s",
        "want": None,
        "more_is_better": True,
        "note": "",
        "command": "make bench-operator",
        "machine": {"cores": 2, "memory": "8 GB", "torch": "2.9", "python": "3.11", "day": "2026-11-23"},
        "sides": {side: {"median": value, "parts": {}, "samples": []} for side, value in sides.items()},
    }
    text = page([figures], [])
    assert f"| pods created a second ({shipped}: 10 /s; {in_all}: 20 /s; {each}: 40 /s) | **30 /s** |  | 0.8× |" in text

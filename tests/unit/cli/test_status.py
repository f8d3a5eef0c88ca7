"""`elasticjob status`: one screen about a job, from objects as the API server returns them."""

from __future__ import annotations

from elasticjob.cli.objects.pods import line_rank, pod_state, ranks_in_log
from support.cli.fake_api import EVENTS, JOBS, PODS, FakeApi
from support.cli.objects import a_job, a_pod, an_event, condition_of, stamp

from .conftest import Run

FAILURE = {
    "time": stamp(200), "pod": "bert-1-0", "node": "node1", "rank": 3, "class": "OOMKilled", "signal": "SIGKILL",
    "message": "the container reached its limit of 1 GiB",
    "recoverySeconds": {"detect": 0.01, "stop": 0.2, "rendezvous": 0.05, "start": 0.4},
}  # fmt: skip


def a_training_job() -> dict[str, object]:
    job = a_job()
    job["status"] |= {
        "trainerStatus": {
            "step": 120, "progressPercentage": 40, "estimatedRemainingSeconds": 3720,
            "metrics": [{"name": "loss", "value": "0.25"}],
        },
        "goodput": {"productiveSeconds": 990, "lostSeconds": 0.7, "percent": 99},
        "stateTransfer": {"rank": 3, "pod": "bert-1-1", "bytes": 2_000_000_000, "seconds": 1.0},
        "recentFailures": [FAILURE],
        "straggler": {"rank": 2, "pod": "bert-1-1", "node": "node1", "stepSeconds": 0.4, "medianSeconds": 0.1},
    }  # fmt: skip
    return job


def test_one_screen_has_size_progress_pods_with_ranks_rounds_and_failures(api: FakeApi, run: Run) -> None:
    api.lists[JOBS] = [a_training_job()]
    api.lists[PODS] = [a_pod(1, incarnation=1), a_pod(0), a_pod(0, role="store"), a_pod(0, job="other")]
    api.lists[EVENTS] = [an_event("WorldFormed", "round 3: 4 workers"), an_event("Pulled", "not of a round")]
    api.logs["bert-0-0"] = ["2026-01-01T00:00:00Z [agent] bert-0-0: round 1.0.3 formed: 2 pods, ranks 0-1 of 4 here"]
    api.logs["bert-1-1"] = ["2026-01-01T00:00:00Z [default3]:loss 0.3"]
    shown = run("status", "bert")
    assert (shown.code, shown.err) == (0, "")
    for text in (
        "team/bert", "2 of 2 worker pods train (from 1 to 4), 4 workers", "1 restart, 1 of 3 that maxRestarts allows",
        "step 120, 40%, about 1h2m left, loss 0.25", "99%, 0.7 s lost by faults",
        "rank 3 got it last: 2 GB in 1.000 s (2.00 GB/s)",
        "rank 2, bert-1-1 on Node node1",
        "round 3: 4 workers", "OOMKilled  bert-1-0 rank 3 on Node node1, SIGKILL",
        "recovered: detect 0.01 s, stop 0.2 s, rendezvous 0.05 s, start 0.4 s",
    ):  # fmt: skip
        assert text in shown.out
    assert "not of a round" not in shown.out
    assert "\x1b" not in shown.out
    rows = [line.split() for line in shown.out.splitlines() if line.startswith("  bert-")]
    assert [row[:4] for row in rows] == [
        ["bert-0-0", "0-1", "node0", "Running"],
        ["bert-1-1", "2-3", "node1", "Running"],
        ["bert-rdzv-0", "(store)", "node0", "Running"],
    ]


def test_why_a_job_has_failed_is_said_once(api: FakeApi, run: Run) -> None:
    job = a_job()
    job["status"]["warmFork"] = "off on 1 of 2 pods: the program forks"
    kinds = ("FailureTarget", "Failed")
    job["status"]["conditions"] = [condition_of(k, "True", "MaxRestartsExceeded", "3 of 3 restarts") for k in kinds]
    api.lists[JOBS] = [job]
    shown = run("status", "bert").out
    assert shown.count("3 of 3 restarts") == 1
    assert "  warm fork  off on 1 of 2 pods: the program forks" in shown
    del job["status"]["conditions"][1]
    assert "FailureTarget   True   MaxRestartsExceeded" in run("status", "bert").out


def test_json_and_yaml_have_the_same_view(api: FakeApi, run: Run) -> None:
    import yaml

    api.lists[JOBS] = [a_training_job()]
    view = run("status", "bert", "-o", "json").view
    assert (view["name"], view["training"], view["failures"][0]["rank"]) == ("bert", 2, 3)
    assert yaml.safe_load(run("status", "bert", "-o", "yaml").out) == view


def test_a_user_who_may_read_only_jobs_still_sees_the_job(api: FakeApi, run: Run) -> None:
    api.lists[JOBS] = [a_job()]
    api.refused = {"/api/v1/": (403, 'pods is forbidden: User "eve" cannot list resource "pods"')}
    shown = run("status", "bert")
    assert shown.code == 0
    assert "2 of 2 worker pods train" in shown.out
    assert "not shown: you may not list pods: pods is forbidden" in shown.err


def test_without_a_name_it_lists_the_jobs(api: FakeApi, run: Run) -> None:
    assert "no ElasticJobs in namespace team" in run("status").out
    api.lists[JOBS] = [a_job(), a_job("gpt", status={})]
    rows = [line.split() for line in run("status").out.splitlines()]
    assert rows[1][:5] == ["bert", "Running", "2/2", "4", "1"]
    assert rows[2][:3] == ["gpt", "no", "status"]
    api.lists["/apis/elasticjob.dev/v1alpha1/elasticjobs"] = api.lists[JOBS]
    assert run("status", "-A").out.splitlines()[1].split()[0] == "team"


def test_the_state_of_a_pod_says_what_it_waits_for() -> None:
    waiting = {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}, "name": "trainer"}
    failed_init = {"name": "init", "state": {"terminated": {"exitCode": 2, "reason": "Error", "message": "no disk"}}}
    scheduling = condition_of("PodScheduled", "False", "Unschedulable", "0/3 nodes are available")
    ended = {"name": "trainer", "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}
    deleted = a_pod(0)
    deleted["metadata"]["deletionTimestamp"] = stamp()
    for pod, state in (
        (a_pod(0), ("Running", "")),
        (a_pod(0, phase="Pending", containerStatuses=[waiting]), ("ImagePullBackOff", "no such image")),
        (a_pod(0, phase="Pending", initContainerStatuses=[failed_init]), ("Init:Error", "no disk")),
        (a_pod(0, phase="Pending", conditions=[scheduling]), ("Unschedulable", "0/3 nodes are available")),
        (a_pod(0, phase="Failed", containerStatuses=[ended]), ("OOMKilled (137)", "")),
        (a_pod(0, conditions=[condition_of("Ready", "False", "")]), ("NotReady", "")),
        (deleted, ("Terminating", "")),
    ):
        assert pod_state(pod) == state


def test_ranks_come_from_the_newest_line_that_names_one() -> None:
    formed = "[agent] bert-0-0: round 1.0.2 formed: 2 pods, ranks 2-3 of 4 here"
    assert ranks_in_log(["[default7]:old", formed, "[agent] bert-0-0: workers start"], a_pod(0)) == (2, 3)
    assert ranks_in_log([formed, "[default1]:new"], a_pod(0)) == (0, 1)
    assert ranks_in_log(["nothing"], a_pod(0)) is None
    assert line_rank("[actor12]:x", "actor1") == 2
    assert line_rank("[agent] bert-0-0: x") is None

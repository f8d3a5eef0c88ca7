"""Jobs that fail or cannot start: their status names the reason."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

from cluster import verbs
from support.cluster.images import renamed
from support.cluster.jobs import DIGITS, Job, manifest
from support.cluster.kube import Json, Kube, condition

Submit = Callable[[Json], Job]


def test_a_script_that_raises_exhausts_max_restarts(submit: Submit) -> None:
    script = (
        "import os\n"
        "if os.environ['RANK'] == '1':\n"
        "    raise ValueError('the learning rate is negative')\n"
        "import time; time.sleep(3600)\n"
    )
    job = submit(
        manifest("raises", ["python3", "-c", script], replicas=2, preload=[], failurePolicy={"maxRestarts": 2})
    )
    failed = condition(job.wait("Failed"), "Failed")
    assert failed["reason"] == "MaxRestartsExceeded"
    status = job.status()
    failure = status["lastFailure"]
    assert (failure["exception"], failure["rank"], failure["pod"]) == ("ValueError", 1, "raises-1-0")
    assert "the learning rate is negative" in failure["message"]
    assert (status["restarts"], status["phase"]) == (2, "Failed")
    job.wait_events("MaxRestartsExceeded")


def test_rules_decide_by_exit_code_what_a_failure_counts(submit: Submit) -> None:
    script = (
        "import os, pathlib, sys, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    time.sleep(3600)\n"
        "first = pathlib.Path('/tmp/first-round')\n"
        "if first.exists():\n"
        "    sys.exit(2)\n"
        "first.touch()\n"
        "sys.exit(3)\n"
    )
    flaky = {"operator": "In", "values": [3]}
    rules = [
        {"name": "flaky", "action": "RestartGroupAndIgnoreMaxRestarts", "onExitCodes": flaky},
        {"name": "user-error", "action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [1]}},
    ]
    policy = {"maxRestarts": 0, "rules": rules}
    job = submit(manifest("rules", ["python3", "-c", script], replicas=2, preload=[], failurePolicy=policy))
    failed = condition(job.wait("Failed"), "Failed")
    assert failed["reason"] == "FailurePolicyRule"
    assert "rule user-error matched: rank 1 in rules-1-0" in failed["message"]
    status = job.status()
    matched = [(f["exitCode"], f["rule"], f["action"]) for f in status["recentFailures"]]
    assert matched == [(3, "flaky", "RestartGroupAndIgnoreMaxRestarts"), (2, "user-error", "FailJob")]
    assert status["lastFailure"]["rule"] == "user-error"
    assert (status["restarts"], status["restartsCountTowardsMax"], status["rendezvousRound"]) == (1, 0, 2)
    job.wait_events("FailurePolicyMatched")


def test_a_rule_replaces_the_pod_of_a_failed_worker_on_another_node(submit: Submit, shared_dir: str) -> None:
    script = (
        "import os, pathlib, sys, time\n"
        "failed = pathlib.Path('/shared/failed')\n"
        "if os.environ['RANK'] == '1' and not failed.exists():\n"
        "    failed.touch()\n"
        "    sys.exit(3)\n"
        "time.sleep(3600)\n"
    )
    codes = {"operator": "In", "values": [3]}
    rule = {"name": "bad-machine", "action": "ReplacePodAndAvoidNode", "onExitCodes": codes}
    job = submit(
        manifest(
            "moved", ["python3", "-c", script], replicas=2, preload=[],
            failurePolicy={"maxRestarts": 1, "rules": [rule]},
            volumes=[{"name": "shared", "hostPath": {"path": shared_dir}}],
            mounts=[{"name": "shared", "mountPath": "/shared"}],
        )
    )  # fmt: skip
    status = job.wait_world(2, after=1, timeout=60)
    failure, (avoided,) = status["lastFailure"], status["avoidedNodes"]
    assert (failure["pod"], failure["rule"], failure["action"]) == ("moved-1-0", rule["name"], rule["action"])
    assert (avoided["name"], avoided["reason"]) == (failure["node"], "FailurePolicyMatched")
    assert (status["incarnations"], status["restarts"], status["restartsCountTowardsMax"]) == ("0,1", 1, 1)
    (moved,) = [pod for pod in job.pods() if pod["metadata"]["name"] == "moved-1-1"]
    assert moved["spec"]["nodeName"] != failure["node"]


def test_restarts_before_the_restart_window_do_not_count(submit: Submit) -> None:
    script = (
        "import pathlib, sys, time\n"
        "time.sleep(2)\n"
        "rounds = pathlib.Path('/tmp/rounds')\n"
        "with rounds.open('a') as f:\n"
        "    f.write('x')\n"
        "sys.exit(1 if rounds.stat().st_size < 4 else 0)\n"
    )
    policy = {"maxRestarts": 1, "restartWindowSeconds": 1}
    job = submit(manifest("window", ["python3", "-c", script], replicas=1, preload=[], failurePolicy=policy))
    job.wait("Complete")
    status = job.status()
    assert (status["restarts"], status["restartsCountTowardsMax"], status["restartWindow"]["count"]) == (3, 1, 1)


def test_a_failing_livenessprobe_exhausts_max_restarts(submit: Submit) -> None:
    probe = {"exec": {"command": ["false"]}, "periodSeconds": 1, "failureThreshold": 1, "initialDelaySeconds": 3}
    body = manifest(
        "unhealthy", ["python3", "-c", "import time; time.sleep(3600)"], replicas=1, preload=[],
        failurePolicy={"maxRestarts": 1},
    )  # fmt: skip
    body["spec"]["template"]["spec"]["containers"][0]["livenessProbe"] = probe
    job = submit(body)
    failed = condition(job.wait("Failed"), "Failed")
    assert failed["reason"] == "MaxRestartsExceeded"
    status = job.status()
    failure = status["lastFailure"]
    assert (failure["reason"], failure["class"], failure["exitCode"]) == ("Unhealthy", "Killed", 143)
    assert "Liveness probe failed" in failure["message"]
    assert status["restarts"] == 1


def test_the_deadline_of_the_template_is_a_failure_that_rules_match(submit: Submit) -> None:
    rule = {"name": "too-long", "action": "FailJob", "onReasons": ["DeadlineExceeded"]}
    body = manifest(
        "long", ["python3", "-c", "import time; time.sleep(3600)"], replicas=1, preload=[],
        failurePolicy={"rules": [rule]},
    )  # fmt: skip
    body["spec"]["template"]["spec"]["activeDeadlineSeconds"] = 15
    job = submit(body)
    failed = condition(job.wait("Failed"), "Failed")
    assert (failed["reason"], job.status()["lastFailure"]["rule"]) == ("FailurePolicyRule", "too-long")


def test_a_failed_poststart_hook_is_named(submit: Submit) -> None:
    body = manifest(
        "hook", ["python3", "-c", "import time; time.sleep(3600)"], replicas=1, preload=[],
        failurePolicy={"maxRestarts": 0},
    )  # fmt: skip
    body["spec"]["template"]["spec"]["containers"][0]["lifecycle"] = {"postStart": {"exec": {"command": ["false"]}}}
    job = submit(body)
    job.wait("Failed")
    assert job.status()["lastFailure"]["reason"] == "FailedPostStartHook"


def test_finished_ranks_run_again_when_another_fails(submit: Submit, shared_dir: str) -> None:
    script = (
        "import os, pathlib\n"
        "here = pathlib.Path('/checkpoint')\n"
        "rank = os.environ['RANK']\n"
        "with (here / f'runs-{rank}').open('a') as f:\n"
        "    f.write('x')\n"
        "if rank == '1':\n"
        "    import time\n"
        "    while not (here / 'runs-0').exists():\n"
        "        time.sleep(0.05)\n"
        "    time.sleep(1)\n"
        "    if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "        raise SystemExit(3)\n"
    )
    job = submit(
        manifest(
            "again", ["python3", "-c", script], replicas=2, preload=[],
            volumes=[{"name": "c", "hostPath": {"path": shared_dir}}],
            mounts=[{"name": "c", "mountPath": "/checkpoint"}],
        )
    )  # fmt: skip
    job.wait("Complete")
    runs = {p.name: p.read_text() for p in Path(shared_dir).iterdir()}
    assert runs == {"runs-0": "xx", "runs-1": "xx"}
    assert job.status()["restarts"] == 1
    assert job.status()["lastFailure"]["exitCode"] == 3


def test_a_job_waits_for_an_image_that_does_not_exist_yet(submit: Submit, tmp_path: Path) -> None:
    image = f"elasticjob-late:{uuid.uuid4().hex[:8]}"  # unique, because nodes keep the images of earlier runs
    job = submit(manifest("late", ["python3", "-c", "print('here')"], image=image, replicas=1, preload=[]))
    waiting = condition(job.wait("Running", status="False", reason="ImagePullFailed"), "Running")
    assert image in waiting["message"]
    verbs.load(renamed("elasticjob", image, tmp_path))
    job.wait("Complete", timeout=400)


def test_a_job_waits_for_a_volume_that_does_not_exist_yet(submit: Submit, kube: Kube, namespace: str) -> None:
    data = {"name": "data", "configMap": {"name": "late-data"}}
    job = submit(
        manifest("mount", ["cat", "/data/x"], replicas=1, preload=[], volumes=[data],
                 mounts=[{"name": "data", "mountPath": "/data"}])
    )  # fmt: skip
    waiting = condition(job.wait("Running", status="False", reason="PodStartFailed"), "Running")
    for part in ("mount-0-0 does not start: FailedMount", 'configmap "late-data" not found', "Create what is missing"):
        assert part in waiting["message"]
    kube.create("configmaps", {"metadata": {"name": "late-data"}, "data": {"x": "here"}}, namespace)
    job.wait("Complete", timeout=300)  # its kubelet tries again after 2 minutes at the latest


def test_a_failing_init_container_is_tried_again_and_then_fails_the_job(submit: Submit) -> None:
    body = manifest(
        "setup", ["python3", "-c", "print('here')"], replicas=2, preload=[], failurePolicy={"maxStartFailures": 2}
    )
    script = "import sys; print('downloading', flush=True); sys.exit('no such bucket: s3://data')"
    setup = {"name": "download", "image": DIGITS, "command": ["python3", "-c", script]}
    body["spec"]["template"]["spec"]["initContainers"] = [setup]
    job = submit(body)
    waiting = condition(job.wait("Running", status="False", reason="PodStartFailed"), "Running")
    for part in ("download", "exit code 1", "no such bucket: s3://data", "1 of 2 attempts"):
        assert part in waiting["message"]
    failed = condition(job.wait("Failed"), "Failed")
    assert failed["reason"] == "MaxStartFailuresExceeded"
    assert "no such bucket: s3://data" in failed["message"]
    status = job.status()
    assert (status["lastFailure"]["class"], status["startFailures"], status["restarts"]) == ("StartError", 2, 0)
    job.wait_events("PodStartFailed")


def test_pods_that_run_out_of_memory_together_are_one_restart(submit: Submit) -> None:
    script = (
        "import os, time\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    time.sleep(2)\n"
        "    x = b'x' * 2 ** 31\n"
    )
    resources = {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"memory": "256Mi"}}
    job = submit(
        manifest("oom", ["python3", "-c", script], replicas=3, preload=[], resources=resources,
                 failurePolicy={"maxRestarts": 1})
    )  # fmt: skip
    job.wait("Complete")
    status = job.status()
    assert status["restarts"] == 1
    messages = [failure["message"] for failure in status["recentFailures"] if failure["class"] == "OOMKilled"]
    assert messages
    assert all("at the container's memory limit of 256Mi" in message for message in messages)


def test_all_pods_of_a_failed_round_are_replaced_with_the_strategy_recreate(submit: Submit) -> None:
    script = "import os, sys; sys.exit(os.environ['RANK'] == '1' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')"
    job = submit(manifest("anew", ["python3", "-c", script], replicas=2, preload=[], restartStrategy="Recreate"))
    job.wait("Complete")
    status = job.status()
    assert (status["incarnations"], status["restarts"], status["restartsCountTowardsMax"]) == ("1,1", 1, 1)
    assert status["lastFailure"]["pod"] == "anew-1-0"
    assert "RestartedInPlace" not in job.wait_events("Completed")

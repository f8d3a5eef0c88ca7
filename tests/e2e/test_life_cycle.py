"""Suspend and resume, the deadline, and what is left of a job after its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime

import pytest

from cluster import verbs
from support.cluster.jobs import Job, end_soon, manifest, slow_restartable
from support.cluster.kube import Json, Kube, condition
from support.cluster.logbook import LogBook

Submit = Callable[[Json], Job]
Follow = Callable[[Job], LogBook]


def test_a_job_is_suspended_changed_and_resumed_without_a_lost_step(
    submit: Submit, follow: Follow, kube: Kube, namespace: str, shared_dir: str
) -> None:
    job = submit(slow_restartable(kube, namespace, shared_dir))
    book = follow(job)
    book.wait_step(30, timeout=120)
    template = job.read()["spec"]["template"]
    template["spec"]["containers"][0]["env"] = [{"name": "SECOND", "value": "yes"}]
    kube.patch("elasticjobs", job.name, {"spec": {"suspend": True, "template": template}}, namespace)
    job.wait("Suspended", reason="SuspendedByUser")
    for plural in ("pods", "services"):
        kube.wait_gone(plural, namespace, job.selector, timeout=90)
    assert job.status()["phase"] == "Suspended"
    first = job.status()["keyId"]
    book.wait_read()
    last = max(step.step for step in book.steps)
    kube.patch("elasticjobs", job.name, {"spec": {"suspend": False}}, namespace)
    job.wait("Suspended", status="False", reason="Resumed")
    book.wait_step(last + 30, timeout=120)
    again = [step.step for step in book.steps if step.pod.endswith("-1")]
    assert min(again) == last + 1
    status = job.wait("FullyScaled")["status"]
    assert (status["executionAttempts"], status["restarts"]) == (2, 0)
    key_ids = first, status["keyId"]
    keys = [kube.get("secrets", f"restartable-rdzv-{key_id}", namespace)["data"] for key_id in key_ids]
    assert not {*keys[0].values()} & {*keys[1].values()}
    pod = kube.get("pods", job.running()[0], namespace)
    assert {"name": "SECOND", "value": "yes"} in pod["spec"]["containers"][0]["env"]
    end_soon(shared_dir)
    job.wait("Complete", timeout=180)


@pytest.mark.alone
def test_a_suspended_job_does_not_wait_for_a_pod_on_a_lost_node(submit: Submit, kube: Kube, namespace: str) -> None:
    command = ["python3", "-c", "import signal; signal.pause()"]
    # Much sooner than the 40 s after which a node whose kubelet is silent counts as down.
    limits = {"podTerminationTimeoutSeconds": 2, "stopGraceSeconds": 0}
    policy = {"minReplicas": 1, "maxReplicas": 2, "gracefulShutdownSeconds": 0}
    body = manifest("stuck", command, preload=[], elasticPolicy=policy, **limits)
    body["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 5
    job = submit(body)
    job.wait_status(worldSize=2)
    victim = job.node_of("stuck-1-0")
    try:
        verbs.cut(victim)
        kube.patch("elasticjobs", job.name, {"spec": {"suspend": True}}, namespace)
        kube.wait_gone("services", namespace, job.selector, timeout=90)
        assert "deletionTimestamp" in kube.get("pods", "stuck-1-0", namespace)["metadata"]
    finally:
        verbs.heal(victim)


def test_a_job_ends_at_its_deadline_and_is_deleted(submit: Submit, kube: Kube, namespace: str) -> None:
    command = ["python3", "-c", "import signal; signal.pause()"]
    spec = {"cleanPodPolicy": "All", "ttlSecondsAfterFinished": 10}
    job = submit(manifest("late", command, replicas=1, preload=[], **spec))
    started = datetime.fromisoformat(job.wait("Running", timeout=60)["status"]["startTime"]).timestamp()
    deadline = int(time.time() - started) + 5
    kube.patch("elasticjobs", job.name, {"spec": {"activeDeadlineSeconds": deadline}}, namespace)
    failed = job.wait("Failed", reason="DeadlineExceeded", timeout=60)
    assert f"spec.activeDeadlineSeconds is {deadline}" in str(failed["status"]["conditions"])
    kube.wait_gone("pods", namespace, job.workers, timeout=90)
    job.read()  # its pods were not deleted with the job
    kube.wait_gone("elasticjobs", namespace, "", timeout=60)


def test_the_success_of_one_node_completes_a_job_whose_success_policy_is_any(submit: Submit) -> None:
    script = "import os, time; time.sleep(600 if os.environ['RANK'] == '1' else 1)"
    job = submit(manifest("first", ["python3", "-c", script], replicas=2, preload=[], successPolicy="Any"))
    done = condition(job.wait("Complete"), "Complete")
    assert done["reason"] == "SuccessPolicy"
    assert job.status()["restarts"] == 0

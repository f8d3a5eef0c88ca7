"""`elasticjob why`: the likely cause and the next command, from what the cluster shows."""

from __future__ import annotations

import time
from typing import Any

import pytest

from elasticjob.cli.verbs.why.causes import likely_causes
from elasticjob.cli.verbs.why.circumstances import Circumstances
from support.cli.fake_api import JOBS, PODS, FakeApi
from support.cli.objects import a_job, a_pod, an_event, condition_of, stamp

from .conftest import Run


def job_with(*conditions: Any, **status: Any) -> dict[str, Any]:
    job = a_job()
    job["status"] |= {"conditions": list(conditions), **status}
    return job


def causes(job: dict[str, Any], **around: Any) -> list[dict[str, str]]:
    return likely_causes(Circumstances(job, time.time(), **around))


NOT_RUNNING = condition_of("Running", "False", "Unschedulable", "bert-0-0 is unschedulable")
TRAINS = condition_of("Running", "True", "WorldFormed")


def waiting_pod(reason: str, message: str, container: str = "trainer") -> dict[str, Any]:
    state = {"name": container, "state": {"waiting": {"reason": reason, "message": message}}}
    kind = "containerStatuses" if container == "trainer" else "initContainerStatuses"
    pod = a_pod(0, phase="Pending")
    pod["status"] |= {"containerStatuses": [], kind: [state]}
    return pod


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        ("0/3 nodes are available: 3 Insufficient nvidia.com/gpu.", "free GPUs"),
        ("0/3 nodes are available: 3 Insufficient cpu.", "ask for less"),
        ("0/3 nodes are available: 3 node(s) had untolerated taint {gpu: }", "toleration"),
        ("0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector.", "--show-labels"),
        ('persistentvolumeclaim "data" not found', "kubectl get pvc"),
    ],
)
def test_the_scheduler_says_why(message: str, advice: str) -> None:
    scheduling = condition_of("PodScheduled", "False", "Unschedulable", message)
    down = {"metadata": {"name": "node3"}, "status": {"conditions": [condition_of("Ready", "Unknown", "")]}}
    up = {"metadata": {"name": "node1"}, "status": {"conditions": [condition_of("Ready", "True", "")]}}
    pod = a_pod(0, phase="Pending", containerStatuses=[], conditions=[scheduling])
    (cause,) = causes(job_with(NOT_RUNNING), pods=[pod], nodes=[up, down])
    assert "the job does not train: the scheduler finds no Node for 1 pod of the job (bert-0-0)" in cause["what"]
    assert cause["evidence"] == f"{message} (Nodes not ready: node3)"
    assert advice in cause["next"]


def test_images_containers_and_volumes() -> None:
    failed = condition_of("Running", "False", "ImagePullFailed")
    (cause,) = causes(job_with(failed), pods=[waiting_pod("ErrImagePull", "no such tag")])
    assert (cause["evidence"], "cannot pull its image" in cause["what"]) == ("no such tag", True)
    (cause,) = causes(job_with(failed), pods=[waiting_pod("ImagePullBackOff", "x", "elasticjob-agent")])
    assert "image.repository" in cause["next"]
    failed = condition_of("Running", "False", "PodStartFailed")
    (cause,) = causes(job_with(failed), pods=[waiting_pod("CreateContainerConfigError", 'configmap "c" not found')])
    assert "create the ConfigMap" in cause["next"]
    mount = an_event("FailedMount", "volume data: not found", name="bert-0-0", kind="Pod", type_="Warning")
    (cause,) = causes(job_with(failed), pods=[waiting_pod("ContainerCreating", "")], events=[mount])
    assert cause["evidence"] == "volume data: not found"


def test_quota_and_queue() -> None:
    refused = condition_of("Running", "False", "QuotaExceeded", "exceeded quota: team")
    quota = {"metadata": {"name": "team"}, "status": {"hard": {"pods": "4"}, "used": {"pods": "4"}}}
    (cause,) = causes(job_with(refused), quotas=[quota])
    assert cause["evidence"] == "exceeded quota: team (ResourceQuota team: pods 4 of 4)"
    queued = job_with(condition_of("Suspended", "True", "SuspendedByQueue", "waits"))
    queued["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "research"}
    workload = {
        "metadata": {"name": "w", "ownerReferences": [{"uid": "uid-bert"}]},
        "status": {"conditions": [condition_of("QuotaReserved", "False", "Pending", "insufficient quota for gpu")]},
    }
    (cause,) = causes(queued, workloads=[workload])
    assert cause["what"] == "the queue research has not admitted the job"
    assert cause["evidence"] == "waits Workload w: insufficient quota for gpu"


def test_a_job_that_starts_leads_to_its_logs() -> None:
    (cause,) = causes(job_with(condition_of("Running", "False", "WaitingForMinReplicas", "0 of 2 are ready")))
    assert cause["next"].startswith("elasticjob logs bert -f")


def test_what_is_on_purpose_and_what_has_ended() -> None:
    (cause,) = causes(job_with(condition_of("Suspended", "True", "SuspendedByUser", "nothing is left")))
    assert cause["next"] == "elasticjob resume bert"
    (cause,) = causes(job_with(condition_of("Complete", "True", "AllAgentsSucceeded")))
    assert "succeeded" in cause["what"]
    failed = condition_of("Failed", "True", "MaxRestartsExceeded", "3 restarts")
    failure = {"class": "OOMKilled", "pod": "bert-1-0", "rank": 3, "message": "first\nlimit of 1 GiB"}
    (cause,) = causes(job_with(failed, NOT_RUNNING, lastFailure=failure))
    assert "MaxRestartsExceeded" in cause["what"]
    assert cause["evidence"] == "3 restarts. The last failure: OOMKilled of bert-1-0 rank 3: limit of 1 GiB"
    assert "raise resources.limits.memory" in cause["next"]


def test_a_broken_collective_leads_to_the_failure_that_may_be_its_cause() -> None:
    broken = {"class": "CollectiveFailed", "pod": "bert-0-0", "rank": 0, "message": "Connection closed by peer"}
    raised = {"class": "UserError", "pod": "bert-1-0", "rank": 1, "message": "the learning rate is negative"}
    failed = condition_of("Failed", "True", "MaxRestartsExceeded", "last failure: rank 0: Connection closed by peer.")
    (cause,) = causes(job_with(failed, lastFailure=broken, recentFailures=[raised, broken]))
    assert cause["evidence"] == (
        "last failure: rank 0: Connection closed by peer. An earlier failure may have caused it: UserError of"
        " bert-1-0 rank 1: the learning rate is negative"
    )
    assert "elasticjob logs" in cause["next"]


def test_a_job_that_no_operator_has_seen() -> None:
    job = a_job(status={})
    (cause,) = causes(job)
    assert "no operator has seen the job" in cause["what"]
    job["metadata"]["creationTimestamp"] = stamp(1)
    assert "is new" in causes(job)[0]["what"]
    job["spec"]["managedBy"] = "kueue.x-k8s.io/multikueue"
    assert "managed by kueue.x-k8s.io/multikueue" in causes(job)[0]["what"]


def test_a_job_that_trains_but_not_as_it_should() -> None:
    missing = condition_of("FullyScaled", "False", "BelowDesiredAboveMin", "a replacement starts")
    (cause,) = causes(job_with(TRAINS, missing, active=1))
    assert cause["what"].startswith("the job trains with 1 of 2 worker pods (BelowDesiredAboveMin)")
    slow = {
        "straggler": {"rank": 2, "pod": "bert-1-0", "stepSeconds": 0.4, "medianSeconds": 0.1},
        "trainerStatus": {"step": 3, "lastUpdatedTime": stamp(4000)},
        "goodput": {"percent": 70}, "recentFailures": [{"time": stamp(60), "class": "Hang", "pod": "bert-0-0"}],
        "warmFork": "2 pods: a thread runs",
    }  # fmt: skip
    found = causes(job_with(TRAINS, condition_of("RendezvousReady", "False", "StoreLost"), **slow))
    steps = [cause["next"].split()[1] for cause in found]
    assert steps == ["get", "drain", "stacks", "status", "explain"]
    blind = job_with(TRAINS, hangGuard="no worker has reported a step")
    assert causes(blind) == [], "torch's time-out guards it"
    blind["spec"]["hangPolicy"] = {"progressTimeoutSeconds": 300}
    (cause,) = causes(blind)
    assert (cause["evidence"], cause["next"]) == ("no worker has reported a step", "elasticjob explain NoStepsReported")
    stuck = a_pod(1)
    stuck["metadata"]["deletionTimestamp"] = stamp(300)
    (_, cause) = causes(job_with(TRAINS, missing), pods=[stuck])
    assert "should have ended 5m ago" in cause["what"]
    assert "kubectl taint node node1" in cause["next"]


def test_a_healthy_job_and_a_user_who_may_not_read_nodes(api: FakeApi, run: Run) -> None:
    api.lists[JOBS], api.lists[PODS] = [a_job()], [a_pod(0), a_pod(1)]
    api.refused = {"/api/v1/nodes": (403, "nodes is forbidden")}
    shown = run("why", "bert")
    assert (shown.code, shown.err) == (0, "")
    assert "bert trains at full size" in shown.out
    assert "not read: nodes: you may not list nodes" in shown.out
    assert "resourcequotas" not in shown.out
    assert run("why", "bert", "-o", "json").view["phase"] == "Running"

"""Pods whose volumes or network are missing: what only Events of their kubelets report."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from elasticjob._runtime.contract.names import Role
from elasticjob_operator.kube import EVENTS, Page, Refused, Resource
from elasticjob_operator.model.cluster.pods import Pod, parse_pod
from elasticjob_operator.observation.start_warnings import FIRST_READ, LONGEST_INTERVAL, MAX_EVENT_PAGES, StartWarnings
from support.operator.build import NOW, worker
from support.operator.cluster import Cluster

READY_TO_START = {"type": "PodReadyToStartContainers", "status": "True"}
CREATING = {"state": {"waiting": {"reason": "ContainerCreating"}}}


def creating(index: int, **more: Any) -> Pod:
    return worker(index, **{"phase": "Pending", "container": CREATING, **more})


def event(pod: Pod, reason: str, message: str, at: str = "2026-01-01T00:00:00Z", **more: Any) -> dict[str, Any]:
    """Return an Event of a kubelet, as `kubectl get events -o json` shows it."""
    involved = {"kind": "Pod", "uid": pod.uid}
    name = f"{pod.name}.{reason}.{at}"
    return {
        "metadata": {"name": name}, "involvedObject": involved, "type": "Warning", "reason": reason,
        "message": message, "lastTimestamp": at, **more,
    }  # fmt: skip


def test_a_pod_without_its_volume_is_stuck_with_the_newest_warning() -> None:
    pods = creating(0), creating(1), worker(2)
    warnings = StartWarnings()
    warnings.take(pods, NOW)
    assert warnings.next_reads() == (NOW + FIRST_READ,)
    warnings.record(
        [
            event(pods[1], "FailedMount", 'secret "b" not found', "2026-01-01T00:00:09Z"),
            event(pods[1], "FailedMount", 'secret "a" not found', "2026-01-01T00:00:03Z"),
            event(pods[1], "Unhealthy", "probe failed", "2026-01-01T00:02:00Z"),
            event(pods[2], "FailedMount", "long ago"),
        ],
        NOW + FIRST_READ,
    )
    assert [pod.stuck for pod in warnings.applied(pods)] == ["", 'FailedMount: secret "b" not found', ""]
    warnings.take(pods[::2], NOW + 11)
    assert warnings.applied(pods[::2]) == pods[::2]


def test_events_are_read_less_and_less_often_while_a_pod_waits() -> None:
    warnings, now, delays = StartWarnings(), NOW, []
    warnings.take([creating(0)], now)
    for _ in range(40):
        (due,) = warnings.next_reads()
        warnings.record([], due)
        delays.append(due - now)
        now = due
    assert delays == sorted(delays)
    assert (delays[0], delays[-1]) == (FIRST_READ, LONGEST_INTERVAL)


@pytest.mark.parametrize(
    "pod",
    [
        pytest.param(creating(0, conditions=[READY_TO_START]), id="its image is pulled"),
        pytest.param(creating(0, node=""), id="not scheduled"),
        pytest.param(creating(0, deleting=NOW + 30), id="deleted"),
        pytest.param(worker(0), id="runs"),
        pytest.param(
            creating(0, container={"state": {"waiting": {"reason": "ErrImagePull", "message": "no"}}}), id="known"
        ),
    ],
)
def test_no_events_are_read_about_other_pods(pod: Pod) -> None:
    warnings = StartWarnings()
    warnings.take([pod], NOW)
    assert warnings.next_reads() == ()
    warnings.record([event(pod, "FailedMount", "no")], NOW)
    assert warnings.applied([pod]) == (pod,)


@pytest.mark.parametrize("readable", [True, False])
async def test_a_job_whose_volume_is_missing_says_so_until_it_is_there(
    readable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster()
    await cluster.reconcile()
    raws = cluster.api.pods(Role.WORKER)
    for raw in raws:
        raw["spec"]["nodeName"], raw["status"] = "n1", {"phase": "Pending"}
        cluster.api.put(EVENTS, event(parse_pod(raw), "FailedMount", 'volume "data": secret "nope" not found'))
    if not readable:  # the operator has the role of an older chart

        async def refuse(resource: Resource, *arguments: Any, listed: Any = cluster.api.list, **fields: Any) -> Any:
            if resource is EVENTS:
                raise Refused("events is forbidden", 403)
            return await listed(resource, *arguments, **fields)

        monkeypatch.setattr(cluster.api, "list", refuse)
    await cluster.reconcile_for(FIRST_READ + 1)
    running = cluster.running()
    assert running["status"] == "False"
    assert (running["reason"] == "PodStartFailed") == readable
    quoted = 'FailedMount: volume "data": secret "nope" not found. Create what is missing'
    assert (quoted in running["message"]) == readable
    assert [kind for kind, _ in cluster.api.reads].count("events") == readable, "one request for all pods of the job"
    for raw in raws:
        raw["status"] = {"phase": "Pending", "conditions": [READY_TO_START]}
    await cluster.reconcile_for(FIRST_READ)
    assert cluster.running()["reason"] != "PodStartFailed"


async def test_events_that_do_not_matter_are_not_kept_and_not_all_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A namespace may have 100,000 of them, of all its tenants' pods."""
    cluster = Cluster()
    await cluster.reconcile()
    for raw in cluster.api.pods(Role.WORKER):
        raw["spec"]["nodeName"], raw["status"] = "n1", {"phase": "Pending"}
    (first, *_) = [parse_pod(raw) for raw in cluster.api.pods(Role.WORKER)]
    read: list[int] = []
    recorded: list[list[str]] = []
    record = StartWarnings.record

    async def endless(*_: Any, **__: Any) -> AsyncIterator[Page]:
        while True:
            read.append(1)
            yield Page([event(worker(7), "FailedMount", "other"), event(first, "Unhealthy", "no")] * 100, "1")
            yield Page([event(first, "FailedMount", 'secret "nope" not found')], "1")

    def noted(warnings: StartWarnings, events: list[dict[str, Any]], now: float) -> None:
        recorded.append([found["reason"] for found in events])
        record(warnings, events, now)

    monkeypatch.setattr(cluster.api, "pages", endless)
    monkeypatch.setattr(StartWarnings, "record", noted)
    await cluster.reconcile_for(FIRST_READ + 1)
    assert cluster.running()["reason"] == "PodStartFailed"
    assert recorded == [["FailedMount"] * (MAX_EVENT_PAGES // 2)]
    assert len(read) == (MAX_EVENT_PAGES + 1) // 2

"""The controller around `plan`: when it reconciles again after failed actions, without any watch event in between."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from elasticjob._runtime.contract.names import Label
from elasticjob_operator.kube import (
    PODS,
    SECRETS,
    SERVICES,
    KubeError,
    Refused,
    Resource,
    Unclear,
)
from elasticjob_operator.kube.errors import error_from
from elasticjob_operator.model.observed import RefusalReason
from elasticjob_operator.observation.children import CHILDREN_SECONDS
from elasticjob_operator.observation.job_memory import FIRST_RETRY, LONGEST_RETRY, JobMemory
from elasticjob_operator.reconcile.action_executor import AT_ONCE
from support.operator.cluster import Cluster
from support.operator.world import Api, job_status


async def test_created_pods_and_refused_ones_are_events() -> None:
    cluster = Cluster()
    cluster.api.quota = 1
    await cluster.reconcile()
    await cluster.recorder.flush()
    found = [raw for (resource, _), raw in cluster.api.objects.items() if resource.plural == "events"]
    by_reason = {event["reason"]: (event["type"], event["message"]) for event in found}
    assert by_reason["SuccessfulCreatePod"] == ("Normal", "created 1 pod: bert-0-0")
    kind, message = by_reason["FailedCreatePod"]
    assert (kind, "exceeded quota" in message) == ("Warning", True)


async def test_a_large_job_sends_few_requests_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(replicas=100)
    create, under_way, most = cluster.api.create, 0, 0

    async def slow_create(*arguments: Any) -> Any:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        return await create(*arguments)

    monkeypatch.setattr(cluster.api, "create", slow_create)
    await cluster.reconcile()
    assert (len(cluster.workers()), most) == (100, AT_ONCE)


async def test_pods_that_a_quota_refuses_are_tried_again_after_growing_seconds() -> None:
    cluster = Cluster()
    cluster.api.quota = 1
    delays = await cluster.reconcile_for(120.0)
    tries = [name for verb, _, name in cluster.api.calls if (verb, name) == ("create", "bert-1-0")]
    assert max(delays) <= LONGEST_RETRY
    assert 5 <= len(tries) <= 15
    assert cluster.running()["reason"] == "QuotaExceeded"
    cluster.api.quota = None
    await cluster.reconcile_for(LONGEST_RETRY + 1.0)
    assert cluster.workers() == ["bert-0-0", "bert-1-0"]


async def test_a_creation_that_lost_the_race_for_a_quota_is_tried_again_in_a_second_under_the_same_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The API server gives up after some conflicts about the usage of a ResourceQuota, before it creates the pod."""
    cluster = Cluster()
    create, lost = cluster.api.create, list[str]()
    message = 'Operation cannot be fulfilled on resourcequotas "q": the object has been modified'

    async def racing(resource: Resource, namespace: str, body: Any) -> Any:
        name = body["metadata"]["name"]
        if name == "bert-1-0" and not lost:
            lost.append(name)
            raise error_from(409, {"reason": "Conflict", "message": message}, f"create pods {name}")
        return await create(resource, namespace, body)

    monkeypatch.setattr(cluster.api, "create", racing)
    await cluster.reconcile_for(FIRST_RETRY + 0.5)
    assert (cluster.workers(), lost) == (["bert-0-0", "bert-1-0"], ["bert-1-0"])
    await cluster.recorder.flush()
    messages = [raw["message"] for (resource, _), raw in cluster.api.objects.items() if resource.plural == "events"]
    assert [m for m in messages if "no longer exists" in m] == []
    assert [m for m in messages if message in m]


async def test_a_request_without_an_answer_is_tried_again_after_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()

    async def broken(*_: Any, **__: Any) -> Any:
        raise Unclear("no answer")

    with monkeypatch.context() as outage:
        outage.setattr(cluster.api, "create", broken)
        delays = await cluster.reconcile_for(60.0)
    assert max(delays) <= LONGEST_RETRY
    await cluster.reconcile_for(LONGEST_RETRY + 1.0)
    assert len(cluster.workers()) == 2


@pytest.mark.parametrize(
    ("resource", "error"),
    [(SECRETS, Refused("quota", 403)), (SERVICES, Refused("no", 403)), (SECRETS, Unclear("no answer"))],
    ids=["the Secret is refused", "the Services are refused", "no answer"],
)
async def test_no_pod_is_created_before_the_secret_and_the_services_exist(
    monkeypatch: pytest.MonkeyPatch, resource: Resource, error: KubeError
) -> None:
    cluster = Cluster()
    create = cluster.api.create

    async def refusing(kind: Resource, *args: Any) -> Any:
        if kind is resource:
            raise error
        return await create(kind, *args)

    with monkeypatch.context() as outage:
        outage.setattr(cluster.api, "create", refusing)
        for _ in range(8):
            delay = await cluster.reconcile()
            cluster.api.now += delay / 2
            await cluster.reconcile()  # an event before the next try
            cluster.api.now += delay / 2
    assert [call for call in cluster.api.calls if call[:2] == ("create", "pods")] == []
    assert cluster.running()["reason"] in ("PodCreationFailed", "QuotaExceeded")
    await cluster.reconcile_for(LONGEST_RETRY + 1.0)
    assert cluster.workers() == ["bert-0-0", "bert-1-0"]


async def test_the_service_of_the_store_selects_the_new_store_although_another_service_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster()
    await cluster.reconcile()
    create = cluster.api.create

    async def refusing(kind: Resource, *args: Any) -> Any:
        if kind is SERVICES:
            raise Refused("no", 403)
        return await create(kind, *args)

    monkeypatch.setattr(cluster.api, "create", refusing)
    cluster.api.remove(SERVICES, "bert")
    cluster.api.now += CHILDREN_SECONDS
    await cluster.reconcile()
    cluster.api.remove(PODS, "bert-rdzv-0")
    await cluster.reconcile()
    incarnation = job_status(cluster.api)["rendezvous"]["incarnation"]
    service = cluster.api.objects[SERVICES, "bert-rdzv"]
    assert (incarnation, service["spec"]["selector"][Label.INCARNATION]) == (1, "1")


async def test_a_slow_creation_of_the_secret_delays_the_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()
    create, asked, done = cluster.api.create, asyncio.Event(), asyncio.Event()

    async def slow(kind: Resource, *args: Any) -> Any:
        if kind is SECRETS:
            asked.set()
            await done.wait()
        return await create(kind, *args)

    monkeypatch.setattr(cluster.api, "create", slow)
    reconciling = asyncio.get_running_loop().create_task(cluster.reconcile())
    await asked.wait()
    for _ in range(20):  # whatever else is ready to run
        await asyncio.sleep(0)
    assert [call for call in cluster.api.calls if call[:2] == ("create", "pods")] == []
    done.set()
    await reconciling
    assert len(cluster.workers()) == 2


def test_the_delay_of_a_creation_that_is_refused_for_days_does_not_overflow() -> None:
    memory = JobMemory("uid")
    delays = []
    for _ in range(3000):
        memory.record_refusal("pod", RefusalReason.QUOTA_EXCEEDED, "quota", 0.0)
        memory.record_execution(failed=True, now=0.0)
        delays.append(memory.refusals["pod"].retry_at)
        assert memory.retry_at == delays[-1]
    assert delays[:3] == [FIRST_RETRY, FIRST_RETRY * 2, FIRST_RETRY * 4]
    assert delays[-1] == LONGEST_RETRY


def test_a_refusal_whose_time_has_come_asks_for_no_further_reconcile() -> None:
    memory = JobMemory("uid")
    memory.record_refusal("pod", RefusalReason.QUOTA_EXCEEDED, "quota", 0.0)
    assert (memory.next_retry(0.5), memory.next_retry(FIRST_RETRY)) == (FIRST_RETRY, None)


# ---- a job that is deleted and applied again -------------------------------------------------------------------


@pytest.mark.parametrize("deleting", [False, True])
async def test_a_job_that_is_applied_again_starts_once_its_predecessors_objects_are_deleted(deleting: bool) -> None:
    """`deleting`: the garbage collector has already asked for the deletion of the objects."""
    cluster = Cluster()
    add_predecessor(cluster.api, deleting)
    first = await cluster.reconcile()
    assert [call for call in cluster.api.calls if call[0] != "update"] == []
    assert cluster.running()["reason"] == "WaitingForMinReplicas"
    assert "Service bert, Service bert-rdzv, and the job needs" in cluster.running()["message"]
    assert first < 0.5
    cluster.api.now += first
    for name in ("bert", "bert-rdzv"):
        cluster.api.remove(SERVICES, name)
    await cluster.reconcile_for(1.0)
    assert cluster.workers() == ["bert-0-1", "bert-1-0"], "the pod of the predecessor still has the name bert-0-0"


async def test_the_wait_for_a_deletion_that_does_not_end_gets_longer() -> None:
    cluster = Cluster()
    add_predecessor(cluster.api, deleting=True)
    delays = await cluster.reconcile_for(120.0)
    assert delays[0] < 0.5
    assert len(delays) < 30
    assert max(delays) <= 15.0


async def test_a_job_starts_soon_after_a_user_deletes_the_object_of_another_owner() -> None:
    cluster = Cluster()
    cluster.api.put(SERVICES, {"metadata": {"name": "bert-rdzv"}})
    delay = await cluster.reconcile()
    assert cluster.running()["reason"] == "NameTaken"
    assert delay <= 15.0
    cluster.api.remove(SERVICES, "bert-rdzv")
    cluster.api.now += delay
    await cluster.reconcile()
    assert len(cluster.workers()) == 2


def add_predecessor(api: Api, deleting: bool) -> None:
    """Add the children of a deleted job of the same name: Services, Secret and a worker pod."""
    owner = {"apiVersion": "elasticjob.dev/v1alpha1", "kind": "ElasticJob", "name": "bert", "uid": "old"}
    labels = {Label.JOB_UID: "old", Label.ROLE: "worker", Label.INDEX: "0", Label.INCARNATION: "0"}
    meta: dict[str, Any] = {"ownerReferences": [owner | {"controller": True}]}
    if deleting:
        meta["deletionTimestamp"] = "2027-01-15T08:00:00Z"
    for resource, name in ((SERVICES, "bert"), (SERVICES, "bert-rdzv"), (SECRETS, "bert-rdzv")):
        api.put(resource, {"metadata": meta | {"name": name}})
    api.put(PODS, {"metadata": meta | {"name": "bert-0-0", "labels": labels}, "spec": {"containers": []}})

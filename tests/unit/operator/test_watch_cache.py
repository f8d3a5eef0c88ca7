"""What the watches delivered: a reconcile without work costs no request, and a late view does no harm."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from elasticjob._runtime.contract.messages import Outcome
from elasticjob._runtime.contract.names import Label, Role
from elasticjob_operator.kube import JOBS, PODS, SERVICES, Page
from elasticjob_operator.model.cluster.nodes import NodeWarning
from elasticjob_operator.model.observed import JobKey
from elasticjob_operator.observation.job_memory import LONGEST_RETRY, READ_SECONDS
from elasticjob_operator.reconcile.controller import FIRST_READ_SECONDS, Controller
from elasticjob_operator.reconcile.events import Recorder
from elasticjob_operator.reconcile.keys import JobKeys
from elasticjob_operator.watch.watch_cache import WatchCache
from support.operator.build import NOW, UID, raw_job
from support.operator.watch import Watch
from support.operator.world import Api, FakeStoreLinks, Node, World, copied, job_status

KEY = ("ns", "bert")


class Cluster:
    """The job `bert` on an API server, with a watch, a controller and everything that runs its pods."""

    def __init__(self) -> None:
        self.api = Api(NOW)
        self.api.put(JOBS, raw_job())
        self.world = World(self.api, {"n1": Node("n1"), "n2": Node("n2")})
        self.world.renew()
        self.concerned: list[JobKey] = []
        self.start_operator()

    def start_operator(self) -> WatchCache:
        """Begin with a new operator, and return its cache, which is empty."""
        self.watch = Watch(self.api, WatchCache(self.concerned.append))
        links: Any = FakeStoreLinks(self.api, self.world.stores)
        self.controller = Controller(
            self.api, JobKeys(b"k" * 32), links, Recorder(self.api, "me"), "image",
            clock=lambda: self.api.now, watched=self.watch.cache,
        )  # fmt: skip
        return self.watch.cache

    def observe(self) -> None:
        """Let the watch deliver all events."""
        self.watch.record()
        self.watch.deliver()

    async def reconcile(self) -> list[tuple[str, str]]:
        """Reconcile; return what the operator has read."""
        before = len(self.api.reads)
        await self.controller.reconcile(KEY)
        return self.api.reads[before:]

    async def run(self, node: str = "n1") -> None:
        """Let the job come to a round of all its nodes; new pods run on this node."""
        for _ in range(12):
            self.observe()
            await self.reconcile()
            for pod in self.api.pods(Role.WORKER) + self.api.pods(Role.STORE):
                self.world.finish_deletion(pod)
                self.world.schedule(pod, node)
                self.world.start(pod)
            self.world.drop_deleted()
            for pod in self.api.pods(Role.WORKER):
                self.world.connect(pod)
            for store in self.world.serving():
                store.form(self.api.now, 2)
            self.api.now += 2.0
            self.world.renew()
        self.observe()
        await self.reconcile()


@pytest.fixture
async def cluster() -> Cluster:
    cluster = Cluster()
    await cluster.run()
    assert job_status(cluster.api)["phase"] == "Running"
    cluster.observe()
    return cluster


async def test_a_reconcile_without_work_reads_nothing(cluster: Cluster) -> None:
    for _ in range(5):
        cluster.api.now += 300.0
        cluster.world.renew()
        assert await cluster.reconcile() == []


async def test_a_job_is_read_once_an_hour_all_the_same(cluster: Cluster) -> None:
    """Services and the Secret are not watched."""
    cluster.api.remove(SERVICES, "bert")
    cluster.api.now += READ_SECONDS + 60.0
    cluster.world.renew()
    await cluster.reconcile()
    assert (SERVICES, "bert") in cluster.api.objects


def creations(cluster: Cluster) -> list[tuple[str, str, str]]:
    return [call for call in cluster.api.calls if call[0] == "create"]


async def test_a_pod_is_replaced_by_what_is_true_now_and_the_successor_is_known_at_once(cluster: Cluster) -> None:
    """The watch has not delivered yet that the successor exists."""
    pod = next(p for p in cluster.api.pods(Role.WORKER))
    cluster.world.delete(pod, force=True)
    cluster.observe()
    before = creations(cluster)
    assert ("pods", f"{Label.JOB_UID}={UID}") in await cluster.reconcile()
    created = creations(cluster)
    assert [call[2] for call in created[len(before) :]] == ["bert-0-1"]
    assert await cluster.reconcile() == []
    assert creations(cluster) == created


async def test_a_pod_that_only_the_watch_lacks_is_not_replaced(cluster: Cluster) -> None:
    pod = next(p for p in cluster.api.pods(Role.WORKER))
    cluster.watch.cache.see_pod(pod, True)
    before = creations(cluster)
    assert await cluster.reconcile()
    assert creations(cluster) == before
    assert job_status(cluster.api)["incarnations"] == "0,0"


async def test_what_the_watch_delivers_of_an_own_write_is_not_parsed_again(cluster: Cluster) -> None:
    raw, cache = copied(cluster.api.pods(Role.WORKER)[0]), cluster.watch.cache
    raw["metadata"]["resourceVersion"] = cluster.api.next_version()
    cache.record_pod(raw)
    before, events = cache.pods(UID), len(cluster.concerned)
    cache.see_pod(raw)
    assert all(pod is known for (_, pod), (_, known) in zip(cache.pods(UID), before, strict=True))
    assert len(cluster.concerned) == events + 1


async def test_a_pod_that_the_operator_deleted_is_known_to_be_deleted_at_once(cluster: Cluster) -> None:
    """The watch has not delivered yet that it is being deleted."""
    for store in cluster.world.serving():
        store.outcome = Outcome.SUCCEEDED
    for pod in cluster.api.pods(Role.WORKER):
        cluster.world.terminate(pod, 0)
    cluster.observe()
    assert await cluster.reconcile()
    deleted = [call for call in cluster.api.calls if call[0] == "delete"]
    assert [name for _, plural, name in deleted if plural == "pods"] == ["bert-rdzv-0", "bert-rdzv-1"]
    assert await cluster.reconcile() == []
    assert [call for call in cluster.api.calls if call[0] == "delete"] == deleted


async def test_an_object_that_is_delivered_again_enqueues_no_job(cluster: Cluster) -> None:
    """A new leader lists all objects, and so does its watch when it begins."""
    cache, events = cluster.watch.cache, len(cluster.concerned)
    for raw in cluster.api.pods(Role.WORKER):
        cache.see_pod(raw)
    cache.see_job(cluster.api.objects[JOBS, "bert"])
    assert len(cluster.concerned) == events


async def test_a_new_job_is_started_without_a_read() -> None:
    cluster = Cluster()
    cluster.observe()
    assert await cluster.reconcile() == []
    cluster.observe()
    assert await cluster.reconcile() == []
    kinds = [call[1] for call in creations(cluster)]
    expected = ["secrets", "services", "services", "pods", "pods", "pods"]
    assert [kind for kind in kinds if kind in expected] == expected


async def test_the_steps_of_a_start_are_one_status_write() -> None:
    cluster = Cluster()
    cluster.observe()
    await cluster.reconcile()
    for step in (cluster.world.start, cluster.world.connect):
        for pod in cluster.api.pods(Role.STORE) + cluster.api.pods(Role.WORKER):
            cluster.world.schedule(pod, "n1")
            step(pod)
            cluster.observe()
            assert await cluster.reconcile() == []
            cluster.api.now += 0.1
    (store,) = cluster.world.serving()
    store.form(cluster.api.now, 2)
    assert await cluster.reconcile() == []
    assert [call[0] for call in cluster.api.calls if call[1] == "elasticjobs"] == ["update"] * 2
    assert job_status(cluster.api)["phase"] == "Running"


async def test_a_store_that_serves_is_in_status_within_a_second() -> None:
    cluster = Cluster()
    cluster.observe()
    await cluster.reconcile()
    (pod,) = cluster.api.pods(Role.STORE)
    cluster.world.schedule(pod, "n1")
    cluster.world.start(pod)
    cluster.observe()
    await cluster.reconcile()  # the operator learns the store's address
    seen = []
    for _ in range(3):
        await cluster.reconcile()
        seen.append({c["type"]: c["reason"] for c in job_status(cluster.api)["conditions"]}["RendezvousReady"])
        cluster.api.now += 0.5
    assert seen == ["StoreStarting", "StoreStarting", "StoreAvailable"]


async def test_a_job_of_a_deleted_ones_name_looks_for_what_is_left_of_it(cluster: Cluster) -> None:
    cluster.api.remove(JOBS, "bert")
    cluster.observe()
    await cluster.reconcile()
    job = raw_job()
    cluster.api.put(JOBS, job | {"metadata": job["metadata"] | {"uid": "next"}})
    cluster.observe()
    assert ("services", "bert") in await cluster.reconcile()


async def test_after_a_conflict_the_job_is_read(cluster: Cluster) -> None:
    """Another client has changed the job, and the watch is late."""
    cluster.world.scale(1)
    cluster.observe()
    job = cluster.api.objects[JOBS, "bert"]
    cluster.api.put(JOBS, job | {"metadata": job["metadata"] | {"labels": {"team": "night"}}})
    pod = next(p for p in cluster.api.pods(Role.STORE) if p["metadata"]["name"] == "bert-rdzv-0")
    cluster.world.delete(pod, force=True)
    version = cluster.api.objects[JOBS, "bert"]["metadata"]["resourceVersion"]
    for _ in range(3):
        await cluster.reconcile()
    assert cluster.api.objects[JOBS, "bert"]["metadata"]["resourceVersion"] != version
    assert cluster.api.objects[JOBS, "bert"]["metadata"]["labels"] == {"team": "night"}


async def test_a_warning_of_a_node_without_pods_of_the_job_costs_nothing(cluster: Cluster) -> None:
    cluster.watch.cache.see_node("n2", NodeWarning("taint spot"))
    assert await cluster.reconcile() == []


async def test_all_pods_leave_a_machine_that_is_about_to_end_and_then_nothing_is_to_be_done(cluster: Cluster) -> None:
    cluster.concerned.clear()
    cluster.watch.cache.see_node("n1", NodeWarning("taint spot"))
    assert KEY in cluster.concerned
    await cluster.run("n2")
    pods = [p for role in Role for p in cluster.api.pods(role) if p["status"]["phase"] == "Running"]
    assert {p["spec"]["nodeName"] for p in pods} == {"n2"}
    assert sorted(p["metadata"]["name"] for p in pods)[:2] == ["bert-0-1", "bert-1-1"]
    found = job_status(cluster.api)
    assert (found["phase"], found["restarts"]) == ("Running", 0)
    assert await cluster.reconcile() == []


async def test_a_refused_pod_is_tried_again_although_no_event_arrives() -> None:
    cluster = Cluster()
    cluster.api.quota = 1
    for _ in range(4):
        cluster.observe()
        await cluster.reconcile()
    cluster.api.quota = None
    cluster.api.now += LONGEST_RETRY
    await cluster.reconcile()
    assert len(cluster.api.pods(Role.WORKER)) == 2


async def test_an_own_write_is_not_undone_by_an_event_from_before_it(cluster: Cluster) -> None:
    cluster.world.scale(1)
    cluster.watch.record()
    cluster.watch.deliver()
    await cluster.reconcile()
    written = cluster.api.objects[JOBS, "bert"]
    old = {**written, "status": {}, "metadata": {**written["metadata"], "resourceVersion": "1"}}
    cluster.watch.cache.see_job(old)
    found = cluster.watch.cache.job(KEY)
    assert found is not None
    assert found["status"] == written["status"]


async def test_a_finished_job_costs_nothing(cluster: Cluster) -> None:
    for pod in cluster.api.pods(Role.WORKER):
        pod["status"]["phase"] = "Succeeded"
    cluster.world.serving()[0].outcome = Outcome.SUCCEEDED
    for _ in range(20):
        cluster.observe()
        await cluster.reconcile()
        for pod in cluster.api.pods(Role.WORKER) + cluster.api.pods(Role.STORE):
            cluster.world.finish_deletion(pod)
        cluster.api.now += 30.0
        cluster.world.renew()
    cluster.observe()
    assert job_status(cluster.api)["phase"] == "Succeeded"
    cluster.api.now += 10 * READ_SECONDS
    assert await cluster.reconcile() == []


async def test_what_a_watch_has_lost_is_found_by_a_list(cluster: Cluster) -> None:
    pod = next(p for p in cluster.api.pods(Role.WORKER))
    cluster.api.remove(PODS, pod["metadata"]["name"])
    cluster.watch.lost = 1
    cluster.observe()
    cluster.concerned.clear()
    assert await cluster.reconcile() == []
    await cluster.watch.cache.list_again(cluster.api, ())
    assert cluster.concerned == [KEY]
    assert await cluster.reconcile()


async def test_a_list_finds_a_job_and_a_pod_that_the_watch_has_not_delivered() -> None:
    cluster = Cluster()
    await cluster.reconcile()
    await cluster.watch.cache.list_again(cluster.api, ("ns",))
    assert cluster.watch.cache.job(KEY) is not None
    assert len(cluster.watch.cache.pods(UID)) == len([p for p in cluster.api.objects if p[0] is PODS])
    cluster.concerned.clear()
    await cluster.watch.cache.list_again(cluster.api, ("ns",))
    assert cluster.concerned == []


async def test_a_pod_that_is_deleted_while_a_list_runs_stays_deleted(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, listed = cluster.watch.cache, cluster.api.list
    pod = next(p for p in cluster.api.pods(Role.WORKER))

    async def slow(*args: Any) -> list[dict[str, Any]]:
        found = await listed(*args)
        if args[0] is PODS:
            cache.see_pod(pod, True)
        return found

    monkeypatch.setattr(cluster.api, "list", slow)
    await cache.list_again(cluster.api, ())
    assert pod["metadata"]["name"] not in {p.name for _, p in cache.pods(UID)}


class Lists:
    """Answers lists with one page each, the next one after `release`."""

    def __init__(self, version: str, *objects: dict[str, Any]) -> None:
        self.page, self.release, self.begun = Page(objects, version), asyncio.Event(), asyncio.Event()

    async def pages(self, *_: object, **__: object) -> AsyncIterator[Page]:
        page = self.page
        self.begun.set()
        await self.release.wait()
        yield page


async def test_an_older_list_that_ends_later_brings_no_pod_back(cluster: Cluster) -> None:
    """A watch lists again, after a 410, while the list beside the watches runs."""
    cache = cluster.watch.cache
    old = Lists("10", *cluster.api.pods(Role.WORKER))
    older = asyncio.create_task(cache.list_resource(PODS, old, None))
    await old.begun.wait()
    empty = Lists("11")
    empty.release.set()
    await cache.list_resource(PODS, empty, None)
    assert cache.pods(UID) == []
    old.release.set()
    await older
    assert cache.pods(UID) == []


async def test_a_list_of_a_restored_etcd_is_newer_than_what_is_known(cluster: Cluster) -> None:
    """Its versions are lower than those from before, which are in the cache."""
    cache = WatchCache(cluster.concerned.append)

    def job(version: int, phase: str) -> dict[str, Any]:
        raw = raw_job()
        return raw | {"metadata": raw["metadata"] | {"resourceVersion": str(version)}, "status": {"phase": phase}}

    cache.see_job(job(1000, "Running"))
    restored = Lists("512", job(510, "Pending"))
    restored.release.set()
    cluster.concerned.clear()
    assert await cache.list_resource(JOBS, restored, None) == "512"
    assert (cache.job(KEY) or {})["status"] == {"phase": "Pending"}
    assert cluster.concerned == [KEY]
    cache.see_job(job(515, "Running"))
    assert (cache.job(KEY) or {})["status"] == {"phase": "Running"}
    late = Lists("512", job(510, "Pending"))
    listing = asyncio.create_task(cache.list_resource(JOBS, late, None))
    await late.begun.wait()
    cache.see_job(job(520, "Suspended"))
    late.release.set()
    await listing
    assert (cache.job(KEY) or {})["status"] == {"phase": "Suspended"}, "an event during the list is newer than it"


async def test_an_object_that_fails_ends_no_list_and_is_logged_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = WatchCache()
    names = sorted(raw["metadata"]["name"] for raw in cluster.api.pods(Role.WORKER))

    def fail(raw: dict[str, Any], see: Any = cache.see_pod) -> None:
        if raw["metadata"]["name"] == names[0]:
            raise RuntimeError("boom")
        see(raw)

    monkeypatch.setattr(cache, "see_pod", fail)
    for _ in range(2):
        await cache.list_again(cluster.api, ())
    assert [pod.name for role, pod in cache.pods(UID) if role == Role.WORKER] == names[1:]
    assert [r.message for r in caplog.records] == [f"ns: pods {names[0]} in a list cannot be taken over"]


async def test_a_list_of_another_namespace_drops_nothing(cluster: Cluster) -> None:
    nothing = Api(NOW)
    await cluster.watch.cache.list_again(nothing, ("other",))
    assert cluster.watch.cache.job(KEY) is not None
    await cluster.watch.cache.list_again(nothing, ())
    assert cluster.watch.cache.job(KEY) is None
    assert cluster.watch.cache.pods(UID) == []


def test_pods_with_copied_labels_are_not_the_jobs() -> None:
    seen: list[JobKey] = []
    cache = WatchCache(seen.append)
    labels = {Label.JOB_NAME: "bert", Label.JOB_UID: UID, Label.ROLE: "worker"}
    cache.see_pod({"metadata": {"namespace": "ns", "name": "stranger", "uid": "s", "labels": labels}})
    assert (seen, cache.pods(UID)) == ([KEY], [])


def test_a_deleted_job_is_forgotten_and_one_of_its_name_is_another() -> None:
    cache = WatchCache()
    job = raw_job()
    cache.see_job(job)
    cache.see_job(raw_job() | {"metadata": job["metadata"] | {"uid": "next", "managedFields": [{}]}})
    cache.see_job(job, True)
    found = cache.job(KEY)
    assert found is not None
    assert (found["metadata"]["uid"], "managedFields" in found["metadata"]) == ("next", False)
    cache.record_job(job)
    assert (cache.job(KEY) or {})["metadata"]["uid"] == "next"


@pytest.mark.parametrize("version", ["abc", ""])
def test_a_version_that_is_no_number_is_taken_as_newer(version: str) -> None:
    cache = WatchCache()
    job = raw_job()
    for number in (1, 2):
        cache.see_job({**job, "status": {"n": number}, "metadata": job["metadata"] | {"resourceVersion": version}})
    assert (cache.job(KEY) or {})["status"] == {"n": 2}


# ---- an operator that starts beside running jobs


async def settle(cluster: Cluster) -> list[tuple[str, str]]:
    """Reconcile some times; return what the operator has read, but for Leases."""
    before = len(cluster.api.reads)
    for _ in range(4):
        cluster.observe()
        await cluster.reconcile()
        cluster.api.now += 1.0
    return [read for read in cluster.api.reads[before:] if read[0] != "leases"]


async def test_a_restarted_operator_follows_a_running_job_without_reading_it(cluster: Cluster) -> None:
    created = creations(cluster)
    await cluster.start_operator().list_again(cluster.api, ())
    assert await settle(cluster) == []
    assert creations(cluster) == created
    store = cluster.world.serving()[0]
    assert store.view is not None
    assert [pod.pod for pod in store.view.pods] == ["bert-0-0", "bert-1-0"]


async def test_what_a_restarted_operator_has_not_read_is_read_some_minutes_later(cluster: Cluster) -> None:
    cluster.api.remove(SERVICES, "bert")
    await cluster.start_operator().list_again(cluster.api, ())
    await settle(cluster)
    assert (SERVICES, "bert") not in cluster.api.objects
    cluster.api.now += FIRST_READ_SECONDS[1]
    cluster.world.renew()
    await cluster.reconcile()
    assert (SERVICES, "bert") in cluster.api.objects


async def test_a_restarted_operator_reads_a_job_before_it_does_anything_for_it(cluster: Cluster) -> None:
    """The operator before it ended between its status write and its creations."""
    cluster.api.remove(SERVICES, "bert")
    cluster.world.scale(3)
    await cluster.start_operator().list_again(cluster.api, ())
    reads = await settle(cluster)
    assert ("services", "bert") in reads
    assert (SERVICES, "bert") in cluster.api.objects
    assert len(cluster.api.pods(Role.WORKER)) == 3


async def test_an_operator_whose_list_failed_reads_the_job(cluster: Cluster) -> None:
    cluster.start_operator()
    assert ("pods", f"{Label.JOB_UID}={UID}") in await settle(cluster)

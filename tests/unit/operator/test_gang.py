"""Gang scheduling: the object of each provider, its members, and its life with the job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from elasticjob._runtime.contract.names import Role
from elasticjob_operator import manifests
from elasticjob_operator.actions import CreateWorker
from elasticjob_operator.kube import JOBS, PODS, NotFound, Refused, Resource
from elasticjob_operator.kube.api import COSCHEDULING_GROUPS, KUBERNETES_GROUPS, VOLCANO_GROUPS
from elasticjob_operator.model.cluster.pods import Pod, minimal_pod, parse_pod
from elasticjob_operator.model.observed import Child
from elasticjob_operator.observation.job_memory import LONGEST_RETRY
from support.operator.build import (
    NOW,
    UID,
    Raw,
    condition,
    elastic,
    ended,
    job,
    raw_job,
    run,
    status,
    status_of,
    steady,
)
from support.operator.build import worker as running
from support.operator.cluster import Cluster
from support.operator.world import job_status

COSCHEDULING = {"gang": {"provider": "coscheduling"}}
VOLCANO = {"gang": {"provider": "volcano"}}
KUBERNETES = {"gang": {"provider": "kubernetes"}}
PROVIDERS = [
    (COSCHEDULING, COSCHEDULING_GROUPS, "minMember"),
    (VOLCANO, VOLCANO_GROUPS, "minMember"),
    (KUBERNETES, KUBERNETES_GROUPS, "schedulingPolicy.gang.minCount"),
]
SIZES = elastic(2, 4, 3)


def template(pod: Raw | None = None, **metadata: Any) -> Raw:
    """Return the job's template with more fields of the pod and metadata."""
    spec = raw_job()["spec"]["template"]["spec"]
    return {"metadata": metadata, "spec": {**spec, **(pod or {})}}


def gang(**spec: Any) -> Raw:
    built = job(**spec)
    assert built.spec is not None
    return manifests.gang_manifest(built, built.spec)


def worker(index: int, *, outside_gang: bool = False, **spec: Any) -> Raw:
    built = job(**spec)
    assert built.spec is not None
    return manifests.worker_pod_manifest(built, built.spec, index, 0, "agent:1", outside_gang=outside_gang)


# ---- objects


def test_the_pod_group_of_coscheduling() -> None:
    built = gang(**COSCHEDULING, **SIZES)
    assert (built["apiVersion"], built["kind"]) == ("scheduling.x-k8s.io/v1alpha1", "PodGroup")
    assert (built["metadata"]["name"], built["metadata"]["namespace"]) == ("bert", "ns")
    assert built["spec"] == {"minMember": 2}
    (owner,) = built["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("ElasticJob", UID, True)


def test_the_pod_group_of_volcano_has_the_queue_and_the_priority_of_the_template() -> None:
    built = gang(**VOLCANO, **SIZES)
    assert (built["apiVersion"], built["kind"]) == ("scheduling.volcano.sh/v1beta1", "PodGroup")
    assert built["spec"] == {"minMember": 2}
    own = template({"priorityClassName": "high"}, annotations={"scheduling.volcano.sh/queue-name": "research"})
    assert gang(**VOLCANO, **SIZES, template=own)["spec"] == {
        "minMember": 2, "queue": "research", "priorityClassName": "high",
    }  # fmt: skip


def test_the_pod_group_of_kubernetes_has_the_priority_of_its_pods() -> None:
    built = gang(**KUBERNETES, **SIZES)
    assert (built["apiVersion"], built["kind"]) == ("scheduling.k8s.io/v1beta1", "PodGroup")
    assert built["spec"] == {"schedulingPolicy": {"gang": {"minCount": 2}}}
    assert built["metadata"]["ownerReferences"][0]["uid"] == UID
    high = gang(**KUBERNETES, **SIZES, template=template({"priorityClassName": "high"}))
    assert high["spec"] == {"schedulingPolicy": {"gang": {"minCount": 2}}, "priorityClassName": "high"}


def test_the_gang_of_a_job_of_fixed_size_is_all_of_it() -> None:
    assert gang(**COSCHEDULING, replicas=5)["spec"] == {"minMember": 5}


# ---- members


def membership(pod: Raw) -> Raw:
    """Return the fields of a pod that make it a member of a gang, or choose the scheduler."""
    meta = pod["metadata"]
    found = {
        "label": meta["labels"].get("scheduling.x-k8s.io/pod-group"),
        "annotation": meta["annotations"].get("scheduling.k8s.io/group-name"),
        "scheduler": pod["spec"].get("schedulerName"),
        "group": pod["spec"].get("schedulingGroup"),
    }
    return {name: value for name, value in found.items() if value}


@pytest.mark.parametrize(
    ("spec", "index", "expected"),
    [
        ({}, 0, {}),
        (COSCHEDULING, 0, {"label": "bert"}),
        (COSCHEDULING, 2, {"label": "bert"}),
        (COSCHEDULING, 3, {}),
        (COSCHEDULING | {"template": template({"schedulerName": "mine"})}, 1, {"label": "bert", "scheduler": "mine"}),
        (KUBERNETES, 2, {"group": {"podGroupName": "bert"}}),
        (KUBERNETES, 3, {}),
        (VOLCANO, 0, {"annotation": "bert", "scheduler": "volcano"}),
        (VOLCANO, 3, {"scheduler": "volcano"}),
        (VOLCANO | {"template": template({"schedulerName": "mine"})}, 1, {"annotation": "bert", "scheduler": "mine"}),
    ],
)
def test_nodes_below_the_target_are_members_and_standby_nodes_are_not(spec: Raw, index: int, expected: Raw) -> None:
    spared = {"elasticPolicy": {"minReplicas": 2, "maxReplicas": 4, "spares": 1}, "replicas": 3}
    assert membership(worker(index, outside_gang=index >= 3, **spec, **spared)) == expected


@pytest.mark.parametrize("provider", [COSCHEDULING, VOLCANO, KUBERNETES])
@pytest.mark.parametrize("read", [parse_pod, minimal_pod])
def test_a_pod_says_of_which_gang_it_is_a_member(provider: Raw, read: Callable[[Raw], Pod]) -> None:
    pods = (worker(0, **provider), worker(0, outside_gang=True, **provider))
    assert [read(pod).gang for pod in pods] == ["bert", ""]


ALONE, ALONE_TOO = running(0), running(1)
MEMBER, MEMBER_TOO = replace(ALONE, gang="bert"), replace(ALONE_TOO, gang="bert")
PENDING, PENDING_TOO = replace(MEMBER, node=""), replace(MEMBER_TOO, node="")
FOREIGN = replace(MEMBER, gang="other")
STANDBY, GONE = running(2), running(1, **ended(1))
SPARED: Raw = {"elasticPolicy": {"minReplicas": 2, "maxReplicas": 4, "spares": 1}, "replicas": 2}
SHRUNK: Raw = {"incarnations": "0,0,0", "vacantIndices": [{"first": 0, "last": 0}]}
THREE: Raw = {"incarnations": "0,0,0", "selector": "elasticjob.dev/index notin (2)"}


@pytest.mark.parametrize("provider", [COSCHEDULING, VOLCANO, KUBERNETES])
@pytest.mark.parametrize(
    ("pods", "spec", "fields", "expected", "waiting"),
    [
        ((), SPARED, {"incarnations": ""}, {"bert-0-0": True, "bert-1-0": True}, {"bert-2-0"}),
        ((PENDING, PENDING_TOO), SPARED, THREE, {}, {"bert-2-1"}),
        ((MEMBER, PENDING_TOO), SPARED, THREE, {}, {"bert-2-1"}),
        ((MEMBER, MEMBER_TOO), SPARED, {}, {"bert-2-0": False}, set()),
        ((MEMBER, GONE, STANDBY), SPARED, THREE, {"bert-1-1": True}, set()),
        ((MEMBER, replace(GONE, index=2, name="bert-2-0"), MEMBER_TOO), SPARED, THREE, {"bert-2-1": False}, set()),
        ((MEMBER, GONE, replace(GONE, index=2, name="bert-2-0")), SPARED, THREE, {"bert-1-1": True}, {"bert-2-1"}),
        ((ALONE, GONE), {}, {}, {"bert-1-1": False}, set()),
        ((FOREIGN, GONE), {}, {}, {"bert-1-1": False}, set()),
        ((MEMBER, GONE), {}, {}, {"bert-1-1": True}, set()),
        ((ALONE, ALONE_TOO), elastic(2, 4, 3), {}, {"bert-2-0": False}, set()),
        ((ALONE, ALONE_TOO), elastic(2, 4, 4), {}, {"bert-2-0": True, "bert-3-0": True}, set()),
        ((replace(MEMBER_TOO, deleting=NOW + 9), replace(STANDBY, gang="bert")), {}, SHRUNK, {"bert-1-1": True}, set()),
    ],
    ids=["new", "gang pending", "half of the gang pending", "spare missing", "member lost", "spare lost", "both lost",
         "the other is none", "of another gang", "the other is one", "grows by too few", "grows by enough",
         "with a vacant index"],
)  # fmt: skip
def test_a_new_pod_is_a_member_if_members_are_missing_and_are_enough_with_it(
    pods: tuple[Pod, ...], spec: Raw, fields: Raw, expected: dict[str, bool], waiting: set[str], provider: Raw
) -> None:
    """Others wait until the gang has its Nodes: two jobs whose spares came first could hold each other's Nodes."""
    observed = steady(workers=pods)
    children = replace(observed.children, gang=Child("g", True, gang_size=2))
    known = status(**{"incarnations": "0,0", "conditions": [condition("Running")]} | fields)
    p = run(replace(observed, job=job(status=known, **provider, **spec), children=children))
    members = {a.name: not a.outside_gang for a in p.actions if isinstance(a, CreateWorker)}
    assert (members, set(p.withheld)) == (expected, waiting)


def test_a_spare_that_waits_keeps_its_name_and_is_announced_only_if_it_replaces_a_pod() -> None:
    known = status(**THREE, conditions=[condition("Running")])
    waits = replace(steady(workers=(PENDING, PENDING_TOO)), job=job(status=known, **KUBERNETES, **SPARED))
    again = run(replace(waits, withheld=frozenset({"bert-2-0"})))
    assert (set(again.withheld), status_of(again)["incarnations"]) == ({"bert-2-0"}, "0,0,0")
    others = run(waits)  # an operator that does not know that it waits
    assert [e for e in others.event_records if e.reason == "PodReplaced"] == []
    lost = run(replace(waits, workers=(PENDING, PENDING_TOO, replace(GONE, index=2, name="bert-2-0"))))
    (event,) = (e for e in lost.event_records if e.reason == "PodReplaced")
    assert "bert-2-1 replaces it once the gang has its Nodes" in event.message


# ---- life


def size(group: Raw, path: str) -> Any:
    """Return the only content of a gang object's spec."""
    found = group["spec"]
    for name in path.split("."):
        (found,) = [found[name]] if [*found] == [name] else []
    return found


@pytest.mark.parametrize(("provider", "resource", "path"), PROVIDERS)
async def test_the_gang_exists_before_its_pods_and_its_size_follows_min_replicas_in_place(
    provider: Raw, resource: Resource, path: str
) -> None:
    cluster = Cluster(**provider, **SIZES)
    await cluster.reconcile_for(1.0)
    created = [call for call in cluster.api.calls if call[0] == "create"]
    workers = [i for i, (_, plural, name) in enumerate(created) if plural == "pods" and "rdzv" not in name]
    assert created.index(("create", "podgroups", "bert")) < workers[0]
    before = cluster.api.objects[resource, "bert"]
    cluster.change(elasticPolicy={"minReplicas": 1, "maxReplicas": 4})
    await cluster.reconcile()
    after = cluster.api.objects[resource, "bert"]
    assert (size(before, path), size(after, path)) == (2, 1)
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    calls = len(cluster.api.calls)
    await cluster.reconcile_for(1.0)
    assert [call for call in cluster.api.calls[calls:] if call[1] == "podgroups"] == []


async def test_the_spare_is_created_under_its_first_name_once_the_gang_has_its_nodes() -> None:
    cluster = Cluster(**KUBERNETES, **SPARED)
    for placed in ("bert-0-0", "bert-1-0"):
        await cluster.reconcile_for(30.0)
        assert cluster.workers() == ["bert-0-0", "bert-1-0"]
        pod = cluster.api.objects[PODS, placed]
        cluster.api.put(PODS, {**pod, "spec": {**pod["spec"], "nodeName": f"node-of-{placed}"}})
    await cluster.reconcile_for(1.0)
    assert cluster.workers() == ["bert-0-0", "bert-1-0", "bert-2-0"]
    assert membership(cluster.api.objects[PODS, "bert-2-0"]) == {}


async def test_a_pod_that_replaces_a_lost_one_is_a_member_and_a_store_is_not() -> None:
    cluster = Cluster(**VOLCANO)
    await cluster.reconcile_for(1.0)
    cluster.api.remove(*next(key for key in cluster.api.objects if key[1] == "bert-1-0"))
    await cluster.reconcile_for(1.0)
    assert cluster.workers() == ["bert-0-0", "bert-1-1"]
    member = {"annotation": "bert", "scheduler": "volcano"}
    assert [membership(pod) for pod in cluster.api.pods(Role.WORKER)] == [member, member]
    assert cluster.api.pods(Role.STORE)
    assert "schedulerName" not in cluster.api.pods(Role.STORE)[0]["spec"]
    assert "scheduling.k8s.io/group-name" not in cluster.api.pods(Role.STORE)[0]["metadata"].get("annotations", {})


async def test_a_job_without_a_provider_sends_no_request_about_gangs(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, read = Cluster(), []
    get = cluster.api.get

    async def counted(resource: Resource, *args: Any) -> Raw:
        read.append(resource.plural)
        return await get(resource, *args)

    monkeypatch.setattr(cluster.api, "get", counted)
    await cluster.reconcile_for(100.0)
    assert set(read) <= {"elasticjobs", "services", "secrets", "leases"}
    assert len(cluster.workers()) == 2
    assert [call for call in cluster.api.calls if call[1] == "podgroups"] == []


async def test_a_suspended_job_has_no_gang_and_a_resumed_one_has_the_gang_of_its_new_provider() -> None:
    cluster = Cluster(**COSCHEDULING)
    await cluster.reconcile_for(1.0)
    cluster.change(suspend=True)
    await cluster.reconcile_for(30.0)
    assert (COSCHEDULING_GROUPS, "bert") not in cluster.api.objects
    cluster.change(**VOLCANO, suspend=False)
    await cluster.reconcile_for(1.0)
    assert cluster.api.objects[VOLCANO_GROUPS, "bert"]["spec"] == {"minMember": 2}
    assert (COSCHEDULING_GROUPS, "bert") not in cluster.api.objects
    assert len(cluster.workers()) == 2


async def test_a_job_that_has_ended_has_no_gang() -> None:
    cluster = Cluster(**COSCHEDULING)
    await cluster.reconcile_for(1.0)
    ended = status(conditions=[condition("Complete"), condition("SuccessCriteriaMet")])
    cluster.api.put(JOBS, {**cluster.api.objects[JOBS, "bert"], "status": ended})
    await cluster.reconcile_for(60.0)
    assert (COSCHEDULING_GROUPS, "bert") not in cluster.api.objects


# ---- providers that are not there


class NoGroups:
    """An API server without PodGroups, or an operator without permissions for them."""

    def __init__(self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, error: type[NotFound | Refused]) -> None:
        self.tries = 0
        self.error: Exception | None = error("podgroups: no", 404 if error is NotFound else 403)
        self._get, self._create = cluster.api.get, cluster.api.create
        monkeypatch.setattr(cluster.api, "get", self.get)
        monkeypatch.setattr(cluster.api, "create", self.create)

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Raw:
        if self.error and resource.plural == "podgroups":
            raise self.error
        return await self._get(resource, namespace, name)

    async def create(self, resource: Resource, namespace: str, body: Mapping[str, Any]) -> Raw:
        if self.error and resource.plural == "podgroups":
            self.tries += 1
            raise self.error
        return await self._create(resource, namespace, body)


@pytest.mark.parametrize(
    ("provider", "error", "advice"),
    [
        (COSCHEDULING, NotFound, "install the coscheduling plugin of scheduler-plugins with its CRDs"),
        (
            KUBERNETES,
            NotFound,
            "no podgroups.scheduling.k8s.io/v1beta1: start Kubernetes 1.37 or newer with the feature",
        ),
        (KUBERNETES, Refused, "set gang.kubernetes to true in the values of elasticjob's chart"),
        (VOLCANO, NotFound, "the cluster has no podgroups.scheduling.volcano.sh/v1beta1: install Volcano"),
        (COSCHEDULING, Refused, "set gang.coscheduling to true in the values of elasticjob's chart"),
        (VOLCANO, Refused, "set gang.volcano to true in the values of elasticjob's chart"),
    ],
)
async def test_without_the_provider_the_job_waits_and_says_what_to_install(
    provider: Raw, error: type[NotFound | Refused], advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(**provider)
    groups = NoGroups(cluster, monkeypatch, error)
    delays = await cluster.reconcile_for(120.0)
    assert cluster.running()["status"] == "False"
    assert cluster.running()["reason"] == "PodCreationFailed"
    assert advice in cluster.running()["message"]
    assert 5 <= groups.tries <= 15
    assert max(delays) <= LONGEST_RETRY
    assert cluster.workers() == []
    groups.error = None
    await cluster.reconcile_for(LONGEST_RETRY + 1.0)
    assert cluster.workers() == ["bert-0-0", "bert-1-0"]


async def test_a_job_whose_provider_is_gone_gets_a_new_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gang matters for new workers only."""
    cluster = Cluster(**COSCHEDULING)
    await cluster.reconcile_for(5.0)
    NoGroups(cluster, monkeypatch, Refused)
    cluster.api.remove(COSCHEDULING_GROUPS, "bert")
    cluster.api.remove(PODS, "bert-rdzv-0")
    await cluster.reconcile_for(120.0)
    assert [p["metadata"]["name"] for p in cluster.api.pods(Role.STORE)] == ["bert-rdzv-1"]


async def test_a_provider_that_is_removed_in_the_patch_that_suspends_raises_nothing() -> None:
    cluster = Cluster(**COSCHEDULING)
    await cluster.reconcile()
    await cluster.reconcile()
    cluster.change(gang={"provider": "none"}, suspend=True)
    await cluster.reconcile_for(60.0)
    assert job_status(cluster.api)["phase"] == "Suspended"


async def test_reconciles_write_nothing_while_a_name_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(**COSCHEDULING)
    await cluster.reconcile_for(5.0)
    cluster.api.put(COSCHEDULING_GROUPS, {"metadata": {"name": "bert"}, "spec": {"minMember": 7}})
    evicted = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    cluster.api.objects[PODS, "bert-1-0"]["status"] = {"phase": "Failed", "conditions": [evicted]}
    await cluster.reconcile_for(120.0)
    before = len(cluster.api.calls)
    await cluster.reconcile_for(60.0)
    assert cluster.api.calls[before:] == []


async def test_a_pod_group_of_another_owner_is_left_alone() -> None:
    cluster = Cluster(**COSCHEDULING)
    cluster.api.put(COSCHEDULING_GROUPS, {"metadata": {"name": "bert"}, "spec": {"minMember": 7}})
    await cluster.reconcile()
    assert cluster.running()["reason"] == "NameTaken"
    assert "PodGroup bert exists and does not belong to this job" in cluster.running()["message"]
    assert cluster.api.objects[COSCHEDULING_GROUPS, "bert"]["spec"] == {"minMember": 7}
    assert job_status(cluster.api)["phase"] == "Pending"

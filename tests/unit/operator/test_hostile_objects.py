"""What a tenant can write into an object of Kubernetes harms its own job at most: no parser raises."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticjob._runtime.contract import codec
from elasticjob._runtime.contract.messages import Failure, FailureClass, Report, Termination, decode, encode
from elasticjob._runtime.contract.names import Label, Role
from elasticjob_operator.kube import PODS
from elasticjob_operator.lease import ObservedLease, may_acquire, next_record
from elasticjob_operator.manifests.evictions import answered_status
from elasticjob_operator.model.cluster.evictions import RESPONDER, own_report, parse_eviction
from elasticjob_operator.model.cluster.limit_ranges import fit_resources
from elasticjob_operator.model.cluster.nodes import parse_topology, parse_warning
from elasticjob_operator.model.cluster.notices import NoticeKeys
from elasticjob_operator.model.cluster.pods import FAILED_STARTS, UNREADABLE, Pod, parse_pod
from elasticjob_operator.model.cluster.raw import mapping, moment, objects, text, timestamp
from elasticjob_operator.model.cluster.workload import assigned_flavors, parse_workload, pod_changes, queue_view
from elasticjob_operator.model.job.status import ConditionType, parse_status
from elasticjob_operator.model.job.store_spec import read_store
from elasticjob_operator.model.observed import JobKey, LinkView, Observed, parse_job
from elasticjob_operator.observation import observe
from elasticjob_operator.observation.stop_causes import stop_cause
from elasticjob_operator.plan import plan
from elasticjob_operator.watch import watch_cache
from elasticjob_operator.watch.watch_cache import WatchCache
from support.common.examples import examples
from support.operator.build import NOW, UID, ended, raw_job, raw_pod, report
from support.operator.cluster import Cluster
from support.operator.world import Api, job_status

LONG = "9" * 5000
"""A number that Python refuses to read, with an exception."""
HANG = '{"outcome": "Failed", "reason": "\\ud800", "failure": {"kind": "Hang", "pod": "p", "time": TIME}}'
TEXTS = (
    "", "1", LONG, "9" * 400, "-1", "true", "0001-01-01T00:00:00Z", "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59",
    "9999-12-31T23:59:59-23:59", "2026-01-01T00:00:00Z", "\x00", "\ud800", "1.1.1", f"1.1.{LONG}", "True", "Failed",
    "bert", "1E", "9e307E", UID, HANG.replace("TIME", "1e300"), HANG.replace("TIME", "9" * 400),
)  # fmt: skip
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.sampled_from([0, 1, -1, 2**31, 2**63, 10**400, 1e300, -1e300, 0.5])
    | st.sampled_from(TEXTS) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(TEXTS), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip


@st.composite
def changed(draw: st.DrawFn, base: dict[str, Any]) -> dict[str, Any]:
    """Return the object, with other values at up to four places."""
    copy: dict[str, Any] = json.loads(json.dumps(base))
    for _ in range(draw(st.integers(1, 4))):
        place: Any = copy
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(place[key], (dict, list)) and place[key] and draw(st.booleans()):
                place = place[key]
                continue
            place[key] = draw(VALUES)
            break
    return copy


FAILED = Termination(
    codec.parse(Termination, {"outcome": "Failed", "reason": "r"}).outcome, "r", None, "m",
    Failure(FailureClass.HANG, "bert-0-0", 5.0, rank=1, exit_code=2),
)  # fmt: skip
POD = raw_pod(0, failed_starts=1, avoids="n2", deleting=NOW, **ended(1, termination=FAILED))
CONDITION = {"type": "Running", "status": "True", "reason": "r", "message": "m", "lastTransitionTime": timestamp(NOW)}
NODE = {
    "metadata": {"name": "n1", "annotations": {"end": timestamp(NOW + 9)}, "labels": {"zone": "a"}},
    "spec": {"unschedulable": True, "taints": [{"key": "spot", "effect": "NoSchedule", "timeAdded": timestamp(NOW)}]},
}
WORKLOAD = {
    "metadata": {"name": "w", "uid": "u", "annotations": {"elasticjob.dev/replaces": "v"}},
    "spec": {"queueName": "q", "active": True, "podSets": [{"name": "worker", "count": 2, "minCount": 1}]},
    "status": {
        "conditions": [CONDITION | {"type": "Admitted"}],
        "admission": {"podSetAssignments": [{"name": "worker", "count": 2, "flavors": {"cpu": "f"}}]},
        "admissionChecks": [{"podSetUpdates": [{"name": "worker", "labels": {"a": "b"}, "nodeSelector": {"c": "d"}}]}],
    },
}
LEASE = {"holderIdentity": "a", "leaseDurationSeconds": 6, "leaseTransitions": 3, "renewTime": timestamp(NOW)}
EVICTION = {
    "metadata": {"name": "bert-0-0", "uid": "e"},
    "spec": {"target": {"pod": {"name": "bert-0-0", "uid": "u"}}},
    "status": {
        "requesters": [{"name": "r", "intent": "Eviction"}],
        "targetResponders": [{"name": RESPONDER, "state": "Active"}],
        "responders": [{"name": RESPONDER, "startTime": timestamp(NOW), "heartbeatTime": timestamp(NOW)}],
    },
}
AVOIDED = {"name": "n3", "since": timestamp(NOW - 9), "until": timestamp(NOW + 9), "why": "w", "reason": "NodeLost"}
STATUS = {
    "phase": "Running", "incarnations": "0,1", "restarts": 1, "failedStarts": 2, "startFailures": 1, "cordonSpares": 1,
    "lastStartFailureTime": timestamp(NOW), "restartWindow": {"start": timestamp(NOW), "count": 1},
    "rendezvous": {"incarnation": 0, "standby": 1, "newest": 1, "round": "1.0.1"}, "rendezvousRound": 3,
    "incarnationRanges": [{"first": 0, "last": 0, "incarnation": 0}, {"first": 1, "last": 1, "incarnation": 1}],
    "lastChargedRound": {"executionAttempt": 1, "storeIncarnation": 0, "number": 1},
    "chargedFailures": [{"type": "PodStart", "podStart": 1}, {"type": "Pod", "pod": "p"}],
    "scaledDown": {"replicas": 2, "indexRanges": [{"first": 1, "last": 1}]},
    "backOff": {"attempts": 1, "since": timestamp(NOW)},
    "avoidedNodes": [AVOIDED], "suspectNodes": [AVOIDED], "conditions": [CONDITION], "chargedRound": "1.0.1",
    "goodput": {"lostSeconds": 1.0, "productiveSeconds": 2.0, "lastUpdatedTime": timestamp(NOW), "round": "1.0.1"},
    "recentFailures": [{"time": timestamp(NOW), "pod": "p", "message": "m", "recoverySeconds": {"stop": 1}}],
}  # fmt: skip


def check_writable(raw_status: Any) -> None:
    """Fail unless the API server would take the status: JSON, without infinities, in UTF-8, with 64 bits a number."""
    written = json.dumps(raw_status, allow_nan=False, ensure_ascii=False).encode()
    json.loads(written, parse_int=lambda digits: pytest.fail(digits) if len(digits) > 19 else int(digits))


@pytest.mark.slow
@examples(100)
@given(changed(POD))
def test_no_pod_makes_its_job_or_another_one_fail(raw: dict[str, Any]) -> None:
    pod = parse_pod(raw)
    planned = plan(Observed(parse_job(raw_job(status=STATUS)), workers=(pod,)), "image", NOW)
    check_writable(planned.status)


@examples(100)
@given(changed(raw_job(status=STATUS)))
def test_no_job_makes_its_plan_fail(raw: dict[str, Any]) -> None:
    parse_status(mapping(raw, "status"))
    plan(Observed(parse_job(raw)), "image", NOW)


@examples(60)
@given(changed(NODE), changed(WORKLOAD), changed(LEASE))
def test_no_node_workload_or_lease_raises(
    node: dict[str, Any], workload: dict[str, Any], lease: dict[str, Any]
) -> None:
    keys = NoticeKeys(frozenset({"spot"}), frozenset({"end"}), {"spot": 60.0})
    parse_warning(node, keys, NOW, parse_warning(node, keys, NOW))
    parse_topology(node, ("zone",))
    queue_view((parse_workload(workload), parse_workload(workload)))
    assigned_flavors(workload)
    pod_changes(workload, (workload,))
    may_acquire(ObservedLease(lease, NOW), "b", NOW)
    next_record(lease, "b", NOW)


@examples(100)
@given(changed(EVICTION))
def test_no_eviction_raises_and_each_that_asks_for_the_operator_can_be_answered(raw: dict[str, Any]) -> None:
    eviction = parse_eviction(raw)
    if eviction is not None and eviction.active:
        answered = {"status": answered_status(eviction.raw, NOW, "m", completed=True)}
        assert own_report(answered)["message"] == "m"


EVENT = {
    "reason": "Killing", "message": "Container main failed liveness probe", "lastTimestamp": "2026-01-01T00:00:00Z",
    "involvedObject": {"uid": "u", "fieldPath": "spec.containers{main}"},
}  # fmt: skip
LIMIT_RANGE = {
    "spec": {
        "limits": [
            {"type": "Container", "min": {"cpu": "1"}, "max": {"cpu": "2"}, "maxLimitRequestRatio": {"cpu": "2"}}
        ]
    }
}
LABELLED = {
    "metadata": {"labels": {"team": "a"}, "annotations": {"linkerd.io/inject": "disabled"}},
    "spec": {
        "tolerations": [{"key": "k"}], "serviceAccountName": "s",
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
            {"labelSelector": {"matchLabels": {"a": "b"}, "matchExpressions": [{"key": "k"}]}, "matchLabelKeys": ["m"]},
        ]}},
    },
}  # fmt: skip


@examples(100)
@given(changed(EVENT), changed(LIMIT_RANGE), changed(LABELLED), changed({"labels": {"a": "b"}, "tolerations": []}))
def test_no_event_limitrange_or_template_raises(
    event: dict[str, Any], limit_range: dict[str, Any], template: dict[str, Any], store: dict[str, Any]
) -> None:
    stop_cause(parse_pod(raw_pod(0)), (event, EVENT))
    fit_resources({"requests": {"cpu": "50m"}, "limits": {"memory": "1Gi"}}, {}, (limit_range, LIMIT_RANGE))
    read_store(store, template)


REPORT = report(*(parse_pod(raw_pod(i)) for i in range(2)))


@examples(100)
@given(changed(json.loads(encode(REPORT))))
def test_no_report_of_a_store_makes_its_job_fail(raw: dict[str, Any]) -> None:
    try:
        # As a store may write it: JSON text, with escapes and numbers of any length.
        found = decode(json.dumps(raw).encode())
    except codec.MessageError:
        return
    pods = (parse_pod(raw_pod(0)), parse_pod(raw_pod(1)))
    link = LinkView(connected=True, since=NOW, report=found if isinstance(found, Report) else None)
    check_writable(plan(Observed(parse_job(raw_job(status=STATUS)), workers=pods, link=link), "image", NOW).status)


@pytest.mark.parametrize("time", ["9e18", "-9e18", "-1"])
def test_a_time_that_no_status_can_have_is_written_as_the_nearest_one(time: str) -> None:
    message = f'{{"outcome":"Error","reason":"r","failure":{{"kind":"UserError","pod":"p","time":{time},"rank":0}}}}'
    pod = parse_pod(raw_pod(0, **ended(1, termination=message)))
    status = {"incarnations": "0", "rendezvous": {"incarnation": 0, "round": "1.0.1"}, "rendezvousRound": 1}
    planned = plan(Observed(parse_job(raw_job(status=status)), workers=(pod,)), "image", NOW)
    assert planned.status is not None
    written = text(planned.status, "lastFailure", "time")
    assert written in ("9999-12-31T23:59:59Z", "1970-01-01T00:00:00Z")
    assert moment({"time": written}, "time") is not None


@pytest.mark.parametrize("number", [{"formed_at": 1e300}, {"rounds": 10**400}, {"rounds": -(10**30)}])
def test_numbers_of_messages_are_bounded_where_they_enter(number: dict[str, Any]) -> None:
    raw = json.loads(encode(REPORT))
    with pytest.raises(codec.MessageError, match="not a number from"):
        decode(json.dumps(raw | number).encode())
    message = json.dumps({"outcome": "Error", "reason": "r", "failure": {"kind": "UserError", "pod": "p"} | number})
    assert parse_pod(raw_pod(0, **ended(1, termination=message))).name == text(raw_pod(0), "metadata", "name")


# ---- an object that no one has thought of


REDUCED = "pod bert-0-0 cannot be read, and only its identity, node, phase and deletion count: RuntimeError: boom"


def hostile_parser(name: str) -> Any:
    """Return a `parse_pod` that raises for pods whose names begin so: it stands for an unknown fault of the parser."""

    def parse(raw: Any) -> Pod:
        if text(raw, "metadata", "name").startswith(name):
            raise RuntimeError("boom")
        return parse_pod(raw)

    return parse


@pytest.fixture
def one_unreadable(monkeypatch: pytest.MonkeyPatch) -> Api:
    """An API server with two pods, the first of which cannot be read."""
    monkeypatch.setattr(watch_cache, "parse_pod", hostile_parser("bert-0-0"))
    api = Api(NOW)
    owner = [{"kind": "ElasticJob", "uid": UID, "controller": True}]
    for index in (0, 1):
        raw = raw_pod(index)
        raw["metadata"]["ownerReferences"] = owner
        api.put(PODS, raw)
    return api


def test_a_pod_that_cannot_be_read_is_reduced_logged_once_and_in_its_jobs_condition(
    one_unreadable: Api, caplog: pytest.LogCaptureFixture
) -> None:
    concerned: list[JobKey] = []
    cache = WatchCache(concerned.append)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            asyncio.run(cache.list_again(one_unreadable, ()))
            for index in (0, 1):
                one_unreadable.put(PODS, one_unreadable.objects[PODS, f"bert-{index}-0"])
    assert cache.is_listed("ns")
    reduced, other = (pod for _, pod in sorted(cache.pods(UID), key=lambda found: found[1].name))
    assert (reduced.name, reduced.index, reduced.node, reduced.running, reduced.conditions) == (
        "bert-0-0", 0, "n1", True, frozenset(),
    )  # fmt: skip
    assert other.conditions
    assert [record.message for record in caplog.records] == [f"ns: {REDUCED}"]
    problems = cache.unreadable(UID)
    planned = plan(Observed(parse_job(raw_job()), unreadable=problems), "image", NOW)
    running = next(c for c in objects(planned.status, "conditions") if c["type"] == ConditionType.RUNNING.value)
    assert running["message"].endswith(f"; {REDUCED}")


async def test_a_running_pod_that_cannot_be_read_is_not_replaced_and_is_deleted_when_the_job_shrinks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(replicas=2, elasticPolicy={"minReplicas": 1, "maxReplicas": 2})
    for module in (observe, watch_cache):
        monkeypatch.setattr(module, "parse_pod", hostile_parser("bert-1-0"))
    await cluster.reconcile_for(600.0)
    assert cluster.workers() == ["bert-0-0", "bert-1-0"]
    cluster.change(replicas=1)
    await cluster.reconcile_for(1.0)
    assert cluster.workers() == ["bert-0-0"]


async def test_pods_that_cannot_be_read_are_replaced_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(failurePolicy={"maxRestarts": 2})
    for module in (observe, watch_cache):
        monkeypatch.setattr(module, "parse_pod", hostile_parser("bert-0-"))
    for _ in range(10):
        await cluster.reconcile_for(30.0)
        for raw in cluster.api.pods(Role.WORKER):
            if raw["metadata"]["name"].startswith("bert-0-"):
                raw["status"] = {"phase": "Failed"}
    ends = [c for c in job_status(cluster.api)["conditions"] if c["type"] in ("FailureTarget", "Failed")]
    assert [c["reason"] for c in ends][:1] == ["MaxRestartsExceeded"]
    assert job_status(cluster.api)["lastFailure"]["reason"] == UNREADABLE


async def test_a_read_of_a_jobs_pods_reduces_the_one_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster()
    for module in (observe, watch_cache):
        monkeypatch.setattr(module, "parse_pod", hostile_parser("bert-0-0"))
    await cluster.reconcile_for(600.0)
    assert [record.message for record in caplog.records if "cannot be read" in record.message] == [f"ns: {REDUCED}"]
    assert "pod bert-0-0 cannot be read" in cluster.running()["message"]
    assert cluster.workers() == ["bert-0-0", "bert-1-0"]


@pytest.mark.parametrize("place", ["annotation", "label", "message"])
def test_the_list_of_all_pods_survives_the_numbers_of_one(place: str) -> None:
    raw = raw_pod(0, **ended(1, termination=f'{{"outcome": "Failed", "reason": "r", "round": "1.0.{LONG}"}}'))
    if place == "annotation":
        raw["metadata"]["annotations"] = {FAILED_STARTS: LONG}
    elif place == "label":
        raw["metadata"]["labels"][Label.INDEX] = LONG
    raw["metadata"]["ownerReferences"] = [{"kind": "ElasticJob", "uid": UID, "controller": True}]
    api, cache = Api(NOW), WatchCache()
    api.put(PODS, raw)
    asyncio.run(cache.list_again(api, ()))
    assert [pod.name for _, pod in cache.pods(UID)] == ["bert-0-0"]
    assert cache.unreadable(UID) == ()

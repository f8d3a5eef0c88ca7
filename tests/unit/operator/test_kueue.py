"""A job with a queue of Kueue: its Workload, when it may have pods and how many, and what it gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from elasticjob._runtime.contract.messages import Outcome
from elasticjob._runtime.contract.names import Role
from elasticjob_operator import manifests
from elasticjob_operator.actions import (
    CreateStore,
    CreateWorker,
    CreateWorkload,
    DeletePod,
    DeleteWorkload,
    FinishWorkload,
    MarkPodsReady,
    ReclaimPods,
    ReleaseQuota,
    UpdateWorkload,
)
from elasticjob_operator.kube import JOBS, PODS, NotFound, Refused, Resource
from elasticjob_operator.kube.api import (
    KUEUE_WORKLOADS,
    PRIORITY_CLASSES,
    RESOURCE_FLAVORS,
    WORKLOAD_PRIORITY_CLASSES,
)
from elasticjob_operator.model.cluster.pods import Pod
from elasticjob_operator.model.cluster.raw import timestamp
from elasticjob_operator.model.cluster.workload import POD_SETS, REPLACES, QueueView, parse_workload, queue_view
from elasticjob_operator.model.job.guarded import template_digest
from elasticjob_operator.model.observed import Children, Job, JobKey, LinkView, Observed, parse_job
from elasticjob_operator.observation import observe
from elasticjob_operator.observation.job_memory import LONGEST_RETRY
from elasticjob_operator.plan import Plan
from elasticjob_operator.settings import parse_settings
from elasticjob_operator.watch import watch_cache
from support.operator.build import (
    NOW,
    UID,
    Raw,
    condition,
    conditions_of,
    elastic,
    ended,
    events_of,
    gathering,
    raw_job,
    reasons_of,
    report,
    run,
    status,
    status_of,
    steady,
    worker,
)
from support.operator.cluster import Cluster
from support.operator.watch import Watch
from support.operator.world import job_status

LABEL = "kueue.x-k8s.io/queue-name"
NAME = "elasticjob-bert-11111"
SUSPENDED = condition("Suspended", reason="SuspendedByQueue")
RESERVED, ADMITTED = condition("QuotaReserved"), condition("Admitted")
EVICTED = condition("Evicted", reason="Preempted")
PENDING = condition("QuotaReserved", value=False, reason="Pending") | {"message": "insufficient unused quota"}


def labelled(labels: Raw | None = None, **more: Any) -> Raw:
    """Return the job with a queue, or with other labels; arguments as for `raw_job`."""
    raw = raw_job(**more)
    raw["metadata"]["labels"] = {LABEL: "team-a"} if labels is None else labels
    return raw


def queued_job(**more: Any) -> Job:
    return parse_job(labelled(**more))


TEMPLATE = template_digest(raw_job()["spec"]["template"])


def raw_workload(
    *conditions: Raw, count: int = 2, admitted: int | None = None, template: str = TEMPLATE, **spec: Any
) -> Raw:
    """Return the job's Workload; `admitted`: for how many pods it has quota, `template`: which pods it asks for."""
    known: Raw = {"conditions": [*conditions]}
    if admitted is not None:
        known["admission"] = {"podSetAssignments": [{"name": "worker", "count": admitted}]}
    pods = {"name": "worker", "count": count, "template": {}}
    return {
        "metadata": {
            "name": NAME, "uid": "w", "namespace": "ns", "generation": 1, "annotations": {POD_SETS: template},
        },
        "spec": {"queueName": "team-a", "podSets": [pods], **spec},
        "status": known,
    }  # fmt: skip


def view(*conditions: Raw, **more: Any) -> QueueView:
    return QueueView(parse_workload(raw_workload(*conditions, **more)))


def running(queue: QueueView, *pods: Pod, spec: Raw | None = None, **fields: Any) -> Observed:
    """Return a job with a queue that was started, with these pods or two that train."""
    observed = steady(workers=pods or None)
    return replace(observed, job=queued_job(status=status(**fields), **(spec or {})), queue=queue)


def waiting(queue: QueueView, *pods: Pod, spec: Raw | None = None) -> Observed:
    """Return a job with a queue that is suspended, with no other children left than these pods."""
    found = running(queue, *(pods or (worker(0),)), spec=spec, conditions=[SUSPENDED])
    return replace(found, workers=pods, stores=(), children=Children(), link=LinkView(), standby_link=LinkView())


def actions_on_workload(p: Plan) -> list[Any]:
    kinds = (
        CreateWorkload, DeleteWorkload, FinishWorkload, MarkPodsReady, ReclaimPods, ReleaseQuota, UpdateWorkload,
    )  # fmt: skip
    return [action for action in p.actions if isinstance(action, kinds)]


def starts_pods(p: Plan) -> bool:
    return any(isinstance(action, (CreateWorker, CreateStore)) for action in p.actions)


# ---- the object


def built(labels: Raw | None = None, **spec: Any) -> Raw:
    own = parse_job(labelled(labels, **spec))
    assert own.spec is not None
    return manifests.workload_manifest(own, own.spec, NAME, {})


def test_the_workload_of_a_job_of_fixed_size() -> None:
    template = raw_job()["spec"]["template"] | {"metadata": {"labels": {"team": "a"}}}
    found = built(template=template)
    assert (found["apiVersion"], found["kind"]) == ("kueue.x-k8s.io/v1beta2", "Workload")
    assert found["metadata"]["name"] == NAME
    (owner,) = found["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("ElasticJob", UID, True)
    assert found["metadata"]["labels"]["kueue.x-k8s.io/job-uid"] == UID
    pods = {**template, "spec": {**template["spec"], "restartPolicy": "Never"}}
    assert found["spec"] == {
        "queueName": "team-a", "podSets": [{"name": "worker", "count": 2, "template": pods}],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (elastic(2, 4, 4), (4, 2)),
        (elastic(2, 4, 3), (3, 2)),
        (elastic(2, 4, 2), (2, None)),
        ({"elasticPolicy": {"minReplicas": 2, "maxReplicas": 4, "spares": 1}, "replicas": 2}, (3, 2)),
    ],
)
def test_an_elastic_job_asks_for_its_target_and_spares_and_starts_from_its_minimum_on(
    spec: Raw, expected: tuple[int, int | None]
) -> None:
    (pods,) = built(**spec)["spec"]["podSets"]
    assert (pods["count"], pods.get("minCount")) == expected


def test_the_longest_name_of_a_job_leaves_names_that_are_values_of_labels() -> None:
    raw = labelled()
    raw["metadata"]["name"] = "a" * 50
    names = manifests.workload_names(parse_job(raw))
    assert [len(name) for name in names] == [61, 63]


def statuses(raw: Raw) -> dict[str, tuple[str, str, str]]:
    return {c["type"]: (c["status"], c["reason"], c["lastTransitionTime"]) for c in raw["conditions"]}


@pytest.mark.parametrize(("reason", "requeued"), [("Preempted", "True"), ("PodsReadyTimeout", "False")])
def test_an_evicted_workload_is_given_back_as_kueue_expects_it(reason: str, requeued: str) -> None:
    evicted = EVICTED | {"reason": reason, "message": "by a job of team-b"}
    unknown = condition("Preempted", reason="InClusterQueue")
    before = raw_workload(RESERVED, ADMITTED, evicted, unknown, admitted=2)
    after = manifests.released_status(before, NOW)
    earlier, now = timestamp(NOW - 50), timestamp(NOW)
    assert statuses(after) == {
        "QuotaReserved": ("False", "Pending", now),
        "Admitted": ("False", "NoReservation", now),
        "Evicted": ("True", reason, earlier),
        "Preempted": ("True", "InClusterQueue", earlier),
        "Requeued": (requeued, reason, now),
        "PodsReady": ("False", "WaitForStart", now),
    }
    assert "admission" not in after
    assert {c["message"] for c in after["conditions"] if c["type"] in ("QuotaReserved", "Requeued")} == {
        "by a job of team-b"
    }
    again = manifests.released_status({**before, "status": after}, NOW + 5)
    assert statuses(again)["Requeued"] == (requeued, reason, now)


# ---- when the job may have pods


ALONE = "the job has no pods until queue team-a admits it"


@pytest.mark.parametrize(
    ("queue", "action", "message"),
    [
        (QueueView(), [CreateWorkload(NAME)], ALONE),
        (view(), [], f"{ALONE} (Workload {NAME})"),
        (view(PENDING), [], f"{ALONE} (Workload {NAME}): insufficient unused quota"),
        (view(RESERVED, admitted=2), [], f"{ALONE} (Workload {NAME})"),
        (view(PENDING, active=False), [], f"{ALONE}, and Workload {NAME} is deactivated: set its spec.active to true"),
        (view(ADMITTED, condition("Finished")), [],
         f"{ALONE}, and Workload {NAME} is Finished: delete it to queue the job again"),
        (view(RESERVED, ADMITTED, EVICTED, admitted=2), [ReleaseQuota()], f"{ALONE} (Workload {NAME})"),
        (view(count=5), [UpdateWorkload(NAME, "w")], f"{ALONE} (Workload {NAME})"),
        (view(queueName="team-b"), [UpdateWorkload(NAME, "w")], f"{ALONE} (Workload {NAME})"),
        (view(RESERVED, count=5, admitted=5), [], f"{ALONE} (Workload {NAME})"),
    ],
)  # fmt: skip
def test_a_job_waits_until_it_is_admitted(queue: QueueView, action: list[Any], message: str) -> None:
    p = run(waiting(queue))
    assert reasons_of(p)["Suspended"] == ("True", "SuspendedByQueue")
    assert conditions_of(p)["Suspended"]["message"] == message
    assert actions_on_workload(p) == list(p.actions) == action


def test_a_new_job_is_suspended_before_it_has_any_child() -> None:
    p = run(Observed(job=queued_job()))
    assert p.actions == (CreateWorkload(NAME),)
    new = status_of(p)
    assert (new["phase"], new["executionAttempts"], "startTime" in new) == ("Suspended", 0, False)
    admitted = view(RESERVED, ADMITTED, admitted=2)
    p = run(Observed(job=queued_job(status=new), queue=admitted))
    started = status_of(p)
    assert (started["executionAttempts"], reasons_of(p)["Suspended"]) == (1, ("False", "Resumed"))
    assert starts_pods(run(Observed(job=queued_job(status=started), queue=admitted)))


@pytest.mark.parametrize(
    "queue",
    [
        QueueView(),
        view(RESERVED, ADMITTED, EVICTED, admitted=2),
        view(PENDING, condition("Admitted", value=False)),
    ],
    ids=["the Workload was deleted", "evicted", "not admitted any more"],
)
def test_a_job_that_may_have_no_pods_any_more_is_drained(queue: QueueView) -> None:
    p = run(running(queue))
    assert {a.name for a in p.actions if isinstance(a, DeletePod)} == {"bert-0-0", "bert-1-0"}
    assert actions_on_workload(p) == []
    assert reasons_of(p)["Suspended"] == ("True", "SuspendedByQueue")
    assert status_of(p).get("restarts", 0) == 0
    assert "2 pods still to end" in conditions_of(p)["Suspended"]["message"]
    assert "Suspended" in events_of(p)


def test_the_quota_of_an_evicted_job_is_given_back_when_its_last_pod_has_ended() -> None:
    queue = view(RESERVED, ADMITTED, EVICTED, admitted=2)
    draining = run(waiting(queue, worker(0, **ended(143)), worker(1, deleting=NOW + 20)))
    assert actions_on_workload(draining) == []
    assert "queue team-a has evicted the job (Preempted: m)" in conditions_of(draining)["Suspended"]["message"]
    assert actions_on_workload(run(waiting(queue, worker(0, **ended(143))))) == [ReleaseQuota()]


def test_a_job_that_is_admitted_again_starts_its_next_execution() -> None:
    p = run(waiting(view(RESERVED, ADMITTED, condition("Evicted", value=False), admitted=2)))
    assert (status_of(p)["executionAttempts"], events_of(p)) == (2, ["Resumed"])


def test_an_operator_that_may_not_read_workloads_starts_no_job_and_ends_none() -> None:
    unreadable = QueueView(unreadable=True)
    assert run(running(unreadable)).actions == ()
    assert run(waiting(unreadable)).actions == (CreateWorkload(NAME),)
    assert run(Observed(job=queued_job(), queue=unreadable)).actions == (CreateWorkload(NAME),)


@pytest.mark.parametrize("unknown", [QueueView(unreadable=True), QueueView(malformed=True)])
def test_a_job_whose_workload_becomes_unreadable_keeps_to_the_size_that_was_admitted(unknown: QueueView) -> None:
    four = {"elasticPolicy": {"minReplicas": 2, "maxReplicas": 4, "spares": 1}, "replicas": 4}
    admitted = view(RESERVED, ADMITTED, condition("PodsReady"), count=5, admitted=2)
    known = status_of(run(running(admitted, spec=four, selector="none")))
    assert (known["targetReplicas"], run(running(unknown, spec=four, **known)).actions) == (2, ())
    three = view(RESERVED, ADMITTED, condition("PodsReady"), count=3, admitted=3)
    pods, fewer = (worker(0), worker(1), worker(2)), four | {"replicas": 2}
    known = status_of(run(running(three, *pods, spec=fewer, incarnations="0,0,0", selector="none")))
    p = run(running(unknown, *pods, spec=fewer | {"replicas": 3}, **known))
    assert not [a for a in p.actions if isinstance(a, (CreateWorker, DeletePod))], "a spare stays one"


def test_pods_without_room_were_admitted_too() -> None:
    four = elastic(2, 4, 4)
    missing = {"incarnations": "0,0,0,0", "targetReplicas": 2, "scaledDown": {"replicas": 4, "indices": "2,3"}}
    p = run(running(QueueView(unreadable=True), spec=four, **missing))
    assert p.status is None or status_of(p)["scaledDown"]["replicas"] == 4


def test_the_users_own_suspension_gives_the_place_in_the_queue_up() -> None:
    queue, spec = view(RESERVED, ADMITTED, admitted=2), {"suspend": True}
    p = run(running(queue, spec=spec))
    assert reasons_of(p)["Suspended"] == ("True", "SuspendedByUser")
    assert actions_on_workload(p) == []
    p = run(waiting(queue, spec=spec))
    assert p.actions == (DeleteWorkload(NAME, "w"),)
    assert conditions_of(p)["Suspended"]["message"] == "the job has no pods until spec.suspend is false"
    assert run(waiting(QueueView(), spec=spec)).actions == ()
    assert run(waiting(QueueView())).actions == (CreateWorkload(NAME),)


def test_a_job_without_its_label_needs_no_workload() -> None:
    observed = steady()
    assert actions_on_workload(run(replace(observed, queue=view(RESERVED, ADMITTED, admitted=2)))) == [
        DeleteWorkload(NAME, "w")
    ]


BIGGER: Raw = {"spec": {"containers": [{"name": "main", "image": "user:1", "command": ["python", "train.py"],
                                         "resources": {"limits": {"nvidia.com/gpu": "8"}}}]}}  # fmt: skip


def test_a_waiting_job_whose_pods_have_changed_asks_for_the_new_ones() -> None:
    """Else a job that waits for one GPU a pod would start pods with eight of them by that quota."""
    p = run(waiting(view(PENDING), spec={"template": BIGGER}))
    assert p.actions == (UpdateWorkload(NAME, "w"),)
    own = parse_job(labelled(template=BIGGER))
    assert own.spec is not None
    request = manifests.workload_request(own, own.spec)
    assert request["metadata"]["annotations"] == {POD_SETS: own.template_digest}
    (pods,) = request["spec"]["podSets"]
    assert pods["template"]["spec"]["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": "8"}}
    assert run(waiting(view(PENDING, template=own.template_digest), spec={"template": BIGGER})).actions == ()


def test_an_admitted_job_whose_pods_have_changed_is_suspended_and_queued_again() -> None:
    admitted = view(RESERVED, ADMITTED, admitted=2)
    p = run(running(admitted, spec={"template": BIGGER}))
    assert reasons_of(p)["Suspended"] == ("True", "SuspendedByQueue")
    assert {a.name for a in p.actions if isinstance(a, DeletePod)} == {"bert-0-0", "bert-1-0"}
    assert (starts_pods(p), actions_on_workload(p)) == (False, [])
    p = run(waiting(admitted, spec={"template": BIGGER}))
    assert p.actions == (DeleteWorkload(NAME, "w"),)
    assert "asks for pods of another template, and is replaced" in conditions_of(p)["Suspended"]["message"]
    assert run(waiting(QueueView(), spec={"template": BIGGER})).actions == (CreateWorkload(NAME),)


# ---- a job that leaves its queue


def leaves(queue: QueueView, *pods: Pod, to: str = "", suspended: bool = False) -> Observed:
    """Return a job that team-a admitted, and whose label now names another queue, or none."""
    found = waiting(queue, *pods) if suspended else running(queue, *pods)
    raw = labelled({LABEL: to} if to else {}, status=status(conditions=[SUSPENDED] if suspended else []))
    raw["status"]["guardedFields"]["queue"] = "team-a"
    return replace(found, job=parse_job(raw))


def test_the_pods_of_a_job_that_leaves_its_queue_end_before_the_quota_is_free() -> None:
    admitted = view(RESERVED, ADMITTED, condition("PodsReady"), admitted=2)
    p = run(leaves(admitted))
    assert reasons_of(p)["Suspended"] == ("True", "SuspendedForChange")
    assert conditions_of(p)["Suspended"]["message"].startswith(
        "the job has left queue team-a, whose quota its pods use"
    )
    assert {a.name for a in p.actions if isinstance(a, DeletePod)} == {"bert-0-0", "bert-1-0"}
    assert actions_on_workload(p) == []
    p = run(leaves(admitted, suspended=True))
    assert actions_on_workload(p) == [DeleteWorkload(NAME, "w")]
    assert status_of(p)["executionAttempts"] == 2


def test_a_job_that_changes_its_queue_waits_in_the_new_one() -> None:
    admitted = view(RESERVED, ADMITTED, condition("PodsReady"), admitted=2)
    p = run(leaves(admitted, to="team-b"))
    assert reasons_of(p)["Suspended"] == ("True", "SuspendedByQueue")
    assert {a.name for a in p.actions if isinstance(a, DeletePod)} == {"bert-0-0", "bert-1-0"}
    assert actions_on_workload(p) == []
    p = run(leaves(admitted, to="team-b", suspended=True))
    assert (actions_on_workload(p), starts_pods(p)) == ([DeleteWorkload(NAME, "w")], False)
    assert "is in another queue, and is replaced" in conditions_of(p)["Suspended"]["message"]
    assert run(leaves(QueueView(), to="team-b", suspended=True)).actions == (CreateWorkload(NAME),)


def test_the_status_names_the_queue_that_admitted_the_execution() -> None:
    admitted = view(RESERVED, ADMITTED, condition("PodsReady"), admitted=2)
    assert status_of(run(running(admitted)))["guardedFields"]["queue"] == "team-a", "also that of an older operator"


def test_a_job_whose_admission_names_a_topology_does_not_start_and_says_why() -> None:
    raw = raw_workload(RESERVED, ADMITTED, condition("PodsReady"), admitted=2)
    raw["status"]["admission"]["podSetAssignments"][0]["topologyAssignment"] = {"levels": ["rack"]}
    queue = QueueView(parse_workload(raw))
    p = run(waiting(queue))
    assert (starts_pods(p), reasons_of(p)["Suspended"]) == (False, ("True", "SuspendedByQueue"))
    assert "use a ResourceFlavor without topologyName" in conditions_of(p)["Suspended"]["message"]
    assert run(running(queue)).actions == (), "one that ran before this operator goes on"


# ---- what the job asks for


def test_a_waiting_job_of_another_priority_asks_for_that() -> None:
    high = {LABEL: "team-a", "kueue.x-k8s.io/priority-class": "high"}
    found = waiting(view(PENDING))
    urgent = replace(found, job=parse_job(labelled(high, status=status(conditions=[SUSPENDED]))))
    assert run(urgent).actions == (UpdateWorkload(NAME, "w"),)
    known = view(PENDING, priorityClassRef={"name": "high"})
    assert run(replace(urgent, queue=known)).actions == ()
    assert run(replace(found, queue=known)).actions == (UpdateWorkload(NAME, "w"),)


def test_a_workload_of_an_older_operator_is_updated_while_it_waits_and_kept_once_it_has_quota() -> None:
    assert run(waiting(view(PENDING, template=""))).actions == (UpdateWorkload(NAME, "w"),)
    assert run(running(view(RESERVED, ADMITTED, condition("PodsReady"), admitted=2, template=""))).actions == ()


def test_a_workload_that_cannot_be_read_changes_nothing_and_is_named() -> None:
    """It has the name of the job's Workload: one that is created instead would be refused for ever."""
    malformed = queue_view([None])
    assert (malformed.workload, malformed.malformed) == (None, True)
    problem = f"Workload {NAME} cannot be read, and is ignored: RuntimeError: boom"
    trains = run(replace(running(malformed), unreadable=(problem,)))
    assert trains.actions == ()
    assert problem in conditions_of(trains)["Running"]["message"]
    waits = run(replace(waiting(malformed), unreadable=(problem,)))
    assert waits.actions == ()
    assert problem in conditions_of(waits)["Suspended"]["message"]


def test_a_workload_that_kueue_has_changed_is_not_patched_again() -> None:
    """Without its feature PartialAdmission, Kueue drops minCount."""
    assert run(waiting(view(count=4), spec=elastic(2, 4, 4))).actions == ()


def test_a_job_that_trains_says_so_once() -> None:
    admitted = (RESERVED, ADMITTED)
    assert run(running(view(*admitted, admitted=2))).actions == (MarkPodsReady(True),)
    assert run(running(view(*admitted, condition("PodsReady"), admitted=2))).actions == ()


def stopped(queue: QueueView, *pods: Pod) -> Observed:
    """Return an elastic job of one to three pods in which no round trains; these pods exist."""
    found = running(queue, *pods, spec=elastic(2, 3, 3))
    return replace(found, link=replace(found.link, report=gathering(*pods)))


def test_a_job_is_unready_only_while_fewer_pods_run_than_it_needs() -> None:
    """Kueue evicts a job that stays unready: one that trains, or that only forms a round, must not be."""
    marked = view(RESERVED, ADMITTED, condition("PodsReady"), count=3, admitted=3)
    pending = worker(1, phase="Pending", ready=False)
    assert MarkPodsReady(False) in run(stopped(marked, worker(0), pending)).actions
    assert actions_on_workload(run(stopped(marked, worker(0), worker(1)))) == []
    assert actions_on_workload(run(running(marked, worker(0), worker(1), spec=elastic(2, 3, 3)))) == []
    ends = [worker(0, **ended(0)), worker(1, **ended(0))]
    assert MarkPodsReady(False) not in run(stopped(marked, *ends)).actions, "the job succeeds"
    unmarked = view(RESERVED, ADMITTED, condition("PodsReady", value=False), count=3, admitted=3)
    assert actions_on_workload(run(stopped(unmarked, worker(0), pending))) == []


def test_a_job_that_shrinks_gives_the_quota_of_pods_that_have_ended_back() -> None:
    fewer = elastic(1, 4, 2)
    admitted = view(RESERVED, ADMITTED, condition("PodsReady"), count=4, admitted=4)
    pods = [worker(index) for index in range(3)]
    assert actions_on_workload(run(running(admitted, *pods, spec=fewer, incarnations="0,0,0,0"))) == [ReclaimPods(1)]
    assert actions_on_workload(run(running(admitted, *pods[:2], spec=fewer, incarnations="0,0,0,0"))) == [
        ReclaimPods(2)
    ]
    raw = raw_workload(RESERVED, ADMITTED, condition("PodsReady"), count=4, admitted=4)
    raw["status"]["reclaimablePods"] = [{"name": "worker", "count": 2}]
    given_back = QueueView(parse_workload(raw))
    assert actions_on_workload(run(running(given_back, *pods[:2], spec=fewer))) == []
    p = run(running(given_back, *pods[:2], spec=elastic(1, 4, 4)))
    assert status_of(p)["targetReplicas"] == 2, "that quota is gone until the job is admitted again"


@pytest.mark.parametrize(
    ("replicas", "live", "reclaimed", "expected"),
    [
        (6, 4, 0, []),
        (2, 4, 0, []),
        (2, 3, 0, [ReclaimPods(5)]),
        (2, 2, 0, [ReclaimPods(6)]),
        (2, 2, 2, [ReclaimPods(6)]),  # an older operator counted from what was admitted
        (2, 2, 6, []),
    ],
)
def test_kueue_counts_what_is_given_back_from_what_the_workload_asks_for(
    replicas: int, live: int, reclaimed: int, expected: list[ReclaimPods]
) -> None:
    raw = raw_workload(RESERVED, ADMITTED, condition("PodsReady"), count=8, admitted=4)
    raw["status"]["reclaimablePods"] = [{"name": "worker", "count": reclaimed}]
    in_part = QueueView(parse_workload(raw))
    pods = [worker(index) for index in range(live)]
    p = run(running(in_part, *pods, spec=elastic(1, 8, replicas), incarnations="0,0,0,0"))
    assert actions_on_workload(p) == expected
    assert status_of(p)["targetReplicas"] == min(replicas, 4)


@pytest.mark.parametrize("succeeded", [True, False])
def test_the_workload_of_a_job_that_has_ended_is_finished_once_its_pods_have_ended(succeeded: bool) -> None:
    kind, reason = ("SuccessCriteriaMet", "SuccessPolicy") if succeeded else ("FailureTarget", "DeadlineExceeded")
    declared = condition(kind, reason=reason)
    queue = view(RESERVED, ADMITTED, admitted=2)
    ends = [worker(0, **ended(0)), worker(1, **ended(0))]
    over = run(running(queue, *ends, conditions=[declared]))
    assert actions_on_workload(over) == [FinishWorkload(succeeded, "m")]
    assert actions_on_workload(run(running(queue, worker(0), ends[1], conditions=[declared]))) == []
    finished = view(RESERVED, ADMITTED, condition("Finished"), admitted=2)
    assert actions_on_workload(run(running(finished, *ends, conditions=[declared]))) == []
    assert actions_on_workload(run(running(QueueView(), *ends, conditions=[declared]))) == []


# ---- on how many nodes


@pytest.mark.parametrize(
    ("spec", "admitted", "target", "pods"),
    [
        (elastic(1, 4, 4), 4, 4, 4),
        (elastic(1, 4, 4), 3, 3, 3),
        (elastic(1, 4, 4), 1, 1, 1),
        (elastic(1, 4, 2), 4, 2, 2),
        ({"elasticPolicy": {"minReplicas": 2, "maxReplicas": 6, "replicaIncrementStep": 2}, "replicas": 6}, 5, 4, 4),
        ({"elasticPolicy": {"minReplicas": 1, "maxReplicas": 3, "spares": 2}, "replicas": 3}, 4, 3, 4),
        ({"elasticPolicy": {"minReplicas": 1, "maxReplicas": 3, "spares": 2}, "replicas": 3}, 2, 2, 2),
        ({"replicas": 3}, 3, 3, 3),
    ],
)
def test_the_job_has_no_more_nodes_than_the_queue_has_admitted(
    spec: Raw, admitted: int, target: int, pods: int
) -> None:
    queue = view(RESERVED, ADMITTED, count=6, admitted=admitted)
    known = status(incarnations="", rendezvous={"incarnation": 0}, conditions=[])
    p = run(Observed(job=queued_job(status=known, **spec), queue=queue))
    assert status_of(p)["targetReplicas"] == target
    assert len([a for a in p.actions if isinstance(a, CreateWorker)]) == pods


def test_a_job_that_was_admitted_in_part_says_so_and_does_not_ask_again() -> None:
    queue = view(RESERVED, ADMITTED, condition("PodsReady"), count=3, admitted=2)
    p = run(running(queue, spec=elastic(1, 3, 3)))
    assert reasons_of(p)["FullyScaled"] == ("False", "InsufficientCapacity")
    assert conditions_of(p)["FullyScaled"]["message"] == "training on 2 of 3 pods; queue team-a has quota for 2"
    assert status_of(p)["phase"] == "Degraded"
    assert actions_on_workload(p) == []


def test_an_eviction_is_no_change_of_the_size() -> None:
    queue = view(PENDING, condition("Admitted", value=False), count=3)
    p = run(waiting(queue, spec=elastic(1, 3, 3)))
    assert status_of(p)["targetReplicas"] == 3
    assert "lastScaleTime" not in status_of(p)
    assert not {"ScalingUp", "ScalingDown"} & {*events_of(p)}


# ---- another size while the job is admitted


OTHER = f"{NAME}-2"
ELASTIC = {"kueue.x-k8s.io/elastic-job": "true"}
TRAINS = (RESERVED, ADMITTED, condition("PodsReady"))
REPLACED = condition("Finished", reason="WorkloadSliceReplaced")


def replacement(*conditions: Raw, count: int = 3) -> Raw:
    """Return the Workload that replaces the first one."""
    return raw_workload(*conditions, count=count) | {
        "metadata": {"name": OTHER, "uid": "r", "annotations": {REPLACES: "w"}}
    }


def resizable(queue: QueueView, replicas: int, *pods: Pod) -> Observed:
    """Return a job that Kueue may resize, with two nodes that train or with these."""
    raw = labelled(status=status(), **elastic(1, 4, replicas))
    raw["metadata"]["annotations"] = ELASTIC
    return replace(running(queue, *pods), job=parse_job(raw))


def views(*raws: Raw) -> QueueView:
    return queue_view(map(parse_workload, raws))


@pytest.mark.parametrize(
    ("found", "replicas", "pods", "action"),
    [
        ([], 3, 2, [CreateWorkload(OTHER, (NAME, "w"))]),
        ([replacement(PENDING)], 3, 2, []),
        ([replacement(PENDING)], 4, 2, [UpdateWorkload(OTHER, "r")]),
        ([replacement(RESERVED)], 4, 2, []),
        ([replacement(PENDING)], 2, 2, [DeleteWorkload(OTHER, "r")]),
        ([], 2, 2, []),
        ([], 1, 2, []),
        ([], 1, 1, [UpdateWorkload(NAME, "w")]),
    ],
)
def test_an_admitted_job_asks_for_more_by_a_second_workload_and_shrinks_in_place(
    found: list[Raw], replicas: int, pods: int, action: list[Any]
) -> None:
    queue = views(raw_workload(*TRAINS, admitted=2), *found)
    p = run(resizable(queue, replicas, *(worker(index) for index in range(pods))))
    assert actions_on_workload(p) == action
    assert status_of(p)["targetReplicas"] == min(2, replicas)


def test_a_workload_that_kueue_may_resize_is_not_admitted_in_part() -> None:
    raw = labelled(**elastic(1, 4, 4))
    raw["metadata"]["annotations"] = ELASTIC
    own = parse_job(raw)
    assert own.spec is not None
    first = manifests.workload_manifest(own, own.spec, NAME, {})
    second = manifests.workload_manifest(own, own.spec, OTHER, {}, (NAME, "w"))
    assert "minCount" not in first["spec"]["podSets"][0]
    known = {**ELASTIC, POD_SETS: own.template_digest}
    assert first["metadata"]["annotations"] == known
    assert second["metadata"]["annotations"] == {
        **known, "kueue.x-k8s.io/workload-slice-replacement-for": f"ns/{NAME}", REPLACES: "w",
    }  # fmt: skip


def test_the_second_workload_counts_once_it_is_admitted_and_the_first_is_replaced() -> None:
    first, second = raw_workload(*TRAINS, admitted=2), replacement(RESERVED, ADMITTED)
    before = raw_workload(*TRAINS, REPLACED, admitted=2)
    early = views(before, replacement(PENDING))
    assert early.workload is not None
    assert (early.workload.name, early.workload.admitted) == (NAME, True)
    assert views(first, second).workload == views(second, first).workload == parse_workload(first)
    assert views(before, second) == QueueView(parse_workload(second), replaced=parse_workload(before))
    assert views(second) == QueueView(parse_workload(second))
    assert views(before) == QueueView(replaced=parse_workload(before))
    third = {**first, "metadata": {"name": NAME, "uid": "t", "annotations": {REPLACES: "r"}}}
    assert views(second, third).workload == parse_workload(second)


def test_the_second_workload_goes_when_the_job_is_evicted_or_suspended() -> None:
    queue = views(raw_workload(*TRAINS, EVICTED, admitted=2), replacement(PENDING))
    assert actions_on_workload(run(resizable(queue, 3))) == [DeleteWorkload(OTHER, "r")]
    queue = views(raw_workload(*TRAINS, admitted=2), replacement(PENDING))
    suspended = running(queue, spec={**elastic(1, 4, 3), "suspend": True})
    assert actions_on_workload(run(suspended)) == [DeleteWorkload(OTHER, "r")]


# ---- life


def kueue_cluster(**spec: Any) -> Cluster:
    """Return a cluster whose job has a queue."""
    cluster = Cluster(**spec)
    cluster.api.objects[JOBS, "bert"]["metadata"]["labels"] = {LABEL: "team-a"}
    return cluster


def workload(cluster: Cluster, name: str = NAME) -> Raw:
    return cluster.api.objects[KUEUE_WORKLOADS, name]


def decide(cluster: Cluster, *conditions: Raw, name: str = NAME, **admission: Any) -> None:
    """Write conditions of a Workload as Kueue does, and the pods' assignment."""
    found = workload(cluster, name)
    kept = {c["type"]: c for c in (*found.get("status", {}).get("conditions", []), *conditions)}
    changed: Raw = {**found.get("status", {}), "conditions": [*kept.values()]}
    if admission:
        changed["admission"] = {"podSetAssignments": [{"name": "worker", **admission}]}
    cluster.api.put(KUEUE_WORKLOADS, {**found, "status": changed})


def admit(cluster: Cluster, count: int, **more: Any) -> None:
    decide(cluster, RESERVED, ADMITTED, condition("Evicted", value=False), count=count, **more)


async def test_a_job_is_admitted_evicted_and_admitted_again() -> None:
    cluster = kueue_cluster(**elastic(2, 3, 3))
    await cluster.reconcile_for(5.0)
    assert (cluster.workers(), job_status(cluster.api)["phase"]) == ([], "Suspended")
    admit(cluster, 2)
    await cluster.reconcile_for(5.0)
    assert cluster.workers() == ["bert-0-0", "bert-1-0"]
    decide(cluster, EVICTED)
    await cluster.reconcile_for(60.0)
    assert (cluster.workers(), cluster.api.pods(Role.STORE)) == ([], [])
    assert statuses(workload(cluster)["status"])["QuotaReserved"][:2] == ("False", "Pending")
    assert "admission" not in workload(cluster)["status"]
    admit(cluster, 3)
    await cluster.reconcile_for(5.0)
    assert cluster.workers() == ["bert-0-1", "bert-1-1", "bert-2-0"]
    assert job_status(cluster.api)["executionAttempts"] == 2
    assert job_status(cluster.api)["restarts"] == 0


async def test_the_workload_follows_the_spec_until_quota_is_reserved() -> None:
    cluster = kueue_cluster(**elastic(1, 4, 2))
    await cluster.reconcile_for(5.0)
    before = workload(cluster)
    cluster.change(replicas=4)
    await cluster.reconcile_for(5.0)
    assert workload(cluster)["spec"]["podSets"][0]["count"] == 4
    assert workload(cluster)["metadata"]["uid"] == before["metadata"]["uid"]
    admit(cluster, 4)
    cluster.change(replicas=3)
    await cluster.reconcile_for(5.0)
    assert workload(cluster)["spec"]["podSets"][0]["count"] == 4
    assert len(cluster.workers()) == 3


async def test_a_status_that_kueue_changes_at_the_same_time_is_not_overwritten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = kueue_cluster()
    await cluster.reconcile_for(5.0)
    decide(cluster, RESERVED, EVICTED, count=2)
    update, races = cluster.api.update, [ADMITTED]

    async def racing(resource: Resource, namespace: str, body: Mapping[str, Any], subresource: str = "") -> Raw:
        if resource is KUEUE_WORKLOADS and races:
            decide(cluster, condition("Evicted", value=False), races.pop())
        return await update(resource, namespace, body, subresource)

    monkeypatch.setattr(cluster.api, "update", racing)
    await cluster.reconcile_for(5.0)
    assert not races
    assert statuses(workload(cluster)["status"])["QuotaReserved"][0] == "True"
    assert len(cluster.workers()) == 2


async def test_a_job_grows_while_it_trains_and_its_workloads_take_turns() -> None:
    cluster = kueue_cluster(**elastic(1, 4, 2))
    cluster.api.objects[JOBS, "bert"]["metadata"]["annotations"] = ELASTIC
    await cluster.reconcile_for(5.0)
    admit(cluster, 2)
    await cluster.reconcile_for(5.0)
    for replicas, before, after in ((3, NAME, OTHER), (4, OTHER, NAME)):
        cluster.change(replicas=replicas)
        await cluster.reconcile_for(5.0)
        assert len(cluster.workers()) == replicas - 1
        assert workload(cluster, after)["spec"]["podSets"][0]["count"] == replicas
        decide(cluster, REPLACED, name=before)
        decide(cluster, RESERVED, ADMITTED, name=after, count=replicas)
        await cluster.reconcile_for(5.0)
        assert len(cluster.workers()) == replicas
        assert (KUEUE_WORKLOADS, before) not in cluster.api.objects
    assert job_status(cluster.api)["executionAttempts"] == 1


FLAVOR = {
    "metadata": {"name": "spot"},
    "spec": {
        "nodeLabels": {"pool": "spot", "zone": "a"},
        "tolerations": [{"key": "spot", "operator": "Exists"}, {"key": "gpu", "operator": "Exists"}],
    },
}


async def test_pods_get_the_flavor_and_what_admission_checks_add_and_the_template_stays() -> None:
    own = raw_job()["spec"]["template"]["spec"]
    own |= {"nodeSelector": {"zone": "a"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]}
    cluster = kueue_cluster(template={"metadata": {"labels": {"team": "a"}}, "spec": own})
    await cluster.reconcile_for(5.0)
    found = workload(cluster)
    update = {"name": "worker", "labels": {"team": "b", "check": "x"}, "annotations": {"consume": "r"}}
    checks = [{"name": "prov", "state": "Ready", "podSetUpdates": [update, {"name": "other", "labels": {"no": "no"}}]}]
    cluster.api.put(KUEUE_WORKLOADS, {**found, "status": {"admissionChecks": checks}})
    admit(cluster, 2, flavors={"cpu": "spot", "memory": "spot"})
    await cluster.reconcile_for(5.0)
    assert cluster.workers() == []
    cluster.api.put(RESOURCE_FLAVORS, FLAVOR)
    await cluster.reconcile_for(LONGEST_RETRY)
    assert len(cluster.workers()) == 2
    for pod in cluster.api.pods(Role.WORKER):
        assert pod["spec"]["nodeSelector"] == {"pool": "spot", "zone": "a"}
        assert [item["key"] for item in pod["spec"]["tolerations"]] == ["gpu", "spot"]
        assert {key: pod["metadata"]["labels"].get(key) for key in ("team", "check", "no")} == {
            "team": "a", "check": "x", "no": None,
        }  # fmt: skip
        assert pod["metadata"]["annotations"]["consume"] == "r"
    assert "nodeSelector" not in cluster.api.pods(Role.STORE)[0]["spec"]
    assert cluster.api.objects[JOBS, "bert"]["spec"]["template"]["spec"] == own


@pytest.mark.parametrize("permitted", [True, False])
async def test_no_pod_is_created_while_the_workload_that_was_admitted_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, permitted: bool
) -> None:
    """A new operator does not know the flavor: a pod without it would run where the job has no quota."""
    cluster = kueue_cluster()
    await cluster.reconcile_for(5.0)
    admit(cluster, 2)
    await cluster.reconcile_for(5.0)
    before = cluster.workers()
    assert len(before) == 2

    def boom(raw: Raw) -> Any:
        raise RuntimeError("boom")

    again = Cluster()
    get = again.api.get

    async def refused(resource: Resource, *args: Any) -> Raw:
        if resource is KUEUE_WORKLOADS:
            raise Refused("workloads: no", 403)
        return await get(resource, *args)

    if permitted:
        monkeypatch.setattr(observe, "parse_workload", boom)
        monkeypatch.setattr(watch_cache, "parse_workload", boom)
    else:
        monkeypatch.setattr(again.api, "get", refused)
    again.api.objects, again.world.api = cluster.api.objects, again.api
    again.api.now = cluster.api.now
    again.api.remove(PODS, before[0])
    await again.reconcile_for(30.0)
    assert again.workers() == before[1:]
    phase, workloads = job_status(again.api)["phase"], [k for k in again.api.objects if k[0] is KUEUE_WORKLOADS]
    assert (phase != "Suspended", len(workloads)) == (True, 1)


@pytest.mark.parametrize(
    ("labels", "pod", "resource", "kind"),
    [
        ({"kueue.x-k8s.io/priority-class": "high"}, {}, WORKLOAD_PRIORITY_CLASSES, "WorkloadPriorityClass"),
        ({}, {"priorityClassName": "high"}, PRIORITY_CLASSES, "PriorityClass"),
        ({"kueue.x-k8s.io/priority-class": "high"}, {"priorityClassName": "pod-high"}, WORKLOAD_PRIORITY_CLASSES,
         "WorkloadPriorityClass"),
    ],
)  # fmt: skip
async def test_the_workload_has_the_priority_of_its_class(labels: Raw, pod: Raw, resource: Resource, kind: str) -> None:
    cluster = kueue_cluster(template={"spec": {**raw_job()["spec"]["template"]["spec"], **pod}})
    cluster.api.objects[JOBS, "bert"]["metadata"]["labels"] |= labels
    await cluster.reconcile_for(5.0)
    suspended = next(c for c in job_status(cluster.api)["conditions"] if c["type"] == "Suspended")
    assert "create this priority class" in suspended["message"]
    cluster.api.put(resource, {"metadata": {"name": "high"}, "value": 7})
    await cluster.reconcile_for(LONGEST_RETRY)
    spec = workload(cluster)["spec"]
    assert spec["priority"] == 7
    assert spec["priorityClassRef"] == {"group": resource.group, "kind": kind, "name": "high"}


async def test_a_waiting_workload_gets_another_priority_and_loses_it() -> None:
    cluster = kueue_cluster()
    await cluster.reconcile_for(5.0)
    cluster.api.put(WORKLOAD_PRIORITY_CLASSES, {"metadata": {"name": "high"}, "value": 7})
    cluster.api.objects[JOBS, "bert"]["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] = "high"
    await cluster.reconcile_for(5.0)
    assert (workload(cluster)["spec"]["priority"], workload(cluster)["spec"]["priorityClassRef"]["name"]) == (7, "high")
    del cluster.api.objects[JOBS, "bert"]["metadata"]["labels"]["kueue.x-k8s.io/priority-class"]
    await cluster.reconcile_for(5.0)
    assert not {"priority", "priorityClassRef"} & {*workload(cluster)["spec"]}


async def test_what_a_job_gives_back_and_that_it_is_unready_is_in_the_workloads_status() -> None:
    cluster = kueue_cluster(**elastic(1, 4, 4))
    await cluster.reconcile_for(5.0)
    admit(cluster, 4)
    await cluster.reconcile_for(5.0)
    cluster.change(replicas=2)
    await cluster.reconcile_for(60.0)
    await cluster.reconcile_for(5.0)
    assert workload(cluster)["status"]["reclaimablePods"] == [{"name": "worker", "count": 2}]
    assert len(cluster.workers()) == 2
    unready = manifests.ready_status(workload(cluster), NOW, ready=False)
    assert statuses(unready)["PodsReady"][:2] == ("False", "WaitForRecovery")
    released = manifests.released_status(workload(cluster), NOW)
    assert "reclaimablePods" not in released, "Kueue would take them off what the job asks for next"


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (NotFound, "the cluster has no workloads.kueue.x-k8s.io/v1beta2: install Kueue 0.15 or newer"),
        (Refused, "set kueue.enabled to true in the values of elasticjob's chart"),
    ],
)
async def test_without_kueue_the_job_waits_and_says_what_to_do(
    error: type[NotFound | Refused], advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = kueue_cluster()
    failing: list[Exception] = [error("workloads: no", 404 if error is NotFound else 403)]
    get, create = cluster.api.get, cluster.api.create

    async def no_get(resource: Resource, namespace: str | None, name: str) -> Raw:
        if failing and resource is KUEUE_WORKLOADS:
            raise failing[0]
        return await get(resource, namespace, name)

    async def no_create(resource: Resource, namespace: str, body: Mapping[str, Any]) -> Raw:
        if failing and resource is KUEUE_WORKLOADS:
            raise failing[0]
        return await create(resource, namespace, body)

    monkeypatch.setattr(cluster.api, "get", no_get)
    monkeypatch.setattr(cluster.api, "create", no_create)
    await cluster.reconcile_for(60.0)
    suspended = next(c for c in job_status(cluster.api)["conditions"] if c["type"] == "Suspended")
    assert (suspended["status"], suspended["reason"]) == ("True", "SuspendedByQueue")
    assert advice in suspended["message"]
    assert cluster.workers() == []
    failing.clear()
    await cluster.reconcile_for(LONGEST_RETRY)
    assert workload(cluster)["spec"]["queueName"] == "team-a"


# ---- the watch


async def test_a_decision_of_kueue_is_an_event_and_a_job_that_waits_costs_no_request() -> None:
    cluster = kueue_cluster()
    cache = cluster.controller.watched
    watch = Watch(cluster.api, cache)
    concerned: list[JobKey] = []
    cache.on_event = concerned.append
    for _ in range(6):
        watch.record()
        watch.deliver()
        await cluster.reconcile()
        cluster.api.now += 2.0
    reads = len(cluster.api.reads)
    for _ in range(5):
        cluster.api.now += 300.0
        await cluster.reconcile()
    assert cluster.api.reads[reads:] == []
    concerned.clear()
    admit(cluster, 2)
    watch.record()
    watch.deliver()
    assert {*concerned} == {("ns", "bert")}
    await cluster.reconcile_for(5.0)
    assert len(cluster.workers()) == 2


async def test_a_workload_whose_deletion_the_watch_has_lost_is_dropped_by_the_list() -> None:
    cluster = kueue_cluster()
    cache = cluster.controller.watched
    watch = Watch(cluster.api, cache)
    await cluster.reconcile_for(1.0)
    watch.record()
    watch.deliver()
    assert cache.workloads(UID)
    cluster.api.remove(KUEUE_WORKLOADS, NAME)
    cache.kueue = True
    await cache.list_again(cluster.api, ())
    assert not cache.workloads(UID)


def test_a_workload_with_copied_labels_is_not_the_jobs() -> None:
    cluster = kueue_cluster()
    labels = {"elasticjob.dev/job-name": "bert", "elasticjob.dev/job-uid": UID}
    cluster.controller.watched.see_workload({"metadata": {"namespace": "ns", "uid": "s", "labels": labels}})
    assert cluster.controller.watched.workloads(UID) == []


@pytest.mark.parametrize(
    ("argv", "environ", "expected"),
    [([], {}, False), (["--kueue"], {}, True), ([], {"ELASTICJOB_KUEUE": "true"}, True)],
)
def test_workloads_are_watched_only_on_request(argv: list[str], environ: dict[str, str], expected: bool) -> None:
    assert parse_settings(argv, environ).kueue is expected


def test_the_outcome_of_a_job_that_is_evicted_meanwhile_is_its_end() -> None:
    pods = worker(0), worker(1)
    observed = running(view(RESERVED, ADMITTED, EVICTED, admitted=2), *pods)
    finished = replace(observed.link, report=report(*pods, outcome=Outcome.SUCCEEDED))
    assert reasons_of(run(replace(observed, link=finished)))["SuccessCriteriaMet"][0] == "True"

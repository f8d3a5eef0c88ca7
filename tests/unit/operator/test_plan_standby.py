"""The standby store, as the operator decides: created, used by nodes, promoted, retired, replaced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticjob._runtime.contract.messages import Report, RoundPhase, StandbyStore
from elasticjob._runtime.contract.names import RoundId
from elasticjob_operator.actions import CreateStandbyStore, CreateStore, DeletePod, UpdateStoreService
from elasticjob_operator.manifests.store import store_pod_manifest
from elasticjob_operator.model.observed import LinkView, Observed, ReachedStores, Refusal, RefusalReason
from elasticjob_operator.plan import Plan
from elasticjob_operator.plan.context import (
    AGENTS_SWITCH_SECONDS,
    LEASE_LATE_SECONDS,
    STORE_LEFT_SECONDS,
    STORE_UNRESPONSIVE_SECONDS,
)
from elasticjob_operator.plan.store_pods.standby import STANDBY_MIN_LIFETIME, STANDBY_SILENT_SECONDS
from support.operator.build import (
    IMAGE,
    NOW,
    condition,
    conditions_of,
    ended,
    gathering,
    job,
    link,
    report,
    run,
    standby_report,
    status,
    status_of,
    steady,
    store,
    unschedulable,
    without_standby,
    worker,
)

R1 = RoundId(1, 0, 1)
TWO = worker(0), worker(1)


def rendezvous(p: Plan) -> dict[str, Any]:
    found: dict[str, Any] = status_of(p)["rendezvous"]
    return {name: value for name, value in found.items() if name not in ("endpoint", "round", "lastRound")}


def deleted(p: Plan) -> list[str]:
    return [a.name for a in p.actions if isinstance(a, DeletePod)]


# ---- created and used


@pytest.mark.parametrize(
    ("name", "last_report", "connected", "created"),
    [
        ("a round runs", report(*TWO), True, True),
        ("its workers have not all started", report(*TWO, formed_at=0.0), True, False),
        ("no round runs", gathering(*TWO), True, False),
        ("the store does not respond", report(*TWO), False, False),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_standby_store_is_created_once_a_round_runs(
    name: str, last_report: Report, connected: bool, created: bool
) -> None:
    observed = without_standby(steady())
    p = run(replace(observed, link=replace(link(last_report), connected=connected, since=NOW - 1)))
    assert [a for a in p.actions if isinstance(a, CreateStandbyStore)] == [
        CreateStandbyStore("bert-rdzv-1", 1)
    ] * created
    assert rendezvous(p) == {"incarnation": 0} | ({"standby": 1} if created else {})


def test_a_job_of_one_node_gets_no_standby_store() -> None:
    single = job(replicas=1, status=status(incarnations="0", targetReplicas=1, rendezvous={"incarnation": 0}))
    observed = replace(without_standby(steady(workers=(worker(0),))), job=single)
    assert not [a for a in run(observed).actions if isinstance(a, CreateStandbyStore)]


def test_a_job_with_a_standby_store_needs_nothing_more_and_its_nodes_learn_the_address() -> None:
    p = run(steady())
    assert p.actions == ()
    assert p.operator_view is not None
    assert p.operator_view.standby_store == StandbyStore(1, "10.0.0.1", 29400)
    assert p.standby_address is not None
    assert (p.standby_address.pod, p.standby_address.incarnation) == ("bert-rdzv-1", 1)
    assert p.standby_view is not None
    seen = p.standby_view
    assert (seen.serving, seen.retired, seen.newest_round, seen.beside_store) == (
        0,
        False,
        R1,
        ("bert-0-0", "bert-1-0"),
    )


@pytest.mark.parametrize("unusable", [LinkView(), link(standby_report(retired=True)), link(standby_report(2))])
def test_nodes_do_not_learn_a_standby_store_that_cannot_take_over(unusable: LinkView) -> None:
    p = run(replace(steady(), standby_link=unusable))
    assert p.operator_view is not None
    assert p.operator_view.standby_store is None


def test_the_pod_of_a_standby_store_starts_passive_and_away_from_the_store_if_there_is_room() -> None:
    spec = job().spec
    assert spec is not None
    pod = store_pod_manifest(job(), spec, 1, IMAGE, standby=True)["spec"]
    assert {"name": "ELASTICJOB_STANDBY_STORE", "value": "1"} in pod["containers"][0]["env"]
    (rules,) = pod["affinity"]["podAntiAffinity"].values()
    roles = [r["podAffinityTerm"]["labelSelector"]["matchLabels"]["elasticjob.dev/role"] for r in rules]
    assert roles == ["store", "worker"]
    assert "affinity" not in store_pod_manifest(job(), spec, 1, IMAGE)["spec"]


def test_a_job_whose_standby_store_cannot_be_created_or_placed_runs_as_before() -> None:
    refusal = Refusal(RefusalReason.QUOTA_EXCEEDED, "exceeded quota", NOW + 40, NOW)
    refused = replace(steady(), stores=(store(),), refusals={"bert-rdzv-1": refusal})
    pending = replace(steady(), stores=(store(), store(1, **unschedulable())), standby_link=LinkView())
    healthy = {kind: c["status"] for kind, c in conditions_of(run(steady())).items()}
    for observed in (refused, pending):
        p = run(observed)
        assert {kind: c["status"] for kind, c in conditions_of(p).items()} == healthy
        assert p.actions == ()
    assert run(refused).requeue_after == pytest.approx(40)
    again = run(refused, NOW + 40)
    assert again.actions == (CreateStandbyStore("bert-rdzv-1", 1),)


@pytest.mark.parametrize(
    ("name", "pod", "silence", "replaced"),
    [
        ("it was deleted", None, 0.0, True),
        ("it has ended", store(1, phase="Failed", container={"state": {}}), 0.0, True),
        ("silent", store(1, created=NOW - STANDBY_MIN_LIFETIME), STANDBY_SILENT_SECONDS, True),
        ("silent for a moment", store(1, created=NOW - STANDBY_MIN_LIFETIME), STANDBY_SILENT_SECONDS - 1, False),
        ("silent and new", store(1, created=NOW - STANDBY_MIN_LIFETIME + 1), STANDBY_SILENT_SECONDS, False),
        (
            "silent, and slow to start",
            replace(store(1, created=NOW - 600), seen_running=NOW - STANDBY_MIN_LIFETIME + 1),
            STANDBY_SILENT_SECONDS,
            False,
        ),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_lost_standby_store_is_replaced_under_a_new_number(
    name: str, pod: Any, silence: float, replaced: bool
) -> None:
    stores = (store(),) if pod is None else (store(), pod)
    down = LinkView(silence == 0.0, NOW - silence, standby_report())
    p = run(replace(steady(), stores=stores, standby_link=down))
    gone = pod is None or pod.end is not None
    created = [CreateStandbyStore("bert-rdzv-2", 2)] if gone else []
    assert [a for a in p.actions if isinstance(a, CreateStandbyStore)] == created
    assert deleted(p) == (["bert-rdzv-1"] if replaced and pod is not None else [])
    if gone:
        assert rendezvous(p) == {"incarnation": 0, "standby": 2}
    elif replaced:
        assert rendezvous(p) == {"incarnation": 0, "newest": 1}


@pytest.mark.parametrize(("phase", "waits"), [("Running", True), ("Pending", False)])
def test_only_a_standby_store_that_runs_is_waited_for(phase: str, waits: bool) -> None:
    """A watch event reports that it runs, however long its image takes."""
    observed = replace(steady(), stores=(store(), store(1, phase=phase)), standby_link=LinkView(False, NOW))
    assert (run(observed).requeue_after is not None) == waits


def test_while_a_retired_store_may_be_alive_no_other_standby_store_is_created() -> None:
    raw = status(rendezvous={"incarnation": 0, "newest": 1})
    stores = (store(), store(1, node="n9", deleting=NOW + 5))
    p = run(replace(steady(), job=job(status=raw), stores=stores, standby_link=LinkView(False, NOW - 9)))
    assert p.actions == ()
    assert p.standby_view is not None
    assert p.standby_view.retired


# ---- promoted


ENDED = store(phase="Failed", container={"state": {}})


def down(silence: float, *, by: tuple[Any, ...] = (), last: Report | None = None) -> Observed:
    """Return a job whose store has been silent; nodes `by` wait at its standby store."""
    observed = steady(conditions=[condition("RendezvousReady")])
    return replace(
        observed,
        link=LinkView(False, NOW - silence, last or report(*TWO)),
        standby_link=link(standby_report(1, *by)),
    )


@pytest.mark.parametrize(
    ("name", "observed", "promoted"),
    [
        ("silent", down(STORE_UNRESPONSIVE_SECONDS), True),
        ("silent for a moment", down(STORE_UNRESPONSIVE_SECONDS - 0.1), False),
        ("a node has left it", down(STORE_LEFT_SECONDS, by=(worker(1),)), True),
        ("a node has just left it", down(STORE_LEFT_SECONDS - 0.1, by=(worker(1),)), False),
        ("its pod is gone", replace(down(0.1), stores=(store(1),)), True),
        (
            "its pod has ended",
            replace(down(0.1), stores=(store(phase="Failed", container={"state": {}}), store(1))),
            True,
        ),
        (
            "the nodes have moved",
            replace(steady(), standby_link=link(report(*TWO, incarnation=1, phase=RoundPhase.RECOVERING))),
            True,
        ),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_when_the_standby_store_becomes_the_store(name: str, observed: Observed, promoted: bool) -> None:
    p = run(observed)
    assert rendezvous(p)["incarnation"] == int(promoted)
    assert not [a for a in p.actions if isinstance(a, CreateStore)]
    if not promoted:
        return
    assert "standby" not in rendezvous(p)
    assert p.store_address is not None
    assert p.store_address.pod == "bert-rdzv-1"
    assert p.standby_address is None
    assert p.operator_view is not None
    assert (p.operator_view.serving, p.operator_view.confirmed_request) == (1, 0.0)
    assert p.operator_view.newest_round == R1
    assert UpdateStoreService("r", 1) in p.actions
    assert conditions_of(p)["RendezvousReady"]["status"] == "True"
    assert p.requeue_after is not None


def test_a_standby_store_that_the_operator_does_not_reach_is_not_promoted() -> None:
    p = run(replace(down(STORE_UNRESPONSIVE_SECONDS), standby_link=LinkView(False, NOW - 1, standby_report())))
    assert rendezvous(p)["incarnation"] == 2
    assert [a.name for a in p.actions if isinstance(a, CreateStore)] == ["bert-rdzv-2"]


SUSPECT = ReachedStores(lost_nodes=3, reached_nodes=1)


@pytest.mark.parametrize(
    ("name", "observed", "promoted"),
    [
        ("only the operator has lost it", down(STORE_UNRESPONSIVE_SECONDS), False),
        ("a node has lost it as well", down(STORE_LEFT_SECONDS, by=(worker(1),)), True),
        (
            "the nodes have moved",
            replace(steady(), standby_link=link(report(*TWO, incarnation=1, phase=RoundPhase.RECOVERING))),
            True,
        ),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_an_operator_that_suspects_its_own_network_goes_by_the_nodes(
    name: str, observed: Observed, promoted: bool
) -> None:
    assert rendezvous(run(replace(observed, reach=SUSPECT)))["incarnation"] == int(promoted)


def test_a_store_that_refuses_the_operator_serves_and_keeps_its_nodes() -> None:
    observed = down(STORE_UNRESPONSIVE_SECONDS, by=(worker(1),))
    p = run(replace(observed, link=replace(observed.link, refused="wrong key")))
    assert rendezvous(p)["incarnation"] == 0
    assert conditions_of(p)["RendezvousReady"]["reason"] == "LinkRefused"


def test_a_new_operator_knows_the_newest_round_from_status() -> None:
    raw = status(rendezvous={"incarnation": 0, "standby": 1, "round": str(R1)})
    observed = replace(steady(), job=job(status=raw), link=LinkView(False, NOW - 1))
    p = run(observed)
    assert p.standby_view is not None
    assert p.standby_view.newest_round == R1
    promoted = run(replace(observed, stores=(store(1, node="n9"),)))
    assert promoted.operator_view is not None
    assert (promoted.operator_view.serving, promoted.operator_view.newest_round) == (1, R1)


@pytest.mark.parametrize(("named", "forced"), [(LEASE_LATE_SECONDS, True), (LEASE_LATE_SECONDS - 0.1, False)])
def test_an_older_store_has_its_time_from_when_status_names_the_promoted_one(named: float, forced: bool) -> None:
    current = job(status=status(rendezvous={"incarnation": 1}))
    stores = (store(deleting=NOW - 20), store(1, node="n9", created=NOW - 600))
    observed = replace(
        steady(), job=current, stores=stores, link=link(report(*TWO, incarnation=1)), standby_link=LinkView(),
        store_named_at=NOW - named, leases={"n1": NOW - LEASE_LATE_SECONDS},
    )  # fmt: skip
    assert deleted(run(observed)) == ["bert-rdzv-0"] * forced


@pytest.mark.parametrize(("reason", "number"), [(RefusalReason.QUOTA_EXCEEDED, 1), (RefusalReason.NAME_TAKEN, 2)])
def test_the_number_of_a_standby_store_that_was_never_created_is_its_successors(
    reason: RefusalReason, number: int
) -> None:
    """The older store is then its direct predecessor, whose last report the operator has."""
    observed = replace(down(STORE_UNRESPONSIVE_SECONDS), stores=(store(),), standby_link=LinkView())
    p = run(replace(observed, refusals={"bert-rdzv-1": Refusal(reason, "no", NOW + 40, NOW)}))
    assert [a.name for a in p.actions if isinstance(a, CreateStore)] == [f"bert-rdzv-{number}"]


# ---- retired, and the confirmation of the store beside it

ASKING = gathering(worker(0), confirmation_request=12.5)


def confirmation(p: Plan) -> tuple[float, bool]:
    assert p.operator_view is not None
    return p.operator_view.confirmed_request, p.operator_view.confirmed_half


def test_with_half_of_the_nodes_the_store_is_confirmed_for_half_and_keeps_its_standby_store() -> None:
    p = run(steady(last_report=replace(ASKING, half_missing_round=R1)))
    assert confirmation(p) == (12.5, True)
    assert "rendezvous" not in (p.status or {}) or rendezvous(p)["standby"] == 1
    assert p.standby_view is not None
    assert not p.standby_view.retired


def test_with_fewer_nodes_the_standby_store_is_retired_first() -> None:
    p = run(steady(last_report=ASKING))
    assert confirmation(p) == (0.0, False)
    assert rendezvous(p) == {"incarnation": 0, "newest": 1}
    assert deleted(p) == ["bert-rdzv-1"]
    assert p.standby_view is not None
    assert p.standby_view.retired
    assert p.operator_view is not None
    assert p.operator_view.standby_store is None


@pytest.mark.parametrize("pods", [("bert-1-0",), None])
def test_while_a_missing_pod_may_write_the_standby_store_stays_for_it(pods: tuple[str, ...] | None) -> None:
    p = run(steady(last_report=replace(ASKING, pods_that_may_write=pods)))
    assert confirmation(p) == (0.0, False)
    assert not deleted(p)
    assert p.operator_view is not None
    assert p.operator_view.standby_store == StandbyStore(1, "10.0.0.1", 29400)
    assert p.standby_view is not None
    assert not p.standby_view.retired
    ended_pod = worker(1, **ended(137))
    later = run(steady(workers=(worker(0), ended_pod), last_report=replace(ASKING, pods_that_may_write=pods)))
    assert deleted(later) == ["bert-rdzv-1"]


def test_a_confirmation_for_half_waits_for_a_pod_that_hangs() -> None:
    asking = replace(ASKING, half_missing_round=R1, pods_that_may_write=("bert-1-0",))
    assert confirmation(run(steady(last_report=asking)))[0] == 0.0


SWITCHED = NOW - AGENTS_SWITCH_SECONDS
RETIRED = status(rendezvous={"incarnation": 0, "newest": 1})


@pytest.mark.parametrize(
    ("name", "raw", "pod", "answer", "seen_at", "given"),
    [
        ("it has confirmed", RETIRED, store(1), standby_report(retired=True), 0.0, True),
        ("it has not answered", RETIRED, store(1), standby_report(), NOW, False),
        ("status still names it", status(), store(1), standby_report(retired=True), 0.0, False),
        (
            "it ended without an answer, just now",
            RETIRED,
            None,
            standby_report(),
            NOW - AGENTS_SWITCH_SECONDS + 0.1,
            False,
        ),
        ("its nodes had time to come", RETIRED, None, standby_report(), NOW - AGENTS_SWITCH_SECONDS, True),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_the_store_is_confirmed_once_no_standby_store_can_act(
    name: str, raw: dict[str, Any], pod: Any, answer: Report, seen_at: float, given: bool
) -> None:
    observed = steady(last_report=ASKING)
    stores = (store(),) if pod is None else (store(), pod)
    p = run(replace(observed, job=job(status=raw), stores=stores, standby_link=link(answer), standby_store_at=seen_at))
    assert confirmation(p) == (12.5 if given else 0.0, False)
    assert given or p.requeue_after is not None


def test_a_number_is_never_used_twice() -> None:
    raw = status(rendezvous={"incarnation": 0, "newest": 4})
    observed = replace(without_standby(steady()), job=job(status=raw))
    assert rendezvous(run(observed)) == {"incarnation": 0, "standby": 5}

"""Durations by what the operator itself saw: pods, Leases of kubelets, and a wall clock that is set.

In each test the clocks of other hosts are far from the operator's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticjob._runtime.contract.names import Role
from elasticjob_operator.kube import JOBS, LEASES, PODS, Refused, Unclear
from elasticjob_operator.model.cluster.pods import parse_pod
from elasticjob_operator.model.cluster.raw import timestamp
from elasticjob_operator.model.observed import LinkView, Observed
from elasticjob_operator.observation.job_memory import JobMemory
from elasticjob_operator.observation.observe import STARTING_SECONDS, SUSPECT_SECONDS, observe
from elasticjob_operator.plan.context import LEASE_LATE_SECONDS, LONGEST_POLL_SECONDS, ReconcileContext
from elasticjob_operator.plan.life_cycle.job_end import declared_outcome
from elasticjob_operator.plan.pods.start_attempts import FIRST_START_RETRY, unchanged_starts
from elasticjob_operator.steady_clock import MAX_SLEW, SteadyClock
from elasticjob_operator.watch.lost_nodes import FIRST_RETURN_CHECK, LONGEST_RETURN_CHECK
from elasticjob_operator.watch.node_leases import NodeLeases
from elasticjob_operator.watch.pod_sightings import PodSightings
from support.operator.build import (
    NOW,
    UID,
    condition,
    gathering,
    job,
    link,
    raw_job,
    raw_pod,
    report,
    run,
    standby_report,
    status,
    steady,
    store,
    worker,
)
from support.operator.world import Api

SKEWS = [-3600.0, 0.0, 3600.0]
"""Seconds by which the clocks of all other hosts are ahead of the operator's."""


class Cluster:
    """An API server with the job `bert`, two workers and a store, whose clock differs from the operator's."""

    def __init__(self, skew: float, status_: dict[str, Any] | None = None) -> None:
        self.skew, self.now = skew, NOW
        self.api = Api(NOW + skew)
        self.api.put(JOBS, raw_job(status={"rendezvousRound": 1, **(status_ or status())}))
        for pod in (raw_pod(0, node="n1"), raw_pod(1, node="n2"), raw_pod(0, role=Role.STORE, node="n1")):
            owner = {"kind": "ElasticJob", "uid": UID, "controller": True}
            self.api.put(PODS, {**pod, "metadata": pod["metadata"] | {"ownerReferences": [owner]}})
        self.memory = JobMemory(UID)
        self.leases = NodeLeases(lambda: self.now)
        self.link = LinkView(connected=False, since=NOW)
        self.standby_link = LinkView(connected=False, since=NOW)
        self.renew("n1", "n2")

    def renew(self, *nodes: str) -> None:
        """The kubelets of these nodes renew their Leases."""
        for node in nodes:
            renewed = timestamp(self.now + self.skew, precise=True)
            self.api.put(LEASES, {"metadata": {"name": node}, "spec": {"renewTime": renewed}})

    async def observe(self, after: float = 0.0) -> Observed:
        """Observe the job `after` seconds later."""
        self.now += after
        self.api.now = self.now + self.skew
        raw, links = self.api.objects[JOBS, "bert"], (self.link, self.standby_link)
        return await observe(self.api, raw, self.memory, self.leases, *links, self.now)

    def lease_reads(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Return the list to which each read of a Lease adds its node."""
        reads: list[str] = []
        get = self.api.get

        async def counted(resource: Any, namespace: str | None, name: str) -> Any:
            if resource is LEASES:
                reads.append(name)
            return await get(resource, namespace, name)

        monkeypatch.setattr(self.api, "get", counted)
        return reads


# ---- Leases of kubelets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("skew", SKEWS)
async def test_a_lease_is_late_by_the_time_for_which_the_operator_has_read_it_unchanged(skew: float) -> None:
    cluster = Cluster(skew)
    ages = []
    for after in (3.0, 5.0, 5.0, LEASE_LATE_SECONDS):
        ctx = ReconcileContext(await cluster.observe(after), job().spec, cluster.now)  # type: ignore[arg-type]
        ages.append((ctx.lease_age("n1"), ctx.lease_late("n1")))
    assert ages == [(0.0, False), (5.0, False), (10.0, False), (25.0, True)]
    cluster.renew("n1")
    ctx = ReconcileContext(await cluster.observe(2.0), job().spec, cluster.now)  # type: ignore[arg-type]
    assert (ctx.lease_age("n1"), ctx.lease_late("n1")) == (0.0, False)


async def test_no_lease_is_read_while_the_pods_of_a_new_job_start(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(0.0, status(rendezvousRound=0))
    reads = cluster.lease_reads(monkeypatch)
    await cluster.observe()
    await cluster.observe(STARTING_SECONDS - 1.0)
    assert reads == []
    await cluster.observe(1.0)
    assert reads == ["n1"]


async def test_a_new_operator_reads_no_lease_for_a_store_that_it_is_about_to_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(0.0)
    reads = cluster.lease_reads(monkeypatch)
    await cluster.observe(SUSPECT_SECONDS - 0.1)
    assert reads == []
    await cluster.observe(0.1)
    assert reads == ["n1"]


async def test_a_kubelet_is_not_silent_for_longer_than_its_lease_was_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(0.0, AVOIDED)
    cluster.link = link(report(worker(0), worker(1)))
    cluster.renew("n9")
    for after in (0.0, 5.0, 5.0):
        observed = await cluster.observe(after)
    assert cluster.now - observed.leases["n9"] == 10.0
    reads = cluster.lease_reads(monkeypatch)
    observed = await cluster.observe(4.0)
    assert (reads, cluster.now - observed.leases["n9"]) == ([], 10.0)


async def test_the_lease_of_a_silent_standby_stores_node_is_read_from_the_beginning_of_its_silence() -> None:
    cluster = Cluster(0.0)
    cluster.link = link(report(worker(0), worker(1)))
    owner = {"kind": "ElasticJob", "uid": UID, "controller": True}
    pod = raw_pod(0, 1, role=Role.STORE, node="n9")
    cluster.api.put(PODS, {**pod, "metadata": pod["metadata"] | {"ownerReferences": [owner]}})
    cluster.renew("n9")
    assert "n9" not in (await cluster.observe(1.0)).leases
    observed = [await cluster.observe(after) for after in (1.0, 5.0)]
    assert [cluster.now - o.leases["n9"] for o in observed] == [5.0, 5.0]
    cluster.standby_link = link(standby_report())
    assert "n9" not in (await cluster.observe(1.0)).leases


async def test_a_store_is_named_from_when_this_operator_read_it_in_status() -> None:
    cluster = Cluster(0.0)
    begun = cluster.now + 1.0
    assert (await cluster.observe(1.0)).store_named_at == begun
    assert (await cluster.observe(50.0)).store_named_at == begun
    cluster.api.objects[JOBS, "bert"]["status"] = status(rendezvous={"incarnation": 1})
    assert (await cluster.observe(1.0)).store_named_at == cluster.now


async def test_a_node_without_a_lease_is_down_at_once() -> None:
    cluster = Cluster(0.0)
    cluster.api.remove(LEASES, "n1")
    ctx = ReconcileContext(await cluster.observe(3.0), job().spec, cluster.now)  # type: ignore[arg-type]
    assert ctx.kubelet_down("n1")


async def test_the_time_for_which_the_api_server_does_not_answer_is_no_silence_of_kubelets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(0.0)
    await cluster.observe(3.0)

    async def no_answer(*_: Any) -> Any:
        raise Unclear("no answer")

    with monkeypatch.context() as outage:
        outage.setattr(cluster.api, "get", no_answer)
        with pytest.raises(Unclear):
            await cluster.leases.read(cluster.api, {"n1": 0.0})
    observed = await cluster.observe(600.0)
    assert observed.leases["n1"] == cluster.now


async def test_jobs_share_the_leases_that_were_just_read(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(0.0)
    reads = cluster.lease_reads(monkeypatch)
    await cluster.observe(3.0)
    cluster.memory = JobMemory(UID)
    await cluster.observe(0.5)
    assert reads == ["n1"]


# ---- nodes that were lost --------------------------------------------------------------------------------------

AVOIDED = status(avoidedNodes=[{"name": "n9", "since": timestamp(NOW), "until": timestamp(NOW + 86400), "why": "lost"}])


@pytest.mark.parametrize("skew", SKEWS)
async def test_a_lost_node_is_back_when_the_operator_sees_its_kubelet_renew_the_lease(skew: float) -> None:
    cluster = Cluster(skew, AVOIDED)
    cluster.link = link(report(worker(0), worker(1)))
    cluster.now -= 9.0
    cluster.renew("n9")
    cluster.now += 9.0
    assert (await cluster.observe(1.0)).returned_nodes == frozenset()
    assert (await cluster.observe(FIRST_RETURN_CHECK)).returned_nodes == frozenset()
    cluster.renew("n9")
    assert (await cluster.observe(FIRST_RETURN_CHECK)).returned_nodes == {"n9"}
    assert "avoidedNodes" not in (run(await cluster.observe(FIRST_RETURN_CHECK), cluster.now).status or {})
    lost_again = AVOIDED["avoidedNodes"][0] | {"since": timestamp(NOW + 20)}
    cluster.api.objects[JOBS, "bert"]["status"] = status(avoidedNodes=[lost_again])
    assert (await cluster.observe(1.0)).returned_nodes == frozenset(), "the renewal was before the second loss"


async def test_a_node_whose_lease_may_not_be_read_is_not_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(0.0, AVOIDED)

    async def refuse(*_: Any) -> Any:
        raise Refused("forbidden", 403)

    await cluster.observe()
    monkeypatch.setattr(cluster.api, "get", refuse)
    lost = cluster.memory.lost_nodes
    lost.record(await NodeLeases(lambda: cluster.now).read(cluster.api, {"n9": 0.0}), NOW)
    assert lost.returned() == frozenset()


async def test_a_lost_node_is_read_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(0.0, AVOIDED)
    cluster.link = link(report(worker(0), worker(1)))
    cluster.renew("n9")
    reads, delays = cluster.lease_reads(monkeypatch), []
    observed = await cluster.observe()
    while cluster.now < NOW + 86400 - LONGEST_RETURN_CHECK:
        delay = run(observed, cluster.now).requeue_after
        assert delay is not None
        delays.append(delay)
        observed = await cluster.observe(delay)
    assert delays[0] == pytest.approx(FIRST_RETURN_CHECK)
    assert delays[-1] <= LONGEST_RETURN_CHECK
    assert len(reads) == len(delays) + 1 < 400, "three requests each: 0.014 a second"


async def test_reconciles_for_other_reasons_do_not_read_the_leases_of_lost_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(0.0, AVOIDED)
    cluster.link = link(report(worker(0), worker(1)))
    await cluster.observe()
    await cluster.observe(3600.0)
    reads = cluster.lease_reads(monkeypatch)
    for _ in range(20):
        await cluster.observe(1.0)
    assert reads == []


# ---- pods ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skew", SKEWS)
def test_a_deletion_takes_as_long_as_its_grace_from_when_the_operator_saw_it(skew: float) -> None:
    raw = raw_pod(0, deleting=NOW + skew + 30)
    raw["metadata"]["deletionGracePeriodSeconds"] = 30
    sightings = PodSightings()
    pods = [sightings.update([parse_pod(raw)], now)[0] for now in (NOW, NOW + 20)]
    assert [(p.seen, p.deleting) for p in pods] == [(NOW, NOW + 30)] * 2
    assert sightings.update([], NOW + 21) == ()
    assert sightings.update([parse_pod(raw)], NOW + 22)[0].seen == NOW + 22


def test_a_pod_is_seen_running_from_its_first_sighting_in_that_phase() -> None:
    sightings = PodSightings()
    phases = [("Pending", NOW), ("Running", NOW + 600), ("Running", NOW + 601)]
    pods = [sightings.update([parse_pod(raw_pod(0, phase=phase))], now)[0] for phase, now in phases]
    assert [(p.seen, p.seen_running) for p in pods] == [(NOW, 0.0), (NOW, NOW + 600), (NOW, NOW + 600)]


@pytest.mark.parametrize(("ran", "replaced"), [(9, False), (10, True)])
def test_a_container_that_ran_for_some_seconds_by_its_kubelets_clock_did_not_fail_to_start(
    ran: int, replaced: bool
) -> None:
    kubelet = NOW + 3600
    state = {"exitCode": 69, "startedAt": timestamp(kubelet - ran), "finishedAt": timestamp(kubelet)}
    raw = raw_pod(0, phase="Failed", container={"state": {"terminated": state}})
    pod = replace(parse_pod(raw), seen=NOW)
    p = run(steady(workers=(pod, worker(1)), last_report=report(worker(1))))
    assert bool(p.actions) is replaced


@pytest.mark.parametrize("skew", SKEWS)
async def test_agents_have_time_to_exit_from_when_this_operator_saw_the_outcome(skew: float) -> None:
    """The operator that wrote the condition ran on another host."""
    met = condition("SuccessCriteriaMet", at=NOW + skew)
    cluster = Cluster(skew, status(conditions=[met]))
    for after in (0.0, 5.0):
        observed = await cluster.observe(after)
        outcome = declared_outcome(ReconcileContext(observed, job().spec, cluster.now))  # type: ignore[arg-type]
        assert outcome is not None
        assert outcome.since == NOW


@pytest.mark.parametrize("skew", SKEWS)
async def test_a_failed_start_is_tried_again_after_its_delay_from_when_this_operator_saw_it(skew: float) -> None:
    failed = {"failedStarts": 2, "startFailures": 2, "lastStartFailureTime": timestamp(NOW + skew)}
    cluster = Cluster(skew, status(**failed))
    for after in (0.0, 5.0):
        observed = await cluster.observe(after)
        starts = unchanged_starts(ReconcileContext(observed, job().spec, cluster.now))  # type: ignore[arg-type]
        assert starts.retry_at == NOW + 2 * FIRST_START_RETRY


def test_a_pod_that_stays_terminating_is_polled_less_and_less_often() -> None:
    pods = (worker(0, 0, deleting=NOW - 3600), worker(0, 1), worker(1))
    p = run(steady(workers=pods, incarnations="1,0"))
    assert (p.requeue_after or 0.0) >= LONGEST_POLL_SECONDS - 1


def test_a_pod_whose_agent_never_connects_is_polled_less_and_less_often() -> None:
    observed = steady(workers=(worker(0), worker(1, created=NOW - 3600)), last_report=gathering(worker(0)))
    fresh = replace(observed, link=link(gathering(worker(0)), since=NOW - 5))
    old = replace(observed, link=link(gathering(worker(0)), since=NOW - 3600))
    assert (run(fresh).requeue_after or 0.0) == pytest.approx(3.0)
    assert (run(old).requeue_after or 0.0) >= LONGEST_POLL_SECONDS - 1


def test_a_store_that_the_operator_does_not_reach_is_polled_less_and_less_often() -> None:
    observed = replace(steady(), link=LinkView(False, NOW - 3600), leases={"n1": NOW - 3}, stores=(store(),))
    assert (run(observed).requeue_after or 0.0) >= LONGEST_POLL_SECONDS - 1


# ---- the operator's own clock ----------------------------------------------------------------------------------


class Host:
    """A host whose wall clock may be set."""

    def __init__(self) -> None:
        self.wall, self.monotonic = NOW, 50.0
        self.clock = SteadyClock(lambda: self.wall, lambda: self.monotonic)

    def sleep(self, seconds: float) -> None:
        self.wall += seconds
        self.monotonic += seconds


@pytest.mark.parametrize("step", [-7200.0, -1.0, 0.0, 1.0, 7200.0])
def test_a_wall_clock_that_is_set_changes_no_duration(step: float) -> None:
    host = Host()
    host.sleep(5.0)
    before = host.clock()
    assert before - NOW == pytest.approx(5.0, abs=0.01)
    host.wall += step
    host.sleep(10.0)
    assert host.clock() - before == pytest.approx(10.0, rel=MAX_SLEW)


@pytest.mark.parametrize("step", [-30.0, 30.0])
def test_the_operators_clock_approaches_a_wall_clock_that_was_set(step: float) -> None:
    host = Host()
    host.wall += step
    for _ in range(700):
        host.sleep(1.0)
        host.clock()
    assert host.clock() - host.wall == pytest.approx(0.0, abs=0.01)

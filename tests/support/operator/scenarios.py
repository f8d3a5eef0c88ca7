"""Scenarios of a job's life, each played with one fault, and what must be true in the end.

The first play of a scenario meets no fault. All others must come to the same end, whatever they met on the way.
"""

from __future__ import annotations

import asyncio
import copy
import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from elasticjob._runtime.contract.messages import EndReason, Outcome
from elasticjob._runtime.contract.names import Label, Role
from elasticjob_operator.kube import EVENTS, JOBS, PODS, SERVICES, Resource
from elasticjob_operator.kube.api import KUEUE_WORKLOADS
from elasticjob_operator.model.cluster.nodes import NodeWarning
from elasticjob_operator.model.cluster.workload import WorkloadCondition, parse_workload
from elasticjob_operator.model.job.status_lists import read_ranges
from elasticjob_operator.model.observed import ELASTIC_ANNOTATION, QUEUE_LABEL
from support.operator.build import NOW, elastic, raw_job
from support.operator.process import OUTAGES, RESOURCES, ApiServer, Fault, OperatorProcess, run_virtual
from support.operator.queue import Queue
from support.operator.world import Api, Node, World, is_deleting, number, phase, role

Raw = dict[str, Any]

TICK = 1.0
"""Seconds between two steps of everything but the operator."""
LINK_SECONDS = 0.2
"""Seconds until an operator has received the report of a store whose address it has just learned."""
STOP_SECONDS = 3.0
"""Seconds from the deletion of a pod to its end."""
OUTAGE_TICK = 10.0
"""The same while the API server is unreachable."""
RESTART_SECONDS = 6.0
"""Seconds from the end of a killed operator to the start of the next: the Lease has to expire."""
QUIET_SECONDS = 25.0
"""Seconds without a write after which a cluster without faults counts as converged. Retries wait 20 s at most."""
PATIENCE = 300.0
"""Seconds, from the end of a fault, in which each step must be done."""
MORE_WRITES = 12
"""By how many writes a play with a fault may exceed the one without."""


class Simulation:
    """The job `bert` in a cluster, with everything that runs its pods, and the operator's process."""

    def __init__(self, api: Api, world: World, server: ApiServer, lag: float = 0.0, queue: Queue | None = None) -> None:
        self.api, self.world, self.server, self.queue = api, world, server, queue
        self._lag = lag
        self._operator: OperatorProcess | None = None
        self._starts_at = 0.0
        self._final = ""

    @property
    def job(self) -> Raw | None:
        return self.api.objects.get((JOBS, "bert"))

    @property
    def status(self) -> Raw:
        found: Raw = (self.job or {}).get("status") or {}
        return found

    def pod(self, of: Role, index: int = 0) -> Raw:
        """Return the pod of this role and index that is live; the oldest, if it is a store."""
        return next(p for p in self.api.pods(of) if _is_live(p) and number(p, Label.INDEX) == index)

    # -- time

    async def until(self, reached: Callable[[Simulation], bool]) -> None:
        """Go on until this is reached."""
        started = self.api.now
        while not reached(self):
            waited = self.api.now - max(started, self.server.outage_until)
            assert waited < PATIENCE, "the job does not get there"
            await self.tick()

    async def settle(self) -> None:
        """Go on until the operator writes no more."""
        count, since, started = len(self.server.writes), self.api.now, self.api.now
        while self.api.now < max(since, self.server.outage_until) + QUIET_SECONDS:
            waited = self.api.now - max(started, self.server.outage_until)
            assert waited < PATIENCE, f"the operator still writes: {self.server.writes[-9:]}"
            await self.tick()
            if len(self.server.writes) != count:
                count, since = len(self.server.writes), self.api.now

    async def tick(self) -> None:
        """Let everything take one step, and check what must always be true."""
        reachable = self.server.reachable
        if reachable:
            self.world.renew()
            self.world.collect_garbage()
            self._drain()
            if self.queue is not None:
                self.queue.admit()
        self.world.run_rounds(self._minimum())
        if reachable:
            for store in self.world.serving():
                self.world.exit_agents(store, self.api.pods(Role.WORKER))
            self.world.run_pods(STOP_SECONDS)
        await self._run_operator(TICK if reachable else OUTAGE_TICK, reachable)
        self._check()

    def _drain(self) -> None:
        """Let a drain go on, and check that as many nodes as the job needs can still train.

        No pod waits for a budget that the API server refuses to write.
        """
        before = [pod for pod in self.api.pods(Role.WORKER) if _is_live(pod)]
        self.world.drain()
        left = {pod["metadata"]["name"] for pod in before if _is_live(pod)}
        if len(left) == len(before) or self.server.fault in OUTAGES:
            return
        for store in self.world.serving():
            ready = left & set(store.connected)
            assert len(ready) >= self._minimum(), f"a drain leaves only {ready}"

    async def _run_operator(self, seconds: float, reachable: bool) -> None:
        if self._operator is not None:
            self._operator.report()
            if reachable:
                self._operator.deliver()
        elif self.api.now >= self._starts_at:
            self._operator = OperatorProcess(self.server, self.world, self._lag)
        await asyncio.sleep(LINK_SECONDS)
        if self._operator is not None:
            self._operator.report()
        await asyncio.sleep(seconds - LINK_SECONDS)
        if self._operator is not None:
            self._operator.check()
            if self._operator.connection.killed:
                await self.stop()
                self._starts_at = self.api.now + RESTART_SECONDS

    async def stop(self) -> None:
        """End the operator's process."""
        if self._operator is not None:
            await self._operator.stop()
            self._operator = None

    def _minimum(self) -> int:
        spec = self.job["spec"] if self.job else {}
        found: int = spec.get("elasticPolicy", {}).get("minReplicas", spec.get("replicas", 1))
        return found

    # -- what must be true

    def _check(self) -> None:
        created = self.server.created
        assert len(created) == len({*created}), f"the name of a pod was used twice: {created}"
        # A pod that leaves its node is deleted after its successor was created.
        staying = [p for p in self.api.pods(Role.WORKER) if _is_live(p) and not self.world.must_leave(p)]
        indices = [(p["metadata"]["labels"][Label.JOB_UID], p["metadata"]["labels"][Label.INDEX]) for p in staying]
        assert len(indices) == len({*indices}), f"two live pods of one index: {indices}"
        if self.queue is not None and self.job is not None:
            using = [p for p in self.api.pods(Role.WORKER) if phase(p) in ("Pending", "Running")]
            assert len(using) <= self.queue.reserved(), "the job has pods for which it has no quota"
        restarts, stores = self.status.get("restarts", 0), self.world.stores.values()
        assert restarts <= len(self.world.outages), "a failure was charged twice"
        assert self.job is None or restarts >= sum(s.acknowledged for s in stores), (
            "a charge was sent to the store before it was persisted"
        )
        assert self._final in ("", self.status.get("phase", self._final)), "a job that had ended goes on"
        if self.status.get("phase") in ("Succeeded", "Failed"):
            self._final = self.status["phase"]

    def end(self) -> Raw:
        """Return what all plays of a scenario must have in common in the end: the status and the objects, without
        times, messages and numbers of incarnations."""
        status = self.status
        rendezvous = sorted({*status.get("rendezvous", {})} & {"endpoint", "incarnation", "standby"})
        objects = (self._described(kind, raw) for (kind, _), raw in self.api.objects.items() if _owned(kind, raw))
        unacknowledged = [len(store.ended) for store in self.world.serving()]
        return {
            "status": _comparable({**status, "rendezvous": rendezvous}),
            "objects": sorted(objects),
            "rounds whose end is not persisted": unacknowledged,
        }

    def _described(self, kind: Resource, raw: Raw) -> str:
        rendezvous = self.status.get("rendezvous", {})
        if kind is PODS:
            incarnation, index = number(raw, Label.INCARNATION), number(raw, Label.INDEX)
            known = [int(n) for n in self.status.get("incarnations", "").split(",") if n]
            if role(raw) is Role.STORE:
                place, named = "0", [n for n in ("incarnation", "standby") if rendezvous.get(n) == incarnation]
            else:
                place = self._place(index)
                named = ["current"] if known[index : index + 1] == [incarnation] else []
            deleting = ["deleting"] if is_deleting(raw) else []
            return " ".join([role(raw).value, place, phase(raw), *named, *deleting])
        selected = raw.get("spec", {}).get("selector", {}).get(Label.INCARNATION) if kind is SERVICES else None
        if selected is not None:
            return f"{raw['metadata']['name']}: selects the store: {selected == str(rendezvous.get('incarnation'))}"
        if kind is KUEUE_WORKLOADS:
            workload = parse_workload(raw)
            true = sorted(condition for condition in workload.conditions if workload.is_true(condition))
            return f"Workload for {workload.count}, admitted for {workload.admitted_count}: {true}"
        spec = json.dumps(raw.get("spec"), sort_keys=True) if kind is not SERVICES else ""
        return f"{kind.plural} {raw['metadata']['name']} {spec}".strip()

    def _place(self, index: int) -> str:
        """Return the place of an index among those that the job has: which ones these are depends on what happened."""
        vacant = read_ranges(self.status, "vacantIndices")
        return "vacant" if index in vacant else str(index - sum(other < index for other in vacant))


def _is_live(pod: Raw) -> bool:
    return phase(pod) in ("Pending", "Running") and not is_deleting(pod)


def _owned(kind: Resource, raw: Raw) -> bool:
    return kind is not EVENTS and bool(raw["metadata"].get("ownerReferences"))


_VOLATILE = {
    "time", "since", "until", "message", "incarnations", "incarnationRanges", "rendezvousRound", "chargedRound",
    "lastChargedRound", "goodput", "vacantIndices",
}  # fmt: skip
_POD = re.compile(r"\bbert-(\d+|rdzv)-\d+\b")
_ROUND = re.compile(r"^\d+\.\d+\.\d+$")


def _comparable(value: Any) -> Any:
    if isinstance(value, dict) and "executionAttempt" in value:
        return "round"
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if k not in _VOLATILE and not k.endswith("Time")}
        return {k: _comparable(v) for k, v in kept.items()}
    if isinstance(value, list):
        return [_comparable(item) for item in value]
    return _ROUND.sub("round", _POD.sub(r"bert-\1", value)) if isinstance(value, str) else value


# ---- scenarios -------------------------------------------------------------------------------------------------

Act = Callable[[Simulation], None]
Reached = Callable[[Simulation], bool]


@dataclass(frozen=True, eq=False)
class Scenario:
    """What happens to a job, step by step."""

    name: str
    spec: Raw
    steps: tuple[tuple[Act, Reached], ...]
    """What happens, and what is true once the operator has done its part: then the next step happens."""
    new: bool = False
    """Whether the job was applied just before the first step; else it trains."""
    quota: int | None = None
    """Of how many worker pods the job's queue has quota; None: the job has no queue."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    """Those of the job."""
    watches_nodes: bool = False
    """Whether the operator may watch Nodes."""

    def __str__(self) -> str:
        return self.name


def trains(nodes: int, **fields: Any) -> Reached:
    """The job trains on this number of nodes and has a standby store; its status has these fields."""
    fields = {"phase": "Running", "active": nodes} | fields

    def reached(sim: Simulation) -> bool:
        status, stores = sim.status, [p for p in sim.api.pods(Role.STORE) if _is_live(p)]
        steady = len(stores) == 2 and "standby" in status.get("rendezvous", {})
        return steady and all(status.get(name) == value for name, value in fields.items())

    return reached


def is_drained(sim: Simulation) -> bool:
    """The job trains with its own number of pods, and none of them is on node n1."""
    nodes = [pod["spec"].get("nodeName") for pod in sim.api.pods(Role.WORKER)]
    return trains(3)(sim) and nodes == ["n2"] * 3 and "cordonSpares" not in sim.status


def has_left(sim: Simulation) -> bool:
    """The job trains, and neither a worker nor a store is on node n1."""
    pods = sim.api.pods(Role.WORKER) + sim.api.pods(Role.STORE)
    return trains(3)(sim) and {pod["spec"].get("nodeName") for pod in pods} == {"n2"}


def is_resized(nodes: int) -> Reached:
    """The job trains on this number of nodes, and has one Workload, for so many."""

    def reached(sim: Simulation) -> bool:
        counts = [] if sim.queue is None else [parse_workload(raw).count for raw in sim.queue.workloads()]
        return trains(nodes)(sim) and counts == [nodes]

    return reached


def store_is_replaced(sim: Simulation) -> bool:
    return trains(3)(sim) and sim.status["rendezvous"]["incarnation"] > 0


def pod_is_replaced(sim: Simulation) -> bool:
    return trains(3)(sim) and sim.status["incarnations"] != "0,0,0"


def is_suspended(sim: Simulation) -> bool:
    return sim.status.get("phase") == "Suspended" and not sim.api.pods(Role.WORKER) + sim.api.pods(Role.STORE)


def has_ended(sim: Simulation) -> bool:
    return sim.status.get("phase") in ("Succeeded", "Failed") and not sim.api.pods(Role.STORE)


def has_finished(sim: Simulation) -> bool:
    """The job has ended, and its Workload says so."""
    workloads = [] if sim.queue is None else map(parse_workload, sim.queue.workloads())
    return has_ended(sim) and all(workload.is_true(WorkloadCondition.FINISHED) for workload in workloads)


def is_deleted(sim: Simulation) -> bool:
    return sim.job is None and not [raw for (kind, _), raw in sim.api.objects.items() if _owned(kind, raw)]


def edit(**spec: Any) -> Act:
    return lambda sim: sim.world.edit(**spec)


def warn(warning: NodeWarning | None, *, drain: bool = False) -> Act:
    """Node n1 gets this warning, or has none any more. `drain`: a user evicts its pods."""

    def act(sim: Simulation) -> None:
        sim.world.warnings = {} if warning is None else {"n1": warning}
        sim.world.drained = "n1" if drain else ""

    return act


def kueue_evicts(quota: int) -> Act:
    """Kueue evicts the job; from then on it has this quota."""

    def act(sim: Simulation) -> None:
        assert sim.queue is not None
        sim.queue.evict()
        sim.queue.quota = quota

    return act


def nothing(sim: Simulation) -> None:
    pass


def pod_fails(sim: Simulation) -> None:
    sim.world.kill_agent(sim.pod(Role.WORKER, 1))


def kubelet_stops_pod(sim: Simulation) -> None:
    sim.world.stop_agent(sim.pod(Role.WORKER, 1))


def worker_fails(sim: Simulation) -> None:
    (store,) = sim.world.serving()
    sim.world.outages.add(str(store.round))
    store.end(EndReason.WORKER_FAILED, sim.api.now, failed=store.members[0])


def pod_is_drained(sim: Simulation) -> None:
    sim.world.delete(sim.pod(Role.WORKER, 1), force=False)


def store_fails(sim: Simulation) -> None:
    sim.world.terminate(sim.pod(Role.STORE), 1)


def both_stores_fail(sim: Simulation) -> None:
    for pod in sim.api.pods(Role.STORE):
        sim.world.terminate(pod, 1)


def workers_succeed(sim: Simulation) -> None:
    (store,) = sim.world.serving()
    store.outcome = Outcome.SUCCEEDED


def user_deletes_the_job(sim: Simulation) -> None:
    sim.api.remove(JOBS, "bert")


def user_applies_it_again(sim: Simulation) -> None:
    job = raw_job(replicas=3)
    sim.api.remove(JOBS, "bert")
    sim.api.put(JOBS, {**job, "metadata": {**job["metadata"], "uid": "another-uid"}})


FIXED: Raw = {"replicas": 3}
ELASTIC = elastic(2, 5, 3) | {"networkIsolation": True}
SMALLER = edit(elasticPolicy={"minReplicas": 1, "maxReplicas": 5})
SCENARIOS = (
    Scenario("created", FIXED, ((nothing, trains(3)),), new=True),
    Scenario("created with gang and budget", ELASTIC | {"gang": {"provider": "coscheduling"}},
             ((nothing, trains(3)),), new=True),
    Scenario("a pod fails", FIXED, ((pod_fails, trains(3, restarts=1)),)),
    Scenario("a kubelet stops a pod for its own fault", FIXED, ((kubelet_stops_pod, trains(3, restarts=1)),)),
    Scenario("a worker fails", FIXED, ((worker_fails, trains(3, restarts=1)),)),
    Scenario("a pod is drained", FIXED, ((pod_is_drained, pod_is_replaced),)),
    Scenario("a pod is drained, one pod per index", FIXED | {"podReplacementPolicy": "Failed"},
             ((pod_is_drained, pod_is_replaced),)),
    Scenario("scaled up, down and up", ELASTIC,
             ((edit(replicas=4), trains(4)), (edit(replicas=2), trains(2)), (edit(replicas=3), trains(3)))),
    Scenario("smaller minimum, coscheduling", ELASTIC | {"gang": {"provider": "coscheduling"}},
             ((SMALLER, trains(3, observedGeneration=2)),)),
    Scenario("smaller minimum, Kubernetes", ELASTIC | {"gang": {"provider": "kubernetes"}},
             ((SMALLER, trains(3, observedGeneration=2)),)),
    Scenario("suspended and resumed", ELASTIC | {"gang": {"provider": "volcano"}},
             ((edit(suspend=True), is_suspended),
              (edit(suspend=False, rendezvous={"port": 1234}), trains(3, executionAttempts=2)))),
    Scenario("succeeds", FIXED, ((workers_succeed, has_ended),)),
    Scenario("succeeds, all pods and the job are deleted",
             ELASTIC | {"cleanPodPolicy": "All", "ttlSecondsAfterFinished": 10}, ((workers_succeed, is_deleted),)),
    Scenario("fails", ELASTIC | {"cleanPodPolicy": "All", "failurePolicy": {"maxRestarts": 0}},
             ((pod_fails, has_ended),)),
    Scenario("the store fails", FIXED, ((store_fails, store_is_replaced),)),
    Scenario("both stores fail", FIXED, ((both_stores_fail, store_is_replaced),)),
    Scenario("deleted while it is scaled", ELASTIC, ((edit(replicas=5), lambda sim: len(sim.server.created) >= 2),
                                                     (user_deletes_the_job, is_deleted))),
    Scenario("applied again", FIXED, ((user_applies_it_again, trains(3)),)),
    Scenario("admitted by a queue in part, evicted, admitted", ELASTIC,
             ((nothing, trains(2, phase="Degraded")), (kueue_evicts(quota=3), trains(3, executionAttempts=2))),
             new=True, quota=2),
    Scenario("resized by a queue, succeeds", elastic(2, 5, 3),
             ((edit(replicas=4), is_resized(4)), (edit(replicas=2), is_resized(2)), (workers_succeed, has_finished)),
             quota=5, annotations={ELASTIC_ANNOTATION: "true"}),
    Scenario("a node of a job at its minimum is drained", FIXED,
             ((warn(NodeWarning(cordoned=True), drain=True), is_drained), (warn(None), is_drained)),
             watches_nodes=True),
    Scenario("the end of a node is announced", ELASTIC,
             ((warn(NodeWarning("taint spot", ends=(("taint spot", 2e9),))), has_left), (warn(None), has_left)),
             watches_nodes=True),
)  # fmt: skip

DRAIN_WITHOUT_ORDER = Scenario(
    "an autoscaler asks for a node of a job at its minimum", FIXED,
    ((warn(NodeWarning(drain="taint karpenter.sh/disrupted")), is_drained), (warn(None), is_drained)),
    watches_nodes=True,
)  # fmt: skip
"""In which order its pods leave depends on when others are ready, so no play with a fault has the same end."""


# ---- plays -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Play:
    """How a scenario went without a fault."""

    end: Raw
    writes: tuple[str, ...]
    """All writes that the operator sent."""
    applied: int
    """How many of them changed something."""
    created: int
    """Pods that were created."""
    deleted: frozenset[str]
    """Role and index of each pod that the operator deleted."""


@cache
def play(scenario: Scenario) -> Play:
    """Play a scenario without a fault."""
    sim = _cluster_of(scenario)
    run_virtual(sim.api, _play(sim, scenario))
    server = sim.server
    return Play(sim.end(), (*server.writes,), len(server.applied), len(server.created), _deleted_pods(server.applied))


def play_with_fault(scenario: Scenario, fault: Fault | None, at: int = 0, lag: float = 0.0) -> Simulation:
    """Play a scenario whose write of number `at` meets a fault, and with watches that are `lag` seconds late."""
    usual = play(scenario)
    sim = _cluster_of(scenario, fault, at, lag)
    try:
        run_virtual(sim.api, _play(sim, scenario, usual))
        _check_writes(sim.server, usual, any_idle_pod=scenario.watches_nodes)
    except Exception as error:
        write = usual.writes[at] if fault else "no write"
        what = f"{scenario}; {write}: {fault.value if fault else 'no fault'}; {error}"
        raise AssertionError("\n".join([what, *_difference(usual.end, sim.end())])) from error
    return sim


def _difference(usual: Raw, end: Raw) -> list[str]:
    before, after = (json.dumps(one, indent=1, sort_keys=True).splitlines() for one in (usual, end))
    return list(difflib.unified_diff(before, after, "usual end", "end", n=1, lineterm=""))


def _check_writes(server: ApiServer, usual: Play, *, any_idle_pod: bool) -> None:
    assert len(server.applied) <= usual.applied + MORE_WRITES, f"more writes than expected: {server.applied}"
    lasting = OUTAGES.get(server.fault, 0.0) if server.fault else 0.0
    most = len(usual.writes) + 2 * MORE_WRITES + lasting * 2 / 3
    assert len(server.writes) <= most, f"{len(server.writes)} writes, {most} expected: {server.writes}"
    deleted = _deleted_pods(server.applied)
    # A job that lets idle pods go chooses other ones if others are ready in time.
    known = len(deleted) <= len(usual.deleted) if any_idle_pod else deleted <= usual.deleted
    assert known, f"a pod was deleted by mistake: {server.applied}"


def _deleted_pods(applied: Iterable[tuple[str, str, str]]) -> frozenset[str]:
    return frozenset(
        _POD.sub(r"bert-\1", name) for verb, kind, name in applied if (verb, kind) == ("DELETE", PODS.plural)
    )


def _cluster_of(scenario: Scenario, fault: Fault | None = None, at: int = 0, lag: float = 0.0) -> Simulation:
    """Return a copy of the cluster in which the scenario begins."""
    same = {id(resource): resource for resource in RESOURCES}
    api, world = copy.deepcopy(_begin(scenario), same)
    return Simulation(api, world, ApiServer(api, fault, at), lag, _queue_of(scenario, api))


def _queue_of(scenario: Scenario, api: Api) -> Queue | None:
    return None if scenario.quota is None else Queue(api, scenario.quota)


def _job_of(scenario: Scenario) -> Raw:
    job = raw_job(**scenario.spec)
    labels = {} if scenario.quota is None else {QUEUE_LABEL: "team"}
    return {**job, "metadata": {**job["metadata"], "labels": labels, "annotations": dict(scenario.annotations)}}


@cache
def _begin(scenario: Scenario) -> tuple[Api, World]:
    api = Api(NOW)
    api.put(JOBS, _job_of(scenario))
    world = World(api, {"n1": Node("n1"), "n2": Node("n2")}, warnings={} if scenario.watches_nodes else None)
    if not scenario.new:
        sim = Simulation(api, world, ApiServer(api), queue=_queue_of(scenario, api))
        run_virtual(api, _start(sim))
    return api, world


async def _start(sim: Simulation) -> None:
    try:
        await sim.until(trains(3))
        await sim.settle()
    finally:
        await sim.stop()


async def _play(sim: Simulation, scenario: Scenario, usual: Play | None = None) -> None:
    try:
        if not scenario.new:
            for _ in range(3):  # the new operator gets to know the job
                await sim.tick()
            assert sim.server.writes == [], "an operator that starts changes a job that trains"
        for act, reached in scenario.steps:
            if not _was_deleted(sim):
                act(sim)
                await sim.until(_or_deleted(reached))
        if usual is not None:
            await sim.until(_has_come_to(usual.end))
        await sim.settle()
        assert usual is None or _has_come_to(usual.end)(sim), "the end did not last"
    finally:
        await sim.stop()


_GONE = {"status": {"rendezvous": []}, "objects": [], "rounds whose end is not persisted": []}


def _or_deleted(reached: Reached) -> Reached:
    return lambda sim: reached(sim) or _was_deleted(sim)


def _has_come_to(end: Raw) -> Reached:
    return lambda sim: sim.end() == (_GONE if _was_deleted(sim) else end)


def _was_deleted(sim: Simulation) -> bool:
    """Return whether the fault deleted the job."""
    return sim.server.fault in (Fault.DELETED, Fault.DELETED_AND_KILLED) and sim.job is None

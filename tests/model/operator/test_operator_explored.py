"""The operator in a simulated cluster: long random runs with faults, and invariants that are checked after each step.

Steps: reconcile (also with a crash before or after the i-th write), steps of kubelet and scheduler, agents that
connect, fail, are killed or disconnect, pods that do not start, nodes cut and healed, pods that users delete, quota,
refused Secrets, Services and NetworkPolicies, scaling, lost links between operator and stores; watch events arrive
late. In some runs the job is suspended and resumed, and the nodes have room for some of its pods only. Then the faults
stop and every component does its work: the cluster must match the spec, and the operator must make no more writes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from elasticjob._runtime.contract.messages import Outcome, Termination
from elasticjob._runtime.contract.names import ExitCode, Label, Role
from elasticjob_operator.kube import JOBS, NETWORK_POLICIES, PODS, SECRETS, SERVICES
from elasticjob_operator.model.cluster.nodes import NodeWarning
from elasticjob_operator.plan.pods.start_attempts import LONGEST_START_RETRY
from elasticjob_operator.reconcile.controller import Controller
from elasticjob_operator.reconcile.events import Recorder
from elasticjob_operator.reconcile.keys import JobKeys
from elasticjob_operator.watch.watch_cache import WatchCache
from support.operator.build import elastic, raw_job
from support.operator.watch import Watch
from support.operator.world import (
    Api,
    Crash,
    FakeStoreLinks,
    Node,
    World,
    conditions,
    job_indices,
    job_status,
    mark_deleted,
    number,
    phase,
    reset,
)

LOW, HIGH = 2, 4
KEY = ("ns", "bert")
TERMINAL = ("Complete", "Failed")
RUNS = int(os.environ.get("ELASTICJOB_EXPLORE_RUNS", "60"))
RUN_LENGTH = 250
"""Steps of a run."""
SPOT = NodeWarning("taint spot", ends=(("taint spot", 1_900_000_000.0),))
"""The warning of a machine that ends at a certain time."""
DRAIN = NodeWarning(drain="taint karpenter.sh/disrupted")
"""That of one that an autoscaler drains."""


class Run:
    """One run, determined by its seed."""

    def __init__(
        self, seed: int, loop: asyncio.AbstractEventLoop, *, one_pod_per_index: bool = False, interrupted: bool = False
    ) -> None:
        self.random = Random(seed)
        self.loop = loop
        self.api = Api(1_800_000_000.0)
        self.spares = seed % 3
        body = raw_job(**elastic(LOW, HIGH, 3), failurePolicy={"maxRestarts": 3}, networkIsolation=True)
        body["spec"]["elasticPolicy"]["spares"] = self.spares
        self.one_pod_per_index = one_pod_per_index
        if one_pod_per_index:
            body["spec"] |= {"podReplacementPolicy": "Failed", "podTerminationTimeoutSeconds": 0}
        self.interrupted = interrupted
        """Whether the job is suspended and resumed, and the cluster is often without room for it."""
        if interrupted:
            body["spec"]["elasticPolicy"]["faultyScaleDownSeconds"] = 5 * (seed % 2)
            body["spec"]["waitForMinSeconds"] = 8
        self.steps = self.STEPS + (self.INTERRUPTIONS if interrupted else ())
        self.last_execution = 0
        """The last execution that was suspended completely."""
        self.api.put(JOBS, body)
        self.world = World(self.api, {name: Node(name) for name in ("n1", "n2", "n3")})
        self.links = FakeStoreLinks(self.api, self.world.stores)
        self.lag = Random(seed)
        self.watch = Watch(self.api, WatchCache(nodes_watched=True))
        self.warnings: dict[str, NodeWarning] = {}
        """By name of the node; only nodes that have one."""
        self.controller = self._controller()
        self.restarts = 0
        self.ended = ""
        self.unhealthy_node = ""
        self.avoided = False
        self.names: dict[str, str] = {}
        self.deleted: set[str] = set()
        """Services that a user has deleted at some time."""
        self._add_foreign_pods()
        self.world.renew()

    def _add_foreign_pods(self) -> None:
        """Add pods that the job does not own: one with the name of a future worker, one with a worker's labels."""
        labels = {Label.JOB_NAME: "bert", Label.JOB_UID: self.api.objects[JOBS, "bert"]["metadata"]["uid"]}
        self.api.put(PODS, {"metadata": {"name": "bert-1-1", "labels": {}}, "spec": {"containers": []}})
        copied = labels | {Label.ROLE: "worker", Label.INDEX: "9", Label.INCARNATION: "0"}
        self.api.put(PODS, {"metadata": {"name": "stranger", "labels": copied}, "spec": {"containers": []}})
        self.foreign = {name: self.api.objects[PODS, name]["metadata"]["uid"] for name in ("bert-1-1", "stranger")}

    def _controller(self) -> Controller:
        keys = JobKeys(b"k" * 32)
        clock = lambda: self.api.operator_now  # noqa: E731
        recorder, watched = Recorder(self.api, "me"), self.watch.cache
        return Controller(self.api, keys, self.links, recorder, "image", clock=clock, watched=watched)  # type: ignore[arg-type]

    # -- steps

    def reconcile(self) -> None:
        self.loop.run_until_complete(self.controller.reconcile(KEY))

    def reconcile_and_crash(self) -> None:
        self.api.crash_in, self.api.committed = self.random.randrange(6), self.random.random() < 0.5
        try:
            self.reconcile()
        except Crash:
            self.restart_operator()
        finally:
            self.api.crash_in = None

    def restart_operator(self) -> None:
        """An operator starts on another host, with another clock."""
        self.api.operator_offset = self.random.choice((-500.0, -3.0, 0.0, 3.0, 500.0))
        self.links = reset(self.links)
        self.watch = Watch(self.api, WatchCache(nodes_watched=None))
        for name, warning in self.warnings.items():
            self.watch.cache.see_node(name, warning)
        self.controller = self._controller()

    def list_nodes(self) -> None:
        """A new operator has received all Nodes."""
        self.watch.cache.set_nodes_watched(True)

    def warn(self) -> None:
        """The end of a machine is announced, or it is cordoned or to be drained."""
        name = self.random.choice(list(self.world.nodes))
        self.warnings[name] = self.random.choice((SPOT, NodeWarning(cordoned=True), DRAIN))
        self.watch.cache.see_node(name, self.warnings[name])

    def withdraw_warnings(self) -> None:
        for name in self.warnings:
            self.watch.cache.see_node(name, None)
        self.warnings.clear()

    def tick(self) -> None:
        self.api.now += self.random.choice((0.1, 1.0, 4.0, 15.0))
        if self.random.random() < 0.7:
            self.world.renew()

    def schedule(self) -> None:
        for pod in self._some(self.workers() + self.stores()):
            self.world.schedule(pod, self.random.choice(list(self.world.nodes)))

    def start(self) -> None:
        for pod in self._some(self.workers() + self.stores()):
            self.world.start(pod)

    def join(self) -> None:
        for pod in self._some(self.workers()):
            self.world.connect(pod)

    def finish_deletions(self) -> None:
        for pod in self._some(self.workers() + self.stores()):
            self.world.finish_deletion(pod)

    def form(self) -> None:
        for store in self.world.serving():
            store.form(self.api.now, LOW)

    def request_confirmation(self) -> None:
        """A store misses half of a round or more, and asks whether it is the only store."""
        for store in self.world.serving():
            store.confirmation_request = self.api.now

    def take_over(self) -> None:
        self.world.take_over()

    def worker_fails(self) -> None:
        for store in self.world.serving():
            if store.members and store.outcome is None:
                self.world.outages.add(str(store.round))
                self.world.fail_worker(store, self.random.choice(store.members), replaced=store.rounds % 3 == 2)

    def agent_fails(self) -> None:
        for pod in self._some(self.workers(), 1):
            self.world.kill_agent(pod)

    def round_runs_out_of_memory(self) -> None:
        """The kernel kills some or all agents of a round; kubelets report that one after the other."""
        for store in self.world.serving():
            members = [p for p in self.workers() if p["metadata"]["name"] in store.members]
            for pod in self._some(members, self.random.randint(1, HIGH)):
                self.world.kill_agent(pod)
                if self.random.random() < 0.3:
                    self.reconcile()

    def fail_init(self) -> None:
        for pod in self._some(self.workers()):
            self.world.fail_init(pod)

    def evict_for_own_use(self) -> None:
        for pod in self._some(self.workers(), 1):
            self.world.evict_for_own_use(pod)

    def refuse_children(self) -> None:
        """The API server refuses Secrets, Services or NetworkPolicies; None: none of them."""
        self.api.refused = self.random.choice((None, None, SECRETS, SERVICES, NETWORK_POLICIES))

    def succeed(self) -> None:
        for store in self.world.serving():
            if store.members and store.outcome is None and self.random.random() < 0.1:
                store.outcome = Outcome.SUCCEEDED

    def exit_agents(self) -> None:
        for store in self.world.serving():
            if store.outcome is not None:
                self.world.exit_agents(store, self._some(self.workers()))

    def fail_health_check(self) -> None:
        """The health checks of a node fail; in one run, always of the same node."""
        for pod in self._some(self.workers(), 1):
            node = pod["spec"].get("nodeName", "")
            if phase(pod) == "Running" and self.unhealthy_node in ("", node):
                self.unhealthy_node = node
                self.world.fail_health_check(pod)

    def delete_pod(self) -> None:
        for pod in self._some(self.workers() + self.stores(), 1):
            self.world.delete(pod, force=self.random.random() < 0.3)

    def cut(self) -> None:
        node = self.random.choice(list(self.world.nodes.values()))
        if sum(n.cut for n in self.world.nodes.values()) == 0:
            for pod in self.workers():
                if pod["spec"].get("nodeName") == node.name:
                    self.world.disconnect(pod["metadata"]["name"])
            node.cut = True

    def heal(self) -> None:
        for node in self.world.nodes.values():
            node.cut = False

    def mark_unschedulable(self) -> None:
        for pod in self._some(self.workers(), 1):
            self.world.mark_unschedulable(pod)

    def evict(self) -> None:
        for pod in self._some(self.workers(), 1):
            if phase(pod) == "Running" and pod["spec"].get("nodeName"):
                evicted = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
                pod["status"]["conditions"] = [evicted]
                mark_deleted(pod, self.api.now)

    def scale(self) -> None:
        if not self.ended:
            self.world.scale(self.random.randint(LOW, HIGH))

    def quota(self) -> None:
        self.api.quota = self.random.choice((None, 2, 4))

    def toggle_links(self) -> None:
        """Cut or restore the network between operator and stores."""
        self.links.reachable = not self.links.reachable
        self.links.since = self.api.operator_now

    def suspend_or_resume(self) -> None:
        """A user suspends the job, or resumes it, which is more frequent."""
        suspended = bool(self.spec.get("suspend"))
        if not self.ended and (suspended or self.random.random() < 0.3):
            self.world.edit(suspend=not suspended)

    def leave(self) -> None:
        """Agents leave whose pods are being deleted."""
        for pod in self._some([p for p in self.workers() if "deletionTimestamp" in p["metadata"]]):
            self.world.terminate(pod, ExitCode.LEFT, "Error", Termination(Outcome.LEFT, "SIGTERM"))

    def change_room(self) -> None:
        """The nodes have room for more pods, or for fewer."""
        self.world.room = self.random.choice((None, 0, 1, 2, 3, 4))

    def delete_service(self) -> None:
        """A user deletes a Service of the job."""
        name = self.random.choice(("bert", "bert-rdzv"))
        self.deleted |= {name} if (SERVICES, name) in self.api.objects else set()
        self.api.remove(SERVICES, name)

    STEPS: tuple[tuple[int, Callable[[Run], None]], ...] = (
        (30, reconcile), (5, reconcile_and_crash), (2, restart_operator), (15, tick), (12, schedule), (12, start),
        (14, join), (8, finish_deletions), (12, form), (3, worker_fails), (1, agent_fails), (1, succeed),
        (4, exit_agents), (2, delete_pod), (1, cut), (2, heal), (2, mark_unschedulable), (1, evict), (2, scale),
        (1, quota), (1, toggle_links), (1, delete_service), (1, fail_health_check), (3, request_confirmation),
        (1, round_runs_out_of_memory), (1, fail_init), (1, evict_for_own_use), (2, refuse_children), (2, take_over),
        (2, warn), (2, withdraw_warnings), (5, list_nodes),
    )  # fmt: skip
    """Steps with their weights. A seed gives the same run only while their order stays."""
    INTERRUPTIONS: tuple[tuple[int, Callable[[Run], None]], ...] = (
        (3, suspend_or_resume), (3, change_room), (10, tick), (6, leave),
    )  # fmt: skip
    """More steps, for a job that is suspended and finds no room."""

    # -- running

    @property
    def spec(self) -> dict[str, Any]:
        found: dict[str, Any] = self.api.objects[JOBS, "bert"]["spec"]
        return found

    def workers(self) -> list[dict[str, Any]]:
        return self.api.pods(Role.WORKER)

    def stores(self) -> list[dict[str, Any]]:
        return self.api.pods(Role.STORE)

    def _some(self, pods: list[dict[str, Any]], most: int = 3) -> list[dict[str, Any]]:
        return self.random.sample(pods, min(most, len(pods)))

    def step(self) -> None:
        (chosen,) = self.random.choices([step for _, step in self.steps], [weight for weight, _ in self.steps])
        before = len(self.api.calls)
        chosen(self)
        self.world.drop_deleted()
        self.watch.record()
        self.watch.deliver(self.lag.choice((0, 0, 1, 3, None)))
        self.check(self.api.calls[before:])
        if chosen is Run.reconcile:
            live = [p["metadata"]["name"] for p in self.stores() if "deletionTimestamp" not in p["metadata"]]
            assert len(live) <= 2, f"more than one store and its standby store are to serve: {live}"

    def check(self, calls: list[tuple[str, str, str]]) -> None:
        """Check the invariants that hold after every step; `calls` are the step's writes."""
        status = job_status(self.api)
        for pod in self.workers() + self.stores():
            name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
            assert self.names.setdefault(name, uid) == uid, f"the name {name} was used twice"
        live = [p for p in self.workers() if phase(p) in ("Pending", "Running")]
        wanted = [p for p in live if "deletionTimestamp" not in p["metadata"] and self._current(p, status)]
        assert len(wanted) <= HIGH + self.spares, "more live pods than the maximum"
        indices = [number(p, Label.INDEX) for p in live]
        assert not self.one_pod_per_index or len(indices) == len({*indices}), "two pods of one index"
        assert status.get("restarts", 0) >= self.restarts, "restarts went down"
        self.restarts = status.get("restarts", 0)
        assert self.restarts <= len(self.world.outages), "more restarts charged than outages"
        assert set(status.get("chargedOutages", ())) <= self.world.outages, "an outage was charged that never was"
        assert self.restarts >= sum(s.acknowledged for s in self.world.stores.values()), (
            "a charge was acknowledged before it was persisted"
        )
        if live or self.stores():
            existing = {name for resource, name in self.api.objects if resource is SERVICES} | self.deleted
            assert (SECRETS, f"bert-rdzv-{status.get('keyId')}") in self.api.objects, (
                "a pod was created before the Secret"
            )
            suspended = self.spec.get("suspend") or conditions(self.api).get("Suspended") == "True"
            assert existing >= {"bert", "bert-rdzv"} or self.ended or suspended, "a pod was created before the Services"
        for name, uid in self.foreign.items():
            assert self.api.objects[PODS, name]["metadata"]["uid"] == uid, (
                f"the operator replaced {name}, which the job does not own"
            )
        named = [n for n in status.get("avoidedNodes", []) if n["reason"] == "DeviceUnhealthy"]
        assert {n["name"] for n in named} <= {self.unhealthy_node}, "the job avoids a healthy node"
        assert named or not self.avoided, "the job no longer avoids an unhealthy node"
        self.avoided = bool(named)
        self._check_room(calls, status)
        self._check_suspension(calls, status)
        self._check_end(calls, status)

    def _check_room(self, calls: list[tuple[str, str, str]], status: dict[str, Any]) -> None:
        assert LOW <= status.get("targetReplicas", LOW) <= HIGH, "the target is not within minReplicas and maxReplicas"
        if "since" in status.get("backOff", {}):
            created = [name for verb, plural, name in calls if (verb, plural) == ("create", "pods")]
            assert all("-rdzv-" in name for name in created), "a job that has given its pods back creates some"
            assert conditions(self.api).get("Running") != "True", "a job that trains gives its pods back"

    def _check_suspension(self, calls: list[tuple[str, str, str]], status: dict[str, Any]) -> None:
        if self.spec.get("suspend"):
            assert not [call for call in calls if call[0] == "create"], "an object of a suspended job was created"
        live = [p for p in self.workers() + self.stores() if phase(p) in ("Pending", "Running")]
        # The operator does not wait for the pods of a node that is lost.
        executions = {number(p, Label.EXECUTION_ATTEMPT) for p in live if not self._is_stuck(p)}
        assert len(executions) <= 1, "pods of two executions live at the same time"
        assert all(n > self.last_execution for n in executions), "a resumed job goes on with its last execution"
        if status.get("phase") == "Suspended" and not live:
            self.last_execution = status["executionAttempts"]

    def _is_stuck(self, pod: dict[str, Any]) -> bool:
        node = self.world.nodes.get(pod["spec"].get("nodeName", ""))
        return "deletionTimestamp" in pod["metadata"] and node is not None and node.cut

    def _current(self, pod: dict[str, Any], status: dict[str, Any]) -> bool:
        current = [int(n) for n in (status.get("incarnations") or "").split(",") if n]
        index = number(pod, Label.INDEX)
        return index < len(current) and current[index] == number(pod, Label.INCARNATION)

    def _check_end(self, calls: list[tuple[str, str, str]], status: dict[str, Any]) -> None:
        found = conditions(self.api)
        if self.ended:
            assert found.get(self.ended) == "True", f"{self.ended} is no longer True"
            assert not [c for c in calls if c[0] == "create"], "an object was created after the end of the job"
        self.ended = next((kind for kind in ("SuccessCriteriaMet", "FailureTarget") if found.get(kind) == "True"), "")
        final = [kind for kind in TERMINAL if found.get(kind) == "True"]
        assert len(final) <= 1
        if final:
            assert status["completionTime"]

    def converge(self) -> None:
        """Stop the faults, and let every component do its work."""
        self.heal()
        self.withdraw_warnings()
        self.list_nodes()
        self.api.quota, self.api.refused, self.links.reachable, self.world.room = None, None, True, None
        self.api.now += LONGEST_START_RETRY
        for _ in range(80 if self.interrupted else 40):
            self.api.now += 5.0
            self.world.renew()
            self.watch.record()
            self.watch.deliver()
            self.reconcile()
            self.world.run_pods()
            self.world.run_rounds(LOW)
            for store in self.world.serving():
                self.world.exit_agents(store, self.workers())
            self.check([])

    def check_converged(self) -> None:
        """Check that the cluster matches the spec, and that further reconciles write nothing."""
        found = conditions(self.api)
        before = len(self.api.calls)
        self.reconcile()
        self.reconcile()
        assert self.api.calls[before:] == [], "the operator still writes"
        if self.ended:
            assert [kind for kind in TERMINAL if found.get(kind) == "True"], f"the job did not end: {found}"
            assert self.stores() == []
            return
        if self.spec.get("suspend"):
            live = [p for p in self.workers() if phase(p) in ("Pending", "Running")]
            assert (live, self.stores()) == ([], []), "a suspended job has pods"
            assert found["Suspended"] == "True"
            assert job_status(self.api)["phase"] == "Suspended"
            return
        assert "scaledDown" not in job_status(self.api), "the job does not use the room that there is"
        assert "backOff" not in job_status(self.api), "the job still counts how often it gave its pods back"
        assert (NETWORK_POLICIES, "bert") in self.api.objects
        target = self.spec["replicas"]
        running = [p for p in self.workers() if phase(p) == "Running" and "deletionTimestamp" not in p["metadata"]]
        indices = job_indices(self.api, target + self.spares)
        assert sorted(number(p, Label.INDEX) for p in running) == sorted(indices)
        assert found["Running"] == found["FullyScaled"] == found["RendezvousReady"] == "True"
        assert (job_status(self.api)["active"], job_status(self.api)["standby"]) == (target, self.spares)
        assert job_status(self.api)["targetReplicas"] == job_status(self.api)["replicas"] == target
        members = {store.connected[pod][0] for store in self.world.serving() for pod in store.members}
        spares = indices - members
        outside = f" notin ({','.join(map(str, sorted(spares)))})" if spares else ""
        assert job_status(self.api)["selector"].partition("elasticjob.dev/index")[2] == outside


@pytest.mark.parametrize("first", range(0, RUNS, 10))
def test_random_runs(first: int) -> None:
    explore(first)


@pytest.mark.parametrize("first", range(0, RUNS // 2, 10))
def test_random_runs_with_one_pod_per_index(first: int) -> None:
    explore(first, one_pod_per_index=True)


@pytest.mark.parametrize("first", range(0, RUNS // 2, 10))
def test_random_runs_of_an_interrupted_job(first: int) -> None:
    explore(first, interrupted=True)


def explore(first: int, *, one_pod_per_index: bool = False, interrupted: bool = False) -> None:
    """Explore the ten runs from seed `first` on."""
    loop = asyncio.new_event_loop()
    try:
        for seed in range(first, first + 10):
            run = Run(seed, loop, one_pod_per_index=one_pod_per_index, interrupted=interrupted)
            try:
                for _ in range(RUN_LENGTH):
                    run.step()
                run.converge()
                run.check_converged()
            except Exception as error:
                raise AssertionError(f"seed {seed}: {error}") from error
    finally:
        loop.close()

"""The operator in a small Kubernetes: long random runs of faults, with oracles at every step.

Moves: look (also on a crash before or after the i-th write), kubelet and scheduler steps, agents that connect, fail,
break or vanish, nodes cut and healed, pods deleted by people, quota, scaling, silence between operator and stores.
Then the faults stop, everything fair happens, and the world must match the spec and stay still.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from elasticjob.contract.messages import EndReason, Outcome, Termination
from elasticjob.contract.names import Label, Role
from elasticjob_operator.controller import Controller
from elasticjob_operator.events import Recorder
from elasticjob_operator.keys import JobKeys
from elasticjob_operator.kube import JOBS, PODS, SERVICES
from elasticjob_operator.model.raw import timestamp
from support.operator_build import elastic, raw_job
from support.operator_world import (
    Api,
    Crash,
    FakeStoreLinks,
    Node,
    World,
    conditions,
    job_status,
    number,
    phase,
    reset,
)

LOW, HIGH = 2, 4
KEY = ("ns", "bert")
TERMINAL = ("Complete", "Failed")
RUNS = int(os.environ.get("ELASTICJOB_EXPLORE_RUNS", "60"))
STEPS = 250


class Run:
    """One run from a seed."""

    def __init__(self, seed: int, loop: asyncio.AbstractEventLoop) -> None:
        self.random = Random(seed)
        self.loop = loop
        self.api = Api(1_800_000_000.0)
        self.spares = seed % 3
        body = raw_job(**elastic(LOW, HIGH, 3), failurePolicy={"maxRestarts": 3})
        body["spec"]["elasticPolicy"]["spares"] = self.spares
        self.api.put(JOBS, body)
        self.world = World(self.api, {name: Node(name) for name in ("n1", "n2", "n3")})
        self.links = FakeStoreLinks(self.api, self.world.stores)
        self.controller = self._controller()
        self.restarts = 0
        self.ended = ""
        self.unfit_node = ""
        self.avoided = False
        self.names: dict[str, str] = {}
        self.counts: Counter[str] = Counter()
        self._foreign()
        self.world.renew()

    def _foreign(self) -> None:
        """Pods that are not the job's: one has a name it will want, one has all its labels."""
        labels = {Label.JOB_NAME: "bert", Label.JOB_UID: self.api.objects[JOBS, "bert"]["metadata"]["uid"]}
        self.api.put(PODS, {"metadata": {"name": "bert-1-1", "labels": {}}, "spec": {"containers": []}})
        copied = labels | {Label.ROLE: "worker", Label.INDEX: "9", Label.INCARNATION: "0"}
        self.api.put(PODS, {"metadata": {"name": "stranger", "labels": copied}, "spec": {"containers": []}})
        self.foreign = {name: self.api.objects[PODS, name]["metadata"]["uid"] for name in ("bert-1-1", "stranger")}

    def _controller(self) -> Controller:
        keys = JobKeys(b"k" * 32)
        clock = lambda: self.api.now  # noqa: E731
        return Controller(self.api, keys, self.links, Recorder(self.api, "me"), "image", clock=clock)  # type: ignore[arg-type]

    # -- moves

    def look(self) -> None:
        self.loop.run_until_complete(self.controller.reconcile(KEY))

    def look_and_crash(self) -> None:
        self.api.crash_in, self.api.committed = self.random.randrange(6), self.random.random() < 0.5
        try:
            self.look()
        except Crash:
            self.restart_operator()
        finally:
            self.api.crash_in = None

    def restart_operator(self) -> None:
        self.links = reset(self.links)
        self.controller = self._controller()

    def tick(self) -> None:
        self.api.now += self.random.choice((0.1, 1.0, 4.0, 15.0))
        if self.random.random() < 0.7:
            self.world.renew()

    def place(self) -> None:
        for pod in self._some(self.workers() + self.stores()):
            self.world.schedule(pod, self.random.choice(list(self.world.nodes)))

    def start(self) -> None:
        for pod in self._some(self.workers() + self.stores()):
            self.world.run(pod)

    def join(self) -> None:
        for pod in self._some(self.workers()):
            self.world.connect(pod)

    def reap(self) -> None:
        for pod in self._some(self.workers() + self.stores()):
            self.world.reap(pod)

    def form(self) -> None:
        for store in self.world.serving():
            store.form(self.api.now, LOW)

    def ask(self) -> None:
        """Half of a round or more is missing, for all that a store knows."""
        for store in self.world.serving():
            store.asks = self.api.now

    def worker_fails(self) -> None:
        for store in self.world.serving():
            if store.members and store.outcome is None:
                self.world.failures += 1
                store.end(EndReason.WORKER_FAILED, self.api.now, self.random.choice(store.members))

    def agent_breaks(self) -> None:
        for pod in self._some(self.workers(), 1):
            if phase(pod) == "Running":
                self.world.failures += 1
                self.world.finish(pod, 137, "OOMKilled")

    def succeed(self) -> None:
        for store in self.world.serving():
            if store.members and store.outcome is None and self.random.random() < 0.1:
                store.outcome = Outcome.SUCCEEDED

    def exit_agents(self) -> None:
        for store in self.world.serving():
            if store.outcome is None:
                continue
            code = 0 if store.outcome is Outcome.SUCCEEDED else 1
            for pod in self._some(self.workers()):
                if pod["metadata"]["name"] in store.here:
                    self.world.finish(pod, code, "Completed", Termination(store.outcome, "said"))

    def not_fit(self) -> None:
        """One node's health checks fail, for whichever agent runs them there."""
        for pod in self._some(self.workers(), 1):
            node = pod["spec"].get("nodeName", "")
            if phase(pod) == "Running" and self.unfit_node in ("", node):
                self.unfit_node = node
                self.world.unfit(pod)

    def delete_pod(self) -> None:
        for pod in self._some(self.workers() + self.stores(), 1):
            self.world.delete(pod, force=self.random.random() < 0.3)

    def cut(self) -> None:
        node = self.random.choice(list(self.world.nodes.values()))
        if sum(n.cut for n in self.world.nodes.values()) == 0:
            for pod in self.workers():
                if pod["spec"].get("nodeName") == node.name:
                    self.world.drop(pod["metadata"]["name"])
            node.cut = True

    def heal(self) -> None:
        for node in self.world.nodes.values():
            node.cut = False

    def no_room(self) -> None:
        for pod in self._some(self.workers(), 1):
            self.world.no_room(pod)

    def evict(self) -> None:
        for pod in self._some(self.workers(), 1):
            if phase(pod) == "Running" and pod["spec"].get("nodeName"):
                gone = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
                pod["status"]["conditions"] = [gone]
                pod["metadata"].setdefault("deletionTimestamp", timestamp(self.api.now + 30))

    def scale(self) -> None:
        if not self.ended:
            self.world.scale(self.random.randint(LOW, HIGH))

    def quota(self) -> None:
        self.api.quota = self.random.choice((None, 2, 4))

    def silence(self) -> None:
        self.links.up = not self.links.up
        self.links.since = self.api.now

    def meddle(self) -> None:
        """A person deletes a Service."""
        self.api.remove(SERVICES, self.random.choice(("bert", "bert-rdzv")))

    MOVES: tuple[tuple[int, Callable[[Run], None]], ...] = (
        (30, look), (5, look_and_crash), (2, restart_operator), (15, tick), (12, place), (12, start), (14, join),
        (8, reap), (12, form), (3, worker_fails), (1, agent_breaks), (1, succeed), (4, exit_agents), (2, delete_pod),
        (1, cut), (2, heal), (2, no_room), (1, evict), (2, scale), (1, quota), (1, silence), (1, meddle),
        (1, not_fit), (3, ask),
    )  # fmt: skip

    # -- running

    def workers(self) -> list[dict[str, Any]]:
        return self.api.pods(Role.WORKER)

    def stores(self) -> list[dict[str, Any]]:
        return self.api.pods(Role.STORE)

    def _some(self, pods: list[dict[str, Any]], most: int = 3) -> list[dict[str, Any]]:
        return self.random.sample(pods, min(most, len(pods)))

    def step(self) -> None:
        (move,) = self.random.choices([m for _, m in self.MOVES], [w for w, _ in self.MOVES])
        before = len(self.api.calls)
        move(self)
        self.world.settle_agents()
        self.counts[move.__name__] += 1
        self.check(self.api.calls[before:])
        if move is Run.look:
            live = [p["metadata"]["name"] for p in self.stores() if "deletionTimestamp" not in p["metadata"]]
            assert len(live) <= 1, f"{live} are to serve"

    def check(self, calls: list[tuple[str, str, str]]) -> None:
        """Oracles that hold at every moment."""
        status = job_status(self.api)
        for pod in self.workers() + self.stores():
            name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
            assert self.names.setdefault(name, uid) == uid, f"the name {name} was used twice"
        live = [p for p in self.workers() if phase(p) in ("Pending", "Running")]
        wanted = [p for p in live if "deletionTimestamp" not in p["metadata"] and self._current(p, status)]
        assert len(wanted) <= HIGH + self.spares, "more live pods than the maximum"
        assert status.get("restarts", 0) >= self.restarts, "restarts went down"
        self.restarts = status.get("restarts", 0)
        assert self.restarts <= self.world.failures, "charged more than failed"
        assert self.restarts >= sum(s.acknowledged for s in self.world.stores.values()), "acknowledged and not counted"
        for name, uid in self.foreign.items():
            assert self.api.objects[PODS, name]["metadata"]["uid"] == uid, f"{name} is not ours"
        named = [n for n in status.get("avoidedNodes", []) if n["reason"] == "DeviceUnhealthy"]
        assert {n["name"] for n in named} <= {self.unfit_node}, "avoids a node that is fit"
        assert named or not self.avoided, "a node that is not fit was forgotten"
        self.avoided = bool(named)
        self._check_end(calls, status)

    def _current(self, pod: dict[str, Any], status: dict[str, Any]) -> bool:
        known = [int(n) for n in (status.get("incarnations") or "").split(",") if n]
        index = number(pod, Label.INDEX)
        return index < len(known) and known[index] == number(pod, Label.INCARNATION)

    def _check_end(self, calls: list[tuple[str, str, str]], status: dict[str, Any]) -> None:
        told = conditions(self.api)
        if self.ended:
            assert told.get(self.ended) == "True", f"{self.ended} was left"
            assert not [c for c in calls if c[0] == "create"], "made something after the end"
        self.ended = next((kind for kind in ("SuccessCriteriaMet", "FailureTarget") if told.get(kind) == "True"), "")
        final = [kind for kind in TERMINAL if told.get(kind) == "True"]
        assert len(final) <= 1
        if final:
            assert status["completionTime"]

    def converge(self) -> None:
        """Faults stop; everybody does their duty."""
        self.heal()
        self.api.quota, self.links.up = None, True
        for _ in range(40):
            self.api.now += 5.0
            self.world.renew()
            self.look()
            for pod in self.workers() + self.stores():
                for node in self.world.nodes:
                    self.world.schedule(pod, node)
                self.world.no_room(pod)
                self.world.run(pod)
                self.world.reap(pod)
            self.world.settle_agents()
            for pod in self.workers():
                self.world.connect(pod)
            for store in self.world.serving():
                if store.short:
                    store.end(EndReason.SCALING_UP, self.api.now)
                store.form(self.api.now, LOW)
            self.exit_all()
            self.check([])

    def exit_all(self) -> None:
        for _ in range(4):
            self.exit_agents()

    def check_converged(self) -> None:
        """The world matches the spec, and the operator has nothing more to do."""
        told = conditions(self.api)
        before = len(self.api.calls)
        self.look()
        self.look()
        assert self.api.calls[before:] == [], "not still"
        if self.ended:
            assert [k for k in TERMINAL if told.get(k) == "True"], f"never ended: {told}"
            assert self.stores() == []
            return
        target = self.api.objects[JOBS, "bert"]["spec"]["replicas"]
        running = [p for p in self.workers() if phase(p) == "Running" and "deletionTimestamp" not in p["metadata"]]
        assert sorted(number(p, Label.INDEX) for p in running) == list(range(target + self.spares))
        assert told["Running"] == told["FullyScaled"] == told["RendezvousReady"] == "True"
        assert (job_status(self.api)["active"], job_status(self.api)["standby"]) == (target, self.spares)


@pytest.mark.parametrize("first", range(0, RUNS, 10))
def test_random_runs(first: int) -> None:
    loop = asyncio.new_event_loop()
    try:
        for seed in range(first, first + 10):
            run = Run(seed, loop)
            try:
                for _ in range(STEPS):
                    run.step()
                run.converge()
                run.check_converged()
            except Exception as error:
                raise AssertionError(f"seed {seed}: {error}") from error
    finally:
        loop.close()

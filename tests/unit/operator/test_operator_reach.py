"""An operator that loses its way to many stores at once: it suspects itself, and goes by what the kubelets report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticjob._runtime.contract.names import Label, Role
from elasticjob_operator.kube import JOBS, LEASES, PODS
from elasticjob_operator.links.store_reachability import RATE_SECONDS
from elasticjob_operator.model.cluster.raw import timestamp
from elasticjob_operator.model.observed import LinkView, ReachedStores
from elasticjob_operator.plan.store_pods.operator_reach import REPLACED_AT_ONCE, may_replace, suspects_itself
from elasticjob_operator.reconcile.controller import Controller
from elasticjob_operator.reconcile.events import Recorder
from elasticjob_operator.reconcile.keys import JobKeys
from support.operator.build import NOW, condition, conditions_of, gathering, raw_job, raw_pod, run, status, steady
from support.operator.world import Api

pytestmark = pytest.mark.slow
DIRECT = 2
"""Nodes whose stores an operator replaces before it suspects itself, at most."""


@pytest.mark.parametrize(
    ("lost", "reached", "suspects"),
    [(0, 5, False), (1, 0, False), (1, 5, False), (2, 2, False), (2, 1, True), (2, 0, True), (3, 500, True)],
)
def test_the_stores_of_many_nodes_or_of_most_are_a_sign(lost: int, reached: int, suspects: bool) -> None:
    assert suspects_itself(ReachedStores(lost, reached)) is suspects
    assert may_replace(ReachedStores(lost, reached), kubelet_late=False) is not suspects
    assert may_replace(ReachedStores(lost, reached), kubelet_late=True)


class Links:
    """The operator's links: the test decides which stores it reaches."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.lost: dict[str, float] = {}
        self.known: dict[str, int] = {}
        """Keyed by job: the incarnation of the store that sent the last report."""

    def view(self, key: tuple[str, str]) -> LinkView:
        name, incarnation = key[1], self.cluster.incarnation(key[1])
        if name not in self.lost and self.cluster.serves(name, incarnation):
            self.known[name] = incarnation
        last = gathering(incarnation=self.known[name]) if name in self.known else None
        connected = name not in self.lost and self.known.get(name) == incarnation
        return LinkView(connected, self.lost.get(name, NOW - 60), last)

    def standby_view(self, _: object) -> LinkView:
        return LinkView()

    def set_address(self, *_: object) -> None: ...
    def set_operator_view(self, *_: object) -> None: ...
    def forget(self, *_: object) -> None: ...


class Cluster:
    """Jobs with one store each, on nodes of their own, whose kubelets renew their Leases."""

    def __init__(self, jobs: int, nodes: int) -> None:
        self.api = Api(NOW)
        self.names = [f"job{i}" for i in range(jobs)]
        self.nodes = [f"n{i}" for i in range(nodes)]
        self.silent: set[str] = set()
        """Nodes whose kubelets do not renew their Leases."""
        self.links = Links(self)
        links: Any = self.links
        recorder = Recorder(self.api, "me")
        self.controller = Controller(self.api, JobKeys(b"k" * 32), links, recorder, "image", clock=lambda: self.api.now)
        for i, name in enumerate(self.names):
            raw = raw_job(status=status(incarnations="", rendezvous={"incarnation": 0}))
            meta = raw["metadata"] | {"name": name, "uid": f"uid-{name}"}
            self.api.put(JOBS, raw | {"metadata": meta})
            self.add_store(name, 0, self.nodes[i % nodes])

    def add_store(self, name: str, incarnation: int, node: str) -> None:
        pod = raw_pod(0, incarnation, role=Role.STORE, node=node)
        labels = pod["metadata"]["labels"] | {Label.JOB_NAME: name, Label.JOB_UID: f"uid-{name}"}
        owner = {"uid": f"uid-{name}", "controller": True}
        meta = {"name": f"{name}-rdzv-{incarnation}", "labels": labels, "ownerReferences": [owner]}
        self.api.put(PODS, pod | {"metadata": meta})

    def incarnation(self, name: str) -> int:
        found: int = self.api.objects[JOBS, name]["status"]["rendezvous"]["incarnation"]
        return found

    def serves(self, name: str, incarnation: int) -> bool:
        pod = self.api.objects.get((PODS, f"{name}-rdzv-{incarnation}"))
        return pod is not None and pod.get("status", {}).get("phase") == "Running"

    async def step(self, seconds: float = 1.0) -> None:
        """Let time pass; kubelets renew Leases and start new stores, and every job is reconciled."""
        self.api.now += seconds
        spare = [f"spare-{name}" for name in self.names]
        for node in {*self.nodes, *spare} - self.silent:
            self.api.put(LEASES, {"metadata": {"name": node}, "spec": {"renewTime": timestamp(self.api.now)}})
        for name in self.names:
            incarnation = self.incarnation(name)
            if (PODS, f"{name}-rdzv-{incarnation}") in self.api.objects and not self.serves(name, incarnation):
                self.add_store(name, incarnation, f"spare-{name}")
            await self.controller.reconcile(("ns", name))

    async def run(self, seconds: int, step: int = 1) -> list[int]:
        """Return how many stores were replaced after each step."""
        replaced = []
        for _ in range(0, seconds, step):
            await self.step(step)
            replaced.append(sum(self.incarnation(name) for name in self.names))
        return replaced

    def lose(self, *names: str) -> None:
        """Keep-alive ends the links to the stores of these jobs (all without names), and no new one opens."""
        self.links.lost |= dict.fromkeys(names or self.names, self.api.now - 3.0)

    def condition(self, name: str) -> dict[str, str]:
        conditions = self.api.objects[JOBS, name]["status"]["conditions"]
        found: dict[str, str] = next(c for c in conditions if c["type"] == "RendezvousReady")
        return found


async def test_one_store_of_many_is_replaced_within_seconds() -> None:
    cluster = Cluster(jobs=8, nodes=8)
    await cluster.step()
    cluster.lose("job3")
    assert (await cluster.run(4))[-1] == 1


async def test_the_stores_of_one_node_are_one_loss() -> None:
    cluster = Cluster(jobs=12, nodes=3)
    await cluster.step()
    on_last_node = [f"job{i}" for i in range(2, 12, 3)]
    cluster.lose(*on_last_node)
    await cluster.run(4)
    assert [name for name in cluster.names if cluster.incarnation(name)] == on_last_node


@pytest.mark.parametrize(("jobs", "nodes"), [(12, 12), (12, 4), (4, 4), (2, 2)])
@pytest.mark.parametrize("spread", [False, True], ids=["at once", "one node after the other"])
async def test_an_operator_that_reaches_no_store_leaves_those_whose_kubelets_report(
    jobs: int, nodes: int, spread: bool
) -> None:
    cluster = Cluster(jobs, nodes)
    await cluster.step()
    for node in range(nodes if spread else 1):
        cluster.lose(*(cluster.names[node::nodes] if spread else cluster.names))
        await cluster.step()
    replaced = await cluster.run(300, step=20)
    assert replaced[-1] <= (DIRECT * jobs // nodes if spread else 0)
    left = [name for name in cluster.names if not cluster.incarnation(name)]
    assert left
    for name in left:
        shown = cluster.condition(name)
        assert (shown["type"], shown["status"], shown["reason"]) == ("RendezvousReady", "Unknown", "StoreUnreachable")
        assert "its own network may be the cause" in shown["message"]
        assert f"reports {name}-rdzv-0 as ready" in shown["message"]
        assert "failures and restarts since then are unknown" in shown["message"]


async def test_an_operator_that_reaches_stores_again_says_so() -> None:
    cluster = Cluster(jobs=6, nodes=6)
    await cluster.step()
    cluster.lose()
    await cluster.run(6)
    cluster.links.lost.clear()
    await cluster.run(3)
    assert {cluster.condition(name)["reason"] for name in cluster.names} == {"StoreAvailable"}


async def test_stores_whose_kubelets_are_silent_too_are_replaced_a_few_at_a_time() -> None:
    cluster = Cluster(jobs=10, nodes=10)
    await cluster.step()
    cluster.lose()
    cluster.silent = set(cluster.nodes)
    replaced = [0, *await cluster.run(60, step=2)]
    window = int(RATE_SECONDS) // 2
    rates = [b - a for a, b in zip(replaced, replaced[window:], strict=False)]
    assert max(rates) <= REPLACED_AT_ONCE
    assert replaced[-1] >= 10, "every store is replaced in the end"
    waiting = [name for name in cluster.names if not cluster.incarnation(name)]
    assert waiting == []


async def test_a_deleted_job_does_not_count() -> None:
    cluster = Cluster(jobs=6, nodes=6)
    await cluster.step()
    cluster.lose("job1", "job2", "job3", "job4")
    await cluster.run(4)
    gone = [name for name in cluster.names if name not in ("job0", "job5")]
    for name in gone:
        cluster.api.remove(JOBS, name)
        await cluster.controller.reconcile(("ns", name))
    cluster.names = ["job0", "job5"]
    cluster.lose("job5")
    await cluster.run(4)
    assert cluster.incarnation("job5") == 1


def test_a_store_that_refuses_the_link_is_left_and_status_says_why() -> None:
    refused = LinkView(False, NOW - 60, gathering(), refused="the peer has the wrong key for role operator")
    p = run(replace(steady(conditions=[condition("RendezvousReady")]), link=refused))
    assert p.actions == ()
    shown = conditions_of(p)["RendezvousReady"]
    assert (shown["status"], shown["reason"]) == ("False", "LinkRefused")
    assert "bert-rdzv-0 refuses the operator: the peer has the wrong key for role operator" in shown["message"]

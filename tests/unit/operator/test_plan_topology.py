"""Plans of an operator that knows where machines are: what it sends to the stores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elasticjob._runtime.contract.messages import ExpectedPod
from elasticjob._runtime.contract.names import Role
from support.operator.build import run, steady, worker
from support.operator.cluster import KEY, Cluster
from support.operator.world import Node


def sent(**topologies: tuple[str, ...]) -> tuple[ExpectedPod, ...]:
    """Return the pods that both stores of a job with pods on n1 and n2 learn of."""
    pods = (worker(0, node="n1"), worker(1, node="n2"))
    p = run(replace(steady(workers=pods), topologies=topologies))
    assert p.operator_view is not None
    assert p.standby_view is not None
    assert p.operator_view.pods == p.standby_view.pods
    return p.operator_view.pods


def test_the_stores_learn_where_the_machine_of_each_pod_is() -> None:
    assert [p.topology for p in sent()] == [(), ()]
    assert [p.topology for p in sent(n2=("z", "r"), n9=("y", "q"))] == [(), ("z", "r")]
    assert [p.topology for p in sent(n1=("z", "r"), n2=("z", "r"))] == [("z", "r"), ("z", "r")]


def test_a_pod_that_is_created_now_is_nowhere_yet() -> None:
    observed = replace(steady(workers=(worker(0, node="n1"),)), topologies={"n1": ("z",)})
    view = run(observed).operator_view
    assert view is not None
    assert [(p.pod, p.topology) for p in view.pods] == [("bert-0-0", ("z",)), ("bert-1-1", ())]


async def test_the_controller_sends_what_the_watch_on_nodes_delivered(monkeypatch: Any) -> None:
    cluster, views = Cluster(), []
    monkeypatch.setattr(cluster.controller.links, "set_operator_view", lambda key, view: views.append(view))
    cluster.world.nodes["n1"] = Node("n1")
    await cluster.reconcile()
    for pod in cluster.api.pods(Role.WORKER):
        cluster.world.schedule(pod, "n1")
    cluster.controller.watched.see_node("n1", None, ("z", "r"))
    await cluster.controller.reconcile(KEY)
    assert [p.topology for p in views[-1].pods] == [("z", "r"), ("z", "r")]


async def test_the_controller_places_pods_by_the_narrowest_label() -> None:
    cluster = Cluster(placement="Spread")
    cluster.controller.placement_label = "example.com/rack"
    await cluster.reconcile()
    pod, _ = cluster.api.pods(Role.WORKER)
    (rule,) = pod["spec"]["topologySpreadConstraints"]
    assert rule["topologyKey"] == "example.com/rack"

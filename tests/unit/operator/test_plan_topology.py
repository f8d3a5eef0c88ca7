"""Plans of an operator that knows where machines are: what it sends to the stores."""

from __future__ import annotations

from dataclasses import replace

from elasticjob.contract.messages import ExpectedPod
from support.operator_build import run, steady, worker


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

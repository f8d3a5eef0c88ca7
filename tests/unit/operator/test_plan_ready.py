"""`status.ready` counts indices of the job, not pods: two pods of one index are one node."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticjob._runtime.contract.messages import AgentReport, Report, RoundPhase
from elasticjob_operator.model.observed import LinkView
from support.operator.build import gathering, link, report, run, status_of, steady, worker

REPLACED, NEW, OTHER = worker(0), worker(0, 1), worker(1)
PODS = (REPLACED, NEW, OTHER)


@pytest.mark.parametrize("last_report", [report(*PODS), gathering(*PODS)], ids=["a round runs", "no round runs"])
def test_two_connected_pods_of_one_index_are_one_ready_node(last_report: Report) -> None:
    p = run(steady(workers=PODS, last_report=last_report, incarnations="1,0"))
    assert status_of(p)["ready"] == 2


def test_a_node_that_is_not_ready_yet_does_not_count_beside_one_of_its_index_that_is() -> None:
    nodes = tuple(AgentReport(p.index, p.incarnation, p.name, p is not NEW, False) for p in PODS)
    p = run(steady(workers=PODS, last_report=replace(gathering(*PODS), nodes=nodes), incarnations="1,0"))
    assert status_of(p)["ready"] == 2
    only_new = tuple(node for node in nodes if node.pod != REPLACED.name)
    p = run(steady(workers=PODS, last_report=replace(gathering(*PODS), nodes=only_new), incarnations="1,0"))
    assert status_of(p)["ready"] == 1


@pytest.mark.parametrize(
    "store_link",
    [LinkView(), link(gathering(*PODS, phase=RoundPhase.RECOVERING))],
    ids=["no link to the store", "the store recovers"],
)
def test_two_running_pods_of_one_index_are_one_ready_node_while_the_store_does_not_report(store_link: LinkView) -> None:
    trained = {"incarnation": 0, "round": "1.0.1"}
    p = run(replace(steady(workers=PODS, incarnations="1,0", rendezvous=trained), link=store_link))
    assert status_of(p)["ready"] == 2


@pytest.mark.parametrize(("known", "ready"), [(0, 0), (1, 1)])
def test_before_the_first_round_the_number_of_ready_nodes_does_not_grow_without_a_report(
    known: int, ready: int
) -> None:
    p = run(replace(steady(ready=known), link=LinkView()))
    assert status_of(p)["ready"] == ready, "the containers of both pods run, and their nodes may still import"

"""A container that its machine lost is a lost node, avoided until its kubelet renews its lease, and not charged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticjob._runtime.contract.messages import InRound, Outcome
from elasticjob._runtime.contract.names import RoundId
from elasticjob_operator.actions import CreateWorker
from elasticjob_operator.model.cluster.pods import CONTAINER_LOST
from elasticjob_operator.model.observed import Observed
from support.operator.build import Raw, declared, ended, job, report, run, status_of, steady, worker

OTHER = worker(1, node="n2")


def observed(end: Raw) -> Observed:
    """Return a job whose first pod, on n1, has ended so."""
    return steady(workers=(worker(0, **end), OTHER), last_report=report(OTHER))


@pytest.mark.parametrize(
    "end",
    [
        ended(255, "Unknown"),
        ended(137, CONTAINER_LOST),
        ended(255, "Unknown", InRound(RoundId(1, 0, 1))),
        ended(137, CONTAINER_LOST, InRound(RoundId(1, 0, 1))),
        ended(255, "Error", InRound(RoundId(1, 0, 1))),
    ],
    ids=["containerd", "kubelet", "containerd, in a round", "kubelet, in a round", "containerd lost its shim"],
)
def test_the_machine_of_a_lost_container_is_avoided_and_nothing_is_charged(end: Raw) -> None:
    p = run(observed(end))
    assert p.actions == (CreateWorker("bert-0-1", 0, 1, avoid=("n1",)),)
    status_ = status_of(p)
    assert [(node["name"], node["reason"]) for node in status_["avoidedNodes"]] == [("n1", "NodeLost")]
    assert (status_["lastFailure"]["class"], status_["lastFailure"]["node"]) == ("NodeLost", "n1")
    assert (status_["restarts"], status_["restartsCountTowardsMax"]) == (0, 0)
    assert p.operator_view is not None
    assert p.operator_view.charged == 0

    again = replace(steady(workers=(worker(0, 1, node="n3"), OTHER)), job=job(status=status_))
    assert "avoidedNodes" in (run(again).status or again.job.status.raw)
    returned = run(replace(again, returned_nodes=frozenset({"n1"})))
    assert "avoidedNodes" not in status_of(returned)


@pytest.mark.parametrize(
    ("end", "charged"),
    [
        (ended(255), True),
        (ended(137), True),
        (ended(255, "Error", declared(Outcome.ERROR)), True),
        (ended(137, "Error", InRound(RoundId(1, 0, 1))), True),
        (ended(255, "Unknown", declared(Outcome.LEFT)), False),
    ],
    ids=[
        "the program exited with 255",
        "the program was killed",
        "the agent exited with 255",
        "the agent was killed in a round",
        "the agent had left before",
    ],
)
def test_no_machine_is_avoided_for_a_container_that_ended_by_itself(end: Raw, charged: bool) -> None:
    p = run(observed(end))
    assert p.actions == (CreateWorker("bert-0-1", 0, 1, avoid=()),)
    status_ = status_of(p)
    assert "avoidedNodes" not in status_
    assert status_["restarts"] == int(charged)

"""A slow rank in status and Events."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elasticjob.contract.messages import RoundPhase, Straggler
from elasticjob_operator.model.observed import Observed
from elasticjob_operator.model.raw import timestamp
from elasticjob_operator.plan import Plan, plan
from support.operator_build import IMAGE, NOW, condition, gathering, job, link, report, steady, worker

SLOW = Straggler(1, "bert-1-0", 0.06149, 0.008, NOW - 5)
RECORD = {
    "rank": 1, "pod": "bert-1-0", "node": "n2", "stepSeconds": 0.0615, "medianSeconds": 0.008,
    "time": timestamp(NOW - 5),
}  # fmt: skip
PODS = (worker(0), worker(1, node="n2"))


def run(observed: Observed) -> Plan:
    return plan(observed, IMAGE, NOW)


def told(p: Plan) -> dict[str, Any]:
    assert p.status is not None
    return dict(p.status)


def warnings(p: Plan) -> list[tuple[str, str]]:
    return [(n.reason, n.message) for n in p.event_records if n.warning]


def slow(straggler: Straggler = SLOW) -> Observed:
    return steady(workers=PODS, told=report(*PODS, straggler=straggler))


def test_a_slow_rank_is_in_status_and_told_once() -> None:
    first = run(slow())
    assert told(first)["straggler"] == RECORD
    where = "rank 1 in bert-1-0 on n2 holds up every step: 0.0615 s of its own, 0.008 s in the other ranks"
    assert warnings(first) == [("Straggler", where)]
    observed = slow()
    again = run(replace(observed, job=job(status=told(first))))
    assert again.status is None
    assert again.event_records == ()
    other = run(replace(slow(replace(SLOW, time=NOW - 1)), job=job(status=told(first))))
    assert [n.key for n in other.event_records if n.warning] == [f"{timestamp(NOW - 1)}/1"], "another happening"


def test_it_goes_when_all_keep_up_and_when_the_round_ends() -> None:
    assert "straggler" not in told(run(steady(workers=PODS, told=report(*PODS), straggler=RECORD)))
    gone = gathering(*PODS, rounds=1, straggler=SLOW)
    ended = steady(workers=PODS, told=gone, straggler=RECORD)
    assert "straggler" not in told(run(ended))
    assert warnings(run(ended)) == []


def test_it_stays_while_nobody_can_be_asked() -> None:
    running = {"conditions": [condition("Running")], "active": 2, "worldSize": 2, "straggler": RECORD}
    observed = steady(workers=PODS, told=report(*PODS), **running)
    for silent in (link(None), link(report(*PODS, phase=RoundPhase.RECOVERING))):
        p = run(replace(observed, link=silent))
        assert told(p)["straggler"] == RECORD
        assert warnings(p) == []


def test_a_pod_of_an_unknown_node_has_none() -> None:
    p = run(slow(replace(SLOW, pod="bert-7-0")))
    assert told(p)["straggler"] == {k: v for k, v in RECORD.items() if k != "node"} | {"pod": "bert-7-0"}
    assert "in bert-7-0 holds up" in warnings(p)[0][1]

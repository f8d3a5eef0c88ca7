"""Stragglers in status and Events."""

from __future__ import annotations

from dataclasses import replace

from elasticjob._runtime.contract.messages import RoundPhase, Straggler
from elasticjob_operator.model.cluster.raw import timestamp
from elasticjob_operator.model.observed import Observed
from elasticjob_operator.plan import Plan
from support.operator.build import NOW, condition, gathering, job, link, report, run, status_of, steady, worker

SLOW = Straggler(1, "bert-1-0", 0.06149, 0.008, NOW - 5)
RECORD = {
    "rank": 1, "pod": "bert-1-0", "node": "n2", "stepSeconds": 0.0615, "medianSeconds": 0.008,
    "time": timestamp(NOW - 5),
}  # fmt: skip
PODS = (worker(0), worker(1, node="n2"))


def warnings(p: Plan) -> list[tuple[str, str]]:
    return [(e.reason, e.message) for e in p.event_records if e.warning]


def slow(straggler: Straggler = SLOW) -> Observed:
    return steady(workers=PODS, last_report=report(*PODS, straggler=straggler))


def test_a_slow_rank_is_in_status_and_reported_once() -> None:
    first = run(slow())
    assert status_of(first)["straggler"] == RECORD
    message = (
        "rank 1 in bert-1-0 on n2 slows every step: its own work takes 0.0615 s per step, "
        "0.008 s in the median of the other ranks"
    )
    assert warnings(first) == [("Straggler", message)]
    observed = slow()
    again = run(replace(observed, job=job(status=status_of(first))))
    assert again.status is None
    assert again.event_records == ()
    later = run(replace(slow(replace(SLOW, time=NOW - 1)), job=job(status=status_of(first))))
    assert [e.key for e in later.event_records if e.warning] == [f"{timestamp(NOW - 1)}/1"]


def test_the_straggler_is_cleared_when_all_ranks_keep_up_and_when_the_round_ends() -> None:
    assert "straggler" not in status_of(run(steady(workers=PODS, last_report=report(*PODS), straggler=RECORD)))
    no_round = gathering(*PODS, rounds=1, straggler=SLOW)
    ended = steady(workers=PODS, last_report=no_round, straggler=RECORD)
    assert "straggler" not in status_of(run(ended))
    assert warnings(run(ended)) == []


def test_the_straggler_stays_while_the_store_is_unavailable_or_recovers() -> None:
    running = {"conditions": [condition("Running")], "active": 2, "worldSize": 2, "straggler": RECORD}
    observed = steady(workers=PODS, last_report=report(*PODS), **running)
    for view in (link(None), link(report(*PODS, phase=RoundPhase.RECOVERING))):
        p = run(replace(observed, link=view))
        assert status_of(p)["straggler"] == RECORD
        assert warnings(p) == []


def test_a_straggler_in_an_unknown_pod_has_no_node() -> None:
    p = run(slow(replace(SLOW, pod="bert-7-0")))
    assert status_of(p)["straggler"] == {k: v for k, v in RECORD.items() if k != "node"} | {"pod": "bert-7-0"}
    assert "in bert-7-0 slows every step" in warnings(p)[0][1]

"""The last transfer of a training state in status."""

from __future__ import annotations

from dataclasses import replace

from elasticjob._runtime.contract.messages import StateReceived, StateTransfer
from elasticjob._runtime.contract.names import RoundId
from elasticjob_operator.model.cluster.raw import timestamp
from support.operator.build import NOW, job, report, run, status_of, steady, worker

PODS = (worker(0), worker(1, node="n2"))
RECEIVED = StateReceived(RoundId(1, 0, 2), 1, 1_000_000_000, 0.5, "eth0")
TRANSFER = StateTransfer(RECEIVED, "bert-1-0", NOW - 5)
RECORD = {
    "rank": 1, "pod": "bert-1-0", "bytes": 1_000_000_000, "seconds": 0.5, "gigabytesPerSecond": 2.0,
    "interface": "eth0", "time": timestamp(NOW - 5),
}  # fmt: skip


def test_a_transfer_is_in_status_until_the_next_one() -> None:
    observed = steady(workers=PODS, last_report=report(*PODS, state_transfer=TRANSFER))
    status = status_of(run(observed))
    assert status["stateTransfer"] == RECORD
    assert run(replace(observed, job=job(status=status))).status is None
    new_store = steady(workers=PODS, last_report=report(*PODS), stateTransfer=RECORD)
    assert status_of(run(new_store))["stateTransfer"] == RECORD


def test_an_unknown_interface_is_left_out() -> None:
    unknown = replace(TRANSFER, received=replace(RECEIVED, interface=""))
    found = status_of(run(steady(workers=PODS, last_report=report(*PODS, state_transfer=unknown))))["stateTransfer"]
    assert found == {name: value for name, value in RECORD.items() if name != "interface"}


def test_a_job_without_transfers_has_no_such_field() -> None:
    assert "stateTransfer" not in status_of(run(steady(workers=PODS, last_report=report(*PODS))))

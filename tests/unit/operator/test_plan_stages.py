"""Stages of the command in status: what is finished, also for the next store, and where steps and failures are."""

from __future__ import annotations

from dataclasses import replace

from elasticjob._runtime.contract.messages import Failure, FailureClass, TrainingProgress
from elasticjob._runtime.contract.names import RoundId
from elasticjob_operator.plan.failure_policy.failures import describe_record, worker_record
from elasticjob_operator.plan.job_status.next_status import write_delay
from support.operator.build import job, report, run, status_of, steady, worker

PODS = (worker(0), worker(1, node="n2"))
LAUNCHERS = ("prepare.py 0123", "train.py 4567")
FINISHED = {"finished": 1, "launchers": list(LAUNCHERS)}


def test_what_is_finished_is_in_status_and_in_every_later_view() -> None:
    observed = steady(workers=PODS, last_report=report(*PODS, finished_stages=1, launchers=LAUNCHERS))
    planned = run(observed)
    status = status_of(planned)
    assert status["stages"] == FINISHED
    assert run(replace(observed, job=job(status=status))).status is None
    later = run(steady(workers=PODS, last_report=report(*PODS), stages=FINISHED))  # of a new store
    assert later.operator_view is not None
    assert (later.operator_view.finished_stages, later.operator_view.launchers) == (1, LAUNCHERS)
    assert write_delay(status, {name: value for name, value in status.items() if name != "stages"}) > 0


def test_a_command_of_one_launcher_that_trains_has_no_stages_in_status() -> None:
    planned = run(steady(workers=PODS, last_report=report(*PODS, launchers=LAUNCHERS[:1])))
    assert planned.status is None or "stages" not in status_of(planned)
    assert planned.operator_view is not None
    assert planned.operator_view.finished_stages == 0


def test_steps_and_failures_name_their_stage() -> None:
    progress = TrainingProgress(RoundId(1, 0, 1), 5, None, None)
    observed = steady(workers=PODS, last_report=report(*PODS, progress=progress, stage=2, finished_stages=1))
    assert status_of(run(observed))["trainerStatus"]["stage"] == 2
    failure = Failure(FailureClass.USER_ERROR, "bert-1-0", 1.0, rank=1, exit_code=3, stage=2)
    record = worker_record(failure, "n2")
    assert record["stage"] == 2
    assert describe_record(record) == "rank 1 in bert-1-0 on n2 failed in stage 2: exit code 3"
    assert "stage" not in worker_record(replace(failure, stage=0), "n2")

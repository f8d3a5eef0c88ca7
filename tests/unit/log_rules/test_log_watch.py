"""What an agent finds in the output of its workers by the rules of spec.logRules."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from elasticjob._runtime.agent.reporting.log_watch import LogStep, LogWatch, MetCondition
from elasticjob._runtime.agent.reporting.worker_output import OutputLine
from elasticjob._runtime.contract.log_rules.rules import LocalRanks, LogAction, LogCondition, LogRule
from elasticjob._runtime.contract.messages import FailureClass, Metric, StartRound, decode, encode
from elasticjob._runtime.contract.names import RoundId

ROUND = RoundId(1, 0, 3)
STEPS = LogRule("steps", r"step (?P<step>\d+)(?:/(?P<total>\d+))?(?: loss (?P<loss>\S+))?")


class Job:
    """One agent's watch in a round, whose first rank is 4, and a clock."""

    def __init__(self, *rules: LogRule) -> None:
        self.now = 100.0
        self.watch = LogWatch("bert-1-0", lambda: self.now)
        self.met = list[MetCondition]()
        self.steps = 0
        self.watch.on_condition = self.met.append
        self.watch.on_step = self._count
        self.watch.begin_round(StartRound(ROUND, 1, 2, 4, 8, 4, 8, "10.0.0.1", 4000, 0, 3, log_rules=rules))

    def _count(self) -> None:
        self.steps += 1

    def writes(self, *lines: str, local_rank: int = 0, after: float = 1.0) -> None:
        self.now += after
        self.watch.feed(ROUND, local_rank, [OutputLine(line.encode()) for line in lines])

    @property
    def progress(self) -> Any:
        found = self.watch.training()
        assert found is not None
        assert found.from_log
        assert decode(encode(found)) == found
        return found.step, found.total, found.step_seconds, {m.name: m.value for m in found.metrics}


@pytest.fixture
def job() -> Job:
    return Job(STEPS, LogRule("speed", r"(?P<speed>\S+) samples/s"))


def test_steps_and_metrics_are_reported(job: Job) -> None:
    job.writes("starts", "12.5 samples/s")
    assert job.watch.training() is None, "there is no step yet"
    job.writes("step 3/9 loss 2.5", after=10)
    assert job.progress == (3, 9, None, {"speed": "12.5", "loss": "2.5"})
    job.writes("step 5 loss 1.5", "13 samples/s", "fast samples/s", after=4)
    assert job.progress == (5, 9, 2.0, {"speed": "13", "loss": "1.5"})
    assert job.steps == 2
    assert job.watch.last_step == LogStep(5, job.now)


def test_of_several_ranks_the_first_one_to_show_a_step_counts(job: Job) -> None:
    job.writes("step 1 loss 1", local_rank=1)
    job.writes("step 1 loss 2", local_rank=0)
    assert job.progress[::3] == (1, {"loss": "1"})
    job.writes("step 2 loss 3", local_rank=0)
    job.writes("step 2 loss 4", local_rank=1)
    assert job.progress[::3] == (2, {"loss": "3"})


def test_a_step_that_begins_again_is_reported_and_is_progress(job: Job) -> None:
    job.writes("step 8")
    job.writes("step 9")
    job.writes("step 1", after=30)
    job.writes("step 2", after=3)
    assert job.progress[:3] == (2, None, 3.0), "its time is measured from the new begin"


def test_the_same_step_again_is_no_progress(job: Job) -> None:
    job.writes("step 8")
    at = job.now
    job.writes("step 8", "step 8")
    job.writes("step 8", local_rank=1)
    assert job.watch.last_step == LogStep(8, job.now), "the other rank has made it now"
    job.writes("step 8", local_rank=1)
    job.writes("step -1", "step x", "step 99999999999999999999999")
    assert job.watch.last_step == LogStep(8, at + 2)


def test_lines_of_other_rounds_and_of_stopped_workers_are_ignored(job: Job) -> None:
    job.watch.feed(RoundId(1, 0, 2), 0, [OutputLine(b"step 1")])
    assert job.watch.last_step is None
    job.writes("step 1")
    job.watch.end_round()
    job.writes("step 2")
    assert job.watch.last_step is not None
    assert job.watch.last_step.step == 1, "the report of a hang names it"


def test_a_rule_may_look_at_the_first_local_rank_only() -> None:
    job = Job(replace(STEPS, local_ranks=LocalRanks.FIRST))
    job.writes("step 7", local_rank=1)
    assert job.watch.training() is None
    job.writes("step 7", local_rank=0)
    assert job.progress[0] == 7


def loss(**condition: object) -> LogRule:
    return replace(STEPS, conditions=(LogCondition("loss", **condition),))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["nan", "NaN", "inf", "-inf", "Infinity"])
def test_a_number_that_is_not_finite(value: str) -> None:
    job = Job(loss(not_finite=True, action=LogAction.RESTART_GROUP))
    job.writes("step 1 loss 3e38", "step 1 loss none")
    assert not job.met
    job.writes(f"step 2 loss {value}", "step 3 loss nan", local_rank=2)
    job.writes("step 3 loss nan")
    (met,) = job.met
    assert (met.round, met.ends_round, met.failure.ends_job) == (ROUND, True, False)
    assert (met.failure.kind, met.failure.rank, met.failure.pod) == (FailureClass.USER_ERROR, 6, "bert-1-0")
    assert met.failure.message == f"loss is {value} at step 2 (log rule steps: not finite)"
    assert met.failure.log_rule == "steps"


@pytest.mark.parametrize(
    ("action", "ends_round", "ends_job"),
    [(LogAction.EVENT, False, False), (LogAction.RESTART_GROUP, True, False), (LogAction.FAIL_JOB, True, True)],
)
def test_the_action_of_a_condition(action: LogAction, ends_round: bool, ends_job: bool) -> None:
    job = Job(loss(above=5.0, action=action))
    job.writes("step 1 loss 5", "step 2 loss nan")
    assert not job.met
    job.writes("step 3 loss inf")
    assert (job.met[0].ends_round, job.met[0].failure.ends_job) == (ends_round, ends_job)


def test_all_values_of_a_rank_must_be_so_for_the_time() -> None:
    job = Job(loss(below=10.0, for_seconds=60.0))
    job.writes("step 1 loss 9")
    job.writes("step 2 loss 10", after=59)
    job.writes("step 3 loss 9")
    job.writes("step 3 loss 8", local_rank=1, after=30)
    job.writes("step 4 loss 11", local_rank=1, after=20)
    job.writes("step 5 loss 8", after=9)
    assert not job.met
    job.writes("step 6 loss 8", after=1)
    assert job.met[0].failure.message == "loss is 8 at step 6 (log rule steps: below 10 for 60 s)"


def test_a_new_round_begins_without_what_was_found(job: Job) -> None:
    job.writes("step 8 loss 1")
    start = StartRound(RoundId(1, 0, 4), 0, 1, 0, 4, 0, 4, "10.0.0.1", 4000, 0, 3, log_rules=(STEPS,))
    job.watch.begin_round(start)
    assert job.watch.training() is None
    assert job.watch.last_step is None


def test_a_rule_that_matches_nothing_is_logged_once(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    job.writes("step 1\x1b[2J loss 3", "step 2")
    job.watch.end_round()
    job.watch.log_unmatched()
    job.watch.log_unmatched()
    assert [record.getMessage() for record in caplog.records] == [
        r"log rule steps matches a line of rank 4: step 1\x1b[2J loss 3",
        "log rule speed matched no line of this pod's workers in the last round",
    ]


def test_values_of_metrics_are_short_and_printable(job: Job) -> None:
    job.writes("step 1 loss " + "1" * 90)
    (metric,) = [m for m in (job.watch.training() or pytest.fail("no step")).metrics if isinstance(m, Metric)]
    assert metric.value == "1" * 64


def test_a_rule_that_a_later_operator_allows_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(LogRule("later", "(?=a)(?P<step>a)"))
    job.writes("step 1")
    assert job.watch.training() is None
    assert "log rule later: look-ahead" in caplog.text

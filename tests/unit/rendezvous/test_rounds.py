"""The rules of rounds, one by one. Slots stand for nodes; `Job` is the driver."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticjob.contract.messages import (
    EndReason,
    EndRound,
    Failure,
    FailureClass,
    HangAction,
    Leaving,
    MemberState,
    Outcome,
    PodState,
    Ready,
    RoundPhase,
    RoundSettings,
    Standby,
    StartRound,
    WorkersFailed,
    WorkersStalled,
    WorkersStopped,
)
from elasticjob.contract.names import RoundId
from elasticjob.diagnosis import HANG_GRACE
from elasticjob.rendezvous import rounds
from elasticjob.rendezvous.stalls import STALL_REPORT_SECONDS
from elasticjob.rendezvous.state import NodeMessage
from support.rounds import SETTINGS, Job, job_of, member_of, pods

FAILURE = Failure(FailureClass.KILLED, "j-0-0", 1.0)


# ---- a round forms


def test_a_round_forms_at_once_when_the_target_is_here() -> None:
    job = Job()
    job.announce(0, 1, 2)
    assert job.phase() is RoundPhase.GATHERING
    job.announce(3)
    assert job.members == ["j-0-0", "j-1-0", "j-2-0", "j-3-0"]
    assert [job.start_of(s).rank for s in range(4)] == [0, 1, 2, 3]
    assert job.start_of(3).master_addr == "10.0.0.0"
    assert job.start_of(3).master_port == 5000


def test_with_an_operator_there_is_no_last_call() -> None:
    job = Job()
    job.facts(*pods(0, 1), *pods(2, state=PodState.STARTING), *pods(3, state=PodState.UNSCHEDULABLE))
    job.announce(0, 1)
    assert job.members == []
    job.announce(2)
    assert len(job.members) == 3


def test_without_an_operator_the_last_call_decides() -> None:
    job = Job()
    job.announce(0, 1)
    job.later(SETTINGS.last_call_timeout - 1)
    assert job.members == []
    job.later(1)
    assert len(job.members) == 2


def test_falling_below_min_cancels_the_last_call() -> None:
    job = Job()
    job.announce(0, 1)
    job.later(29)
    job.gone(1)
    job.later(5)
    job.announce(1)
    job.later(29)
    assert job.members == []
    job.later(1)
    assert len(job.members) == 2


def test_a_cold_start_closes_on_announcements() -> None:
    job = Job()
    job.facts(*pods(0, 1), target=2)
    job.announce(0, 1, ready=False)
    assert len(job.members) == 2


def test_a_node_without_a_pod_in_the_facts_waits() -> None:
    job = Job()
    job.facts(*pods(0, 1), target=2)
    job.announce(2)
    assert isinstance(job.last(2), Standby)
    job.announce(0, 1)
    assert job.members == ["j-0-0", "j-1-0"]


def test_a_node_beyond_the_target_stands_by() -> None:
    job = job_of(0, 1, 2)
    job.announce(3)
    assert isinstance(job.last(3), Standby)
    assert len(job.members) == 3


def test_heterogeneous_nodes_get_consecutive_ranks() -> None:
    job = Job(RoundSettings(min_nodes=3, max_nodes=3, target=3))
    job.announce(0, workers=2)
    job.announce(1, workers=4)
    job.announce(2, workers=1)
    starts = [job.start_of(s) for s in range(3)]
    assert [(s.rank, s.role_rank, s.world_size, s.group_rank) for s in starts] == [
        (0, 0, 7, 0),
        (2, 2, 7, 1),
        (6, 6, 7, 2),
    ]


# ---- a round ends


def test_a_failed_worker_ends_the_round_and_is_charged_once() -> None:
    job = job_of(0, 1)
    job.fail(1)
    assert job.told_to_end(0, 1)
    job.stopped(0, 1)
    assert job.start_of(0).round == RoundId(1, 0, 2)
    assert job.start_of(0).restarts == 1
    (ended,) = job.report.ended_rounds
    assert (ended.reason, ended.charged, ended.failure and ended.failure.rank) == (EndReason.WORKER_FAILED, True, 1)


def test_a_failure_told_together_with_the_stop_is_a_failure() -> None:
    job = job_of(0, 1)
    start = job.start_of(1)
    said = (WorkersFailed(start.round, replace(FAILURE, pod="j-1-0", rank=1)), WorkersStopped(start.round, 6001))
    job.state = rounds.decide_together(job.state, [NodeMessage("1.0", message) for message in said], job.now).state
    assert job.state.round is not None
    assert job.state.round.ending is not None
    assert job.state.round.ending.reason is EndReason.WORKER_FAILED


def test_the_next_round_waits_until_nothing_of_the_old_one_runs() -> None:
    job = job_of(0, 1, 2)
    job.fail(1)
    job.stopped(0, 1)
    assert job.phase() is RoundPhase.ENDING
    job.stopped(2)
    assert job.start_of(2).round.number == 2


def test_broken_collectives_of_the_peers_are_not_the_cause() -> None:
    job = job_of(0, 1, 2)
    job.fail(0, FailureClass.COLLECTIVE_FAILED)
    job.fail(2, FailureClass.KILLED)
    job.fail(1, FailureClass.COLLECTIVE_FAILED)
    job.stopped(0, 1, 2)
    failure = job.report.ended_rounds[0].failure
    assert failure is not None
    assert (failure.rank, failure.kind) == (2, FailureClass.KILLED)


def test_a_lost_node_is_not_charged_though_collectives_broke_first() -> None:
    job = job_of(0, 1, 2)
    job.fail(0, FailureClass.COLLECTIVE_FAILED)
    job.gone(2)
    job.stopped(0, 1)
    job.later(1)
    (ended,) = job.report.ended_rounds
    assert (ended.reason, ended.charged, ended.lost_pods) == (EndReason.AGENT_LOST, False, ("j-2-0",))
    assert job.members == ["j-0-0", "j-1-0"]
    assert job.report.lost_pods == ("j-2-0",)


def test_a_worker_that_died_with_its_node_is_not_charged() -> None:
    job = job_of(0, 1, 2)
    job.fail(2, FailureClass.KILLED)
    job.gone(2)
    job.stopped(0, 1)
    job.later(1)
    assert not job.report.ended_rounds[0].charged


def test_a_blip_is_not_a_death() -> None:
    job = job_of(0, 1)
    job.gone(1)
    job.later(0.1)
    job.announce(1, membership=member_of(job.start_of(1)))
    job.later(5)
    assert job.phase() is RoundPhase.RUNNING
    assert job.report.rounds == 1


def test_what_was_said_during_a_blip_is_repaired() -> None:
    job = job_of(0, 1)
    job.gone(1)
    job.announce(1, membership=member_of(job.start_of(1), MemberState.SUCCEEDED))
    job.succeed(0)
    assert job.report.outcome is Outcome.SUCCEEDED


def test_a_round_that_was_not_heard_of_is_told_again() -> None:
    job = Job()
    job.facts(*pods(0, 1), target=2)
    job.announce(0, 1)
    job.gone(1)
    job.announce(1)
    assert [type(m) for m in job.told["1.0"]].count(StartRound) == 2


def test_an_end_that_was_not_heard_of_is_told_again() -> None:
    job = job_of(0, 1)
    job.gone(1)
    job.fail(0)
    job.announce(1, membership=member_of(job.start_of(1)))
    assert [type(m) for m in job.told["1.0"]].count(EndRound) == 2
    job.stopped(0, 1)
    assert job.start_of(1).round.number == 2


def test_a_node_given_up_must_stop_before_it_may_join() -> None:
    job = job_of(0, 1, 2)
    job.gone(2)
    job.later(1)
    job.stopped(0, 1)
    job.started(0, 1)
    old = job.start_of(2)
    job.announce(2, membership=member_of(old))
    assert job.last(2) == EndRound(old.round, 1.0, "the job went on without this node")
    assert job.report.rounds == 2
    job.stopped(2)
    job.stopped(0, 1)
    assert len(job.members) == 3


def test_words_on_an_old_round_have_no_effect() -> None:
    job = job_of(0, 1)
    old = job.start_of(1).round
    job.fail(0)
    job.stopped(0, 1)
    job.started(0, 1)
    job.say(1, WorkersFailed(old, FAILURE))
    job.say(1, WorkersStopped(old, 7777))
    assert job.phase() is RoundPhase.RUNNING


def test_a_node_that_never_stops_is_given_up() -> None:
    job = job_of(0, 1, 2)
    job.fail(0)
    job.stopped(0, 1)
    job.later(31.5)
    assert job.members == ["j-0-0", "j-1-0"]


def test_below_min_nobody_trains() -> None:
    job = job_of(0, 1)
    job.gone(1)
    job.later(1)
    job.stopped(0)
    assert job.phase() is RoundPhase.GATHERING
    assert job.report.reason == "1 of at least 2 nodes are here"
    job.facts(*pods(0), *pods(1, inc=1, state=PodState.STARTING))
    job.announce(1, inc=1, ready=False)
    assert job.members == ["j-0-0", "j-1-1"]


# ---- nodes leave, join, are replaced


def test_a_leaving_node_is_let_go_after_the_round_has_ended() -> None:
    job = job_of(0, 1, 2)
    job.leave(2)
    assert job.told_to_end(0, 1, 2)
    assert job.finished(2) is None
    job.stopped(0, 1, 2)
    finish = job.finished(2)
    assert finish is not None
    assert finish.outcome is Outcome.LEFT
    assert job.members == ["j-0-0", "j-1-0"]
    assert not job.report.ended_rounds[0].charged


def test_a_collective_that_a_leaving_node_broke_is_not_charged() -> None:
    job = job_of(0, 1, 2)
    job.leave(2)
    job.fail(0, FailureClass.COLLECTIVE_FAILED)
    job.stopped(0, 1, 2)
    assert job.report.ended_rounds[0].reason is EndReason.NODE_LEFT


def test_a_node_that_is_not_fit_leaves_uncharged_whatever_its_workers_died_of() -> None:
    job = job_of(0, 1, 2)
    broken = Failure(FailureClass.DEVICE_UNHEALTHY, "j-1-0", 1.0, message="GPU 0 is lost")
    job.fail(1)
    job.say(1, Leaving("DeviceUnhealthy: GPU 0 is lost", broken))
    job.stopped(0, 1, 2)
    (ended,) = job.report.ended_rounds
    assert (ended.reason, ended.charged, ended.failure, ended.lost_pods) == (
        EndReason.NODE_LEFT,
        False,
        broken,
        ("j-1-0",),
    )
    assert job.finished(1) is not None
    assert job.members == ["j-0-0", "j-2-0"]
    assert job.report.unhealthy == (broken,)
    job.facts(*pods(0, 2), *pods(1, inc=1, state=PodState.STARTING))
    assert not job.report.unhealthy


def test_a_failure_before_its_stop_told_late_is_the_cause_of_an_echo_told_first() -> None:
    job = job_of(0, 1)
    job.fail(0, FailureClass.COLLECTIVE_FAILED)
    job.fail(1)
    job.stopped(0, 1)
    (ended,) = job.report.ended_rounds
    assert ended.failure is not None
    assert (ended.failure.pod, ended.failure.kind) == ("j-1-0", FailureClass.USER_ERROR)


def hang(job: Job, index: int, step: int, *, waiting: bool) -> None:
    start = job.start_of(index)
    told = Failure(
        FailureClass.HANG, f"j-{index}-0", 1.0, rank=start.rank, message="m", step=step, waits_for_peers=waiting
    )
    job.say(index, WorkersFailed(start.round, told))


def test_a_hang_ends_the_round_with_everybodys_stacks_and_blames_who_is_farthest_behind() -> None:
    job = job_of(0, 1, 2)
    hang(job, 0, 7, waiting=True)
    for index in (1, 2):
        end = job.last(index)
        assert isinstance(end, EndRound)
        assert (end.dump_stacks, end.grace_seconds) == (True, HANG_GRACE)
        hang(job, index, 7 - index % 2, waiting=index == 2)
    job.stopped(0, 1, 2)
    (ended,) = job.report.ended_rounds
    assert (ended.reason, ended.charged) == (EndReason.WORKER_FAILED, True)
    assert ended.failure is not None
    assert (ended.failure.pod, ended.failure.step) == ("j-1-0", 6)
    assert job.start_of(0).round.number == 2


def test_a_hang_may_end_the_job() -> None:
    job = job_of(0, 1, hang_action=HangAction.FAIL_JOB)
    hang(job, 0, 7, waiting=False)
    job.stopped(0, 1)
    assert job.report.outcome is Outcome.FAILED
    assert job.report.failure is not None
    assert job.report.failure.kind is FailureClass.HANG


def stall(job: Job, index: int, step: int, *, waiting: bool = False) -> None:
    start = job.start_of(index)
    told = Failure(
        FailureClass.HANG, f"j-{index}-0", job.now, rank=start.rank, message="m", step=step, waits_for_peers=waiting
    )
    job.say(index, WorkersStalled(start.round, told))


def test_a_hang_may_be_told_and_end_nothing() -> None:
    job = job_of(0, 1, 2, hang_action=HangAction.EVENT)
    assert not job.start_of(0).hang_ends_round
    before = dict(job.told)
    for index in (0, 1, 2):
        assert job.report.stall is None, "not before all have told where they stand"
        stall(job, index, 7, waiting=index != 1)
    assert job.report.stall is not None
    assert job.report.stall.pod == "j-1-0"
    assert (job.told, job.report.ended_rounds, job.phase()) == (before, (), RoundPhase.RUNNING)
    assert rounds.next_deadline(job.state, job.now) is None
    job.fail(0)
    job.stopped(0, 1, 2)
    job.started(0, 1, 2)
    assert job.report.stall is None, "that was another round"


def test_a_standstill_that_not_all_tell_of_is_told_a_moment_later_and_the_next_one_anew() -> None:
    job = job_of(0, 1, 2, hang_action=HangAction.EVENT)
    stall(job, 0, 7, waiting=True)
    first = job.state.round and job.state.round.stall_reports["0.0"]
    job.later(STALL_REPORT_SECONDS)
    assert job.report.stall == first
    assert first is not None
    job.say(0, WorkersStalled(job.start_of(0).round, first))  # its link was away for a moment
    assert rounds.next_deadline(job.state, job.now) is None
    job.later(20)
    stall(job, 2, 9)
    stall(job, 0, 9, waiting=True)
    job.later(STALL_REPORT_SECONDS)
    assert job.report.stall is not None
    assert (job.report.stall.pod, job.report.stall.step) == ("j-2-0", 9)


def test_the_progress_timeout_holds_from_the_next_round_on() -> None:
    job = job_of(0, 1)
    job.facts(*pods(0, 1), progress_timeout=30.0)
    assert job.start_of(0).progress_timeout == 0.0
    job.fail(1)
    job.stopped(0, 1)
    assert job.start_of(0).progress_timeout == 30.0


def test_the_report_says_whose_workers_start_by_exec_and_why() -> None:
    job = job_of(0, 1, 2)
    assert (job.report.fork_disabled_reason, job.report.fork_disabled_nodes) == ("", 0)
    for index in (1, 2):
        job.say(index, Ready(f"why {index}"))
    assert (job.report.fork_disabled_reason, job.report.fork_disabled_nodes) == ("why 1", 2)


def test_a_draining_pod_leaves_though_its_agent_has_not_said_so() -> None:
    job = job_of(0, 1, 2)
    job.facts(*pods(0, 1), *pods(2, state=PodState.DRAINING), target=3)
    assert job.told_to_end(0, 1, 2)


@pytest.mark.parametrize("word", ["drained", "told to leave"])
def test_a_node_beyond_the_target_that_goes_is_scaling_down(word: str) -> None:
    job = job_of(0, 1, 2)
    draining = pods(2, state=PodState.DRAINING) if word == "drained" else pods(2)
    job.facts(*pods(0, 1), *draining, target=2)
    if word == "told to leave":
        job.leave(2)
    job.stopped(0, 1, 2)
    assert job.report.ended_rounds[0].reason is EndReason.SCALING_DOWN
    assert job.members == ["j-0-0", "j-1-0"]


def test_waiting_nodes_join_only_when_ready_and_together() -> None:
    job = job_of(0, 1, target=4)
    job.facts(*pods(0, 1, 2), *pods(3, state=PodState.STARTING), target=4)
    job.announce(2, ready=True)
    job.announce(3, ready=False)
    job.later(1)
    assert job.phase() is RoundPhase.RUNNING
    job.ready(3)
    assert job.phase() is RoundPhase.ENDING
    job.stopped(0, 1)
    assert job.members == ["j-0-0", "j-1-0", "j-2-0", "j-3-0"]
    assert job.report.ended_rounds[0].reason is EndReason.SCALING_UP


def test_a_pod_that_does_not_come_holds_joiners_no_longer_than_the_window() -> None:
    job = job_of(0, 1, target=4)
    job.facts(*pods(0, 1, 2), *pods(3, state=PodState.STARTING), target=4)
    job.announce(2)
    job.later(29)
    assert job.phase() is RoundPhase.RUNNING
    job.later(1)
    assert job.phase() is RoundPhase.ENDING


def test_nobody_joins_once_a_member_has_succeeded() -> None:
    job = job_of(0, 1, target=3)
    job.succeed(0)
    job.announce(2)
    job.later(60)
    assert job.phase() is RoundPhase.RUNNING


def test_a_lower_target_ends_the_round_once_and_drops_the_highest_slots() -> None:
    job = job_of(0, 1, 2, 3)
    job.facts(*pods(0, 1, 2, 3), target=2)
    job.stopped(0, 1, 2, 3)
    assert job.members == ["j-0-0", "j-1-0"]
    job.started(0, 1)
    job.leave(3)
    job.leave(2)
    assert job.report.rounds == 2
    assert job.finished(2) is not None


def test_nodes_that_stay_keep_their_ranks() -> None:
    job = job_of(0, 1, 2)
    job.gone(0)
    job.later(1)
    job.stopped(1, 2)
    job.started(1, 2)
    assert job.members == ["j-1-0", "j-2-0"]
    job.facts(*pods(1, 2), *pods(0, inc=1), target=3)
    job.announce(0, inc=1)
    job.stopped(1, 2)
    assert job.members == ["j-1-0", "j-2-0", "j-0-1"]
    assert job.start_of(2).master_port == 6001


def test_an_older_pod_of_a_slot_is_superseded() -> None:
    job = job_of(0, 1, 2)
    job.gone(2)
    job.later(1)
    job.facts(*pods(0, 1), *pods(2, inc=1, state=PodState.STARTING), target=3)
    job.announce(2, membership=member_of(job.start_of(2)))
    finish = job.finished(2)
    assert finish is not None
    assert finish.outcome is Outcome.SUPERSEDED


# ---- the job ends


def test_success_needs_every_member() -> None:
    job = job_of(0, 1)
    job.succeed(0)
    assert job.report.outcome is None
    job.succeed(1)
    assert job.report.outcome is Outcome.SUCCEEDED
    finish = job.finished(0)
    assert finish is not None
    assert finish.outcome is Outcome.SUCCEEDED


def test_if_another_member_fails_first_finished_members_run_again() -> None:
    job = job_of(0, 1)
    job.succeed(0)
    job.fail(1)
    assert job.told_to_end(0, 1)
    job.stopped(0, 1)
    assert job.start_of(0).round.number == 2


def test_the_budget_ends_the_job_with_the_root_cause() -> None:
    job = job_of(0, 1, max_restarts=1)
    for _ in range(2):
        job.fail(1)
        job.stopped(0, 1)
        if job.report.outcome is None:
            job.started(0, 1)
    assert job.report.outcome is Outcome.FAILED
    assert job.report.failure is not None
    assert job.report.failure.exception == "ValueError"
    assert [e.charged for e in job.report.ended_rounds] == [True, False]


def test_charges_that_status_has_taken_in_are_not_counted_twice() -> None:
    job = job_of(0, 1, max_restarts=2)
    job.fail(1)
    job.stopped(0, 1)
    job.started(0, 1)
    job.facts(*pods(0, 1), charged=1, charged_round=RoundId(1, 0, 1))
    assert job.report.ended_rounds == ()
    job.fail(1)
    job.stopped(0, 1)
    assert job.start_of(0).restarts == 2
    assert job.report.outcome is None


def test_an_end_is_told_to_whoever_comes_later() -> None:
    job = job_of(0, 1)
    job.succeed(0, 1)
    job.announce(2)
    finish = job.finished(2)
    assert finish is not None
    assert finish.outcome is Outcome.SUCCEEDED


def test_older_words_of_an_operator_are_dropped() -> None:
    job = job_of(0, 1, target=2)
    job.sequence = 0
    job.facts(*pods(0), target=3)
    assert job.state.settings.target == 2


# ---- a round's own store


def test_a_leaving_node_is_let_go_only_when_all_members_have_stopped() -> None:
    job = job_of(0, 1, 2)
    job.leave(0)
    job.stopped(0)
    job.later(5)
    job.stopped(1)
    assert job.finished(0) is None
    job.stopped(2)
    assert job.finished(0) is not None


def test_no_round_meets_where_an_older_one_met() -> None:
    job = job_of(0, 1)
    met = [(job.start_of(0).master_addr, job.start_of(0).master_port)]
    for port in (7001, 7002):
        round_id = job.start_of(0).round
        job.fail(1)
        for index in (0, 1):
            job.say(index, WorkersStopped(round_id, port + index))
        job.started(0, 1)
        met.append((job.start_of(0).master_addr, job.start_of(0).master_port))
    assert met == [("10.0.0.0", 5000), ("10.0.0.0", 7001), ("10.0.0.0", 7002)]

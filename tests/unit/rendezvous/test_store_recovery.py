"""What a successor store does with the round that it finds, and a job without an operator.

Numbers in calls of `Job` are the indices of agents.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticjob._runtime.contract.messages import (
    AgentToCoordinator,
    Failure,
    FailureClass,
    Finish,
    MemberState,
    Outcome,
    PlanEnd,
    PodState,
    RoundPhase,
    StartRound,
    SuccessPolicy,
    WorkersFailed,
    WorkersStopped,
    WorkersSucceeded,
)
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.rendezvous.rounds import rounds
from elasticjob._runtime.rendezvous.state import LOST_TIMEOUT, MAX_ENDED_ROUNDS, RECOVERY_TIMEOUT, AgentMessage, Tick
from support.rendezvous.rounds import SETTINGS, Job, agent_id, announcement, job_of, membership_of, pods

FAILURE = Failure(FailureClass.KILLED, "j-0-0", 1.0)


def restarted(before: Job, **states: MemberState) -> Job:
    """A successor store, to which agents of `before` have announced their state in the round (`n0`: of index 0)."""
    job = Job(before.state.settings, store=1, recovering=True)
    for name, state in states.items():
        index = int(name[1:])
        job.announce(index, membership=membership_of(before.start_of(index), state))
    return job


def test_a_round_whose_members_all_reconnect_is_restored() -> None:
    job = restarted(job_of(0, 1), n0=MemberState.RUNNING, n1=MemberState.SUCCEEDED)
    assert job.report.round == RoundId(1, 0, 1)
    assignments = [m for messages in job.sent.values() for m in messages if isinstance(m, StartRound)]
    assert [start.round for start in assignments] == [RoundId(1, 0, 1)] * 2
    job.send(0, WorkersFailed(RoundId(1, 0, 1), FAILURE))
    job.send(0, WorkersStopped(RoundId(1, 0, 1), 6000))
    job.send(1, WorkersStopped(RoundId(1, 0, 1), 6001))
    assert job.start_of(0).round == RoundId(1, 1, 1)


def test_a_replaced_member_that_still_runs_has_its_time_at_a_successor_too() -> None:
    before = job_of(0, 1)
    job = Job(before.state.settings, store=1, recovering=True)
    job.operator_view(*pods(0), *pods(1, incarnation=1, state=PodState.STARTING), target=2)
    job.announce(1, membership=membership_of(before.start_of(1)))
    assert job.finished(1) is None
    job.announce(1, incarnation=1)
    assert job.finished(1) is None
    job.announce(0, membership=membership_of(before.start_of(0)))
    assert all(isinstance(job.last(index), PlanEnd) for index in (0, 1))
    job.stopped(0, 1)
    assert job.members == ["j-0-0", "j-1-1"]


def test_a_missing_member_ends_a_restored_round() -> None:
    job = restarted(job_of(0, 1, 2), n0=MemberState.RUNNING, n1=MemberState.RUNNING)
    assert job.phase() is RoundPhase.RECOVERING
    job.operator_view(*pods(0, 1), target=2)
    assert job.phase() is RoundPhase.ENDING
    assert job.sent_end(0, 1)


def test_pods_on_a_lost_node_are_waited_for_as_long_as_a_reconnect_takes() -> None:
    expected = (*pods(0, 1), *pods(2, state=PodState.LOST))
    job = restarted(job_of(0, 1, 2))
    job.operator_view(*expected, target=3)
    job.advance(60)
    assert job.phase() is RoundPhase.RECOVERING
    before = job_of(0, 1, 2)
    for index in (0, 1):
        job.announce(index, membership=membership_of(before.start_of(index)))
    job.advance(LOST_TIMEOUT - 0.1)
    assert job.phase() is RoundPhase.RECOVERING
    job.advance(0.1)
    assert job.sent_end(0, 1)


def test_a_pod_on_a_lost_node_that_reconnects_in_time_stays_in_its_round() -> None:
    job = restarted(job_of(0, 1, 2), n0=MemberState.RUNNING, n1=MemberState.RUNNING)
    job.operator_view(*pods(0, 1), *pods(2, state=PodState.LOST), target=3)
    job.announce(2, membership=membership_of(job_of(0, 1, 2).start_of(2)))
    assert (job.phase(), job.report.round) == (RoundPhase.RUNNING, RoundId(1, 0, 1))


def test_recovery_ends_without_an_operator() -> None:
    job = restarted(job_of(0, 1, 2), n0=MemberState.RUNNING, n1=MemberState.RUNNING)
    job.advance(10)
    assert job.sent_end(0, 1)


def test_the_recovery_timeout_starts_with_the_first_announcement() -> None:
    before = job_of(0, 1)
    job = Job(before.state.settings, store=1, recovering=True)
    job.advance(60)
    job.announce(0, membership=membership_of(before.start_of(0)))
    job.advance(9)
    assert job.phase() is RoundPhase.RECOVERING
    job.announce(1, membership=membership_of(before.start_of(1)))
    assert (job.phase(), job.report.round, len(job.report.ended_rounds)) == (RoundPhase.RUNNING, RoundId(1, 0, 1), 0)


def test_messages_during_recovery_count() -> None:
    job = restarted(job_of(0, 1), n0=MemberState.RUNNING)
    job.send(0, WorkersSucceeded(RoundId(1, 0, 1)))
    job.announce(1, membership=membership_of(job_of(0, 1).start_of(1), MemberState.SUCCEEDED))
    assert job.report.outcome is Outcome.SUCCEEDED


def test_a_successor_starts_no_round_before_all_expected_nodes_have_announced_themselves() -> None:
    job = Job(SETTINGS, store=1, recovering=True)
    job.announce(0, 1, 2, 3)
    assert job.members == []
    job.operator_view(*pods(0, 1, 2, 3))
    assert len(job.members) == 4


@pytest.mark.parametrize("member_state", list(MemberState))
def test_a_successor_restores_the_round_or_starts_a_new_one(member_state: MemberState) -> None:
    job = restarted(job_of(0, 1), n0=MemberState.RUNNING, n1=member_state)
    job.operator_view(*pods(0, 1), target=2)
    if job.phase() is RoundPhase.ENDING:
        job.send(0, WorkersStopped(RoundId(1, 0, 1), 6000))
        job.send(1, WorkersStopped(RoundId(1, 0, 1), 6001))
    assert job.phase() is RoundPhase.RUNNING


def test_a_failure_while_the_store_was_down_is_the_cause_and_is_charged_once() -> None:
    before = job_of(0, 1)
    round_id = before.start_of(0).round
    job = restarted(before, n0=MemberState.RUNNING, n1=MemberState.FAILED)
    job.operator_view(*pods(0, 1), target=2)
    job.send(1, WorkersFailed(round_id, replace(FAILURE, pod="j-1-0")))
    assert job.sent_end(0)
    for index in (0, 1):
        job.send(index, WorkersStopped(round_id, 6000 + index))
    assert [(e.round, e.charged, e.failure and e.failure.pod) for e in job.report.ended_rounds] == [
        (round_id, True, "j-1-0")
    ]
    assert job.start_of(0).restarts == 1


def test_a_failure_of_a_round_that_has_stopped_is_charged_once() -> None:
    """The agents failed or stopped while no store ran, and announce that to the successor."""
    before = job_of(0, 1)
    round_id = before.start_of(0).round
    job = Job(before.state.settings, store=1, recovering=True)
    job.operator_view(*pods(0, 1), target=2)
    job.announce(1, membership=membership_of(before.start_of(1), MemberState.STOPPED))
    job.announce(0, membership=membership_of(before.start_of(0), MemberState.FAILED))
    job.send(0, WorkersFailed(round_id, FAILURE))
    for index in (0, 1):
        job.send(index, WorkersStopped(round_id, 6000 + index))
    assert [(e.round, e.charged, e.failure) for e in job.report.ended_rounds] == [(round_id, True, FAILURE)]
    assert job.start_of(0).restarts == 1


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("kind", [FailureClass.KILLED, FailureClass.COLLECTIVE_FAILED])
def test_a_failure_is_charged_though_all_nodes_report_its_end_at_once(kind: FailureClass, together: bool) -> None:
    """The store died, a rank failed, and all workers had stopped before the agents reached the successor."""
    before = job_of(0, 1)
    round_id, failure = before.start_of(0).round, replace(FAILURE, kind=kind)
    job = restarted(before)
    job.operator_view(*pods(0, 1), target=2)
    failed = membership_of(before.start_of(0), MemberState.FAILED)
    stopped = membership_of(before.start_of(1), MemberState.STOPPED)
    greetings: list[tuple[int, tuple[AgentToCoordinator, ...]]] = [
        (0, (announcement(0, failed), WorkersFailed(round_id, failure), WorkersStopped(round_id, 6000))),
        (1, (announcement(1, stopped), WorkersStopped(round_id, 6001))),
    ]
    events = [AgentMessage(agent_id(index), message) for index, messages in greetings for message in messages]
    if together:
        job.state = rounds.decide_together(job.state, events, job.now).state
    else:
        for event in events:
            job.decide(event)
    assert [(e.round, e.charged, e.failure) for e in job.report.ended_rounds] == [(round_id, True, failure)]
    assert job.state.charged == 1


def test_a_round_that_status_has_charged_is_not_charged_by_a_successor() -> None:
    before = job_of(0, 1)
    round_id = before.start_of(0).round
    job = restarted(before)
    job.operator_view(*pods(0, 1), target=2, charged=1, charged_round=round_id, max_restarts=1)
    job.announce(0, membership=membership_of(before.start_of(0), MemberState.FAILED))
    job.announce(1, membership=membership_of(before.start_of(1), MemberState.STOPPED))
    job.send(0, WorkersFailed(round_id, FAILURE))
    for index in (0, 1):
        job.send(index, WorkersStopped(round_id, 6000 + index))
    assert (job.report.outcome, job.state.charged, job.start_of(0).restarts) == (None, 1, 1)


def test_stopped_nodes_do_not_wait_for_a_node_that_is_not_ready() -> None:
    before = job_of(0, 1, 2)
    job = Job(before.state.settings, store=1, recovering=True)
    job.operator_view(*pods(0, 1), *pods(2, incarnation=1), target=3)
    for index in (0, 1):
        job.announce(index, membership=membership_of(before.start_of(index), MemberState.STOPPED))
    job.announce(2, incarnation=1, ready=False)
    assert job.start_of(0).world_size == 2


def test_a_failure_that_arrives_before_the_last_node_reconnects_is_the_cause() -> None:
    before = job_of(0, 1)
    job = restarted(before, n1=MemberState.FAILED)
    job.send(1, WorkersFailed(before.start_of(1).round, replace(FAILURE, pod="j-1-0")))
    job.announce(0, membership=membership_of(before.start_of(0)))
    assert job.sent_end(0, 1)
    for index in (0, 1):
        job.send(index, WorkersStopped(before.start_of(0).round, 6000 + index))
    assert [e.failure and e.failure.pod for e in job.report.ended_rounds] == ["j-1-0"]


def test_the_job_recovers_from_a_failure_after_two_store_losses() -> None:
    job = job_of(0, 1)
    round_id = job.start_of(0).round
    for store in (1, 2):
        successor = Job(job.state.settings, store=store, recovering=True)
        for index in (0, 1):
            successor.announce(index, membership=membership_of(job.start_of(index)))
        successor.operator_view(*pods(0, 1), target=2)
        assert successor.report.round == round_id
        job = successor
    job.fail(1)
    job.stopped(0, 1)
    assert job.start_of(0).round == RoundId(1, 2, 1)
    assert [(e.round, e.charged) for e in job.report.ended_rounds] == [(round_id, True)]


def recovered_without_a_round(before: Job) -> Job:
    """A successor whose recovery has ended: only agent 2, whose pod is new, had connected in time."""
    job = Job(before.state.settings, store=1, recovering=True)
    job.operator_view(*pods(0, 1), *pods(2, incarnation=1), target=3)
    job.operator_confirms = False
    job.announce(2, incarnation=1, ready=False)
    job.advance(RECOVERY_TIMEOUT)
    assert job.phase() is RoundPhase.GATHERING
    return job


def late_greetings(before: Job, failed: Failure) -> list[AgentMessage]:
    """What two agents send that reach the successor late: workers of the first have failed, and all have stopped."""
    round_id = before.start_of(0).round
    announced = (membership_of(before.start_of(0), MemberState.FAILED), membership_of(before.start_of(1)))
    messages: list[tuple[int, AgentToCoordinator]] = [
        (0, announcement(0, announced[0])),
        (0, WorkersFailed(round_id, failed)),
        (0, WorkersStopped(round_id, 6000)),
        (1, announcement(1, announced[1])),
        (1, WorkersStopped(round_id, 6001)),
    ]
    return [AgentMessage(agent_id(index), message) for index, message in messages]


@pytest.mark.parametrize("together", [True, False])
def test_a_failure_that_is_reported_after_recovery_is_charged(together: bool) -> None:
    """Two members reach the successor when its recovery has ended without a round. One of them has failed."""
    before = job_of(0, 1)
    job, events = recovered_without_a_round(before), late_greetings(before, FAILURE)
    if together:
        job.state = rounds.decide_together(job.state, events, job.now).state
    else:
        for event in events:
            job.decide(event)
    assert [(e.round, e.charged, e.failure) for e in job.report.ended_rounds] == [
        (before.start_of(0).round, True, FAILURE)
    ]
    assert job.state.charged == 1


def recovered_with_the_older_round(before: Job) -> Job:
    """Return a store that has recovered from agent 2 alone, which was lost before the newer round."""
    job = Job(before.state.settings, store=1, recovering=True)
    job.operator_view(*pods(0, 1, 2), target=3)
    job.announce(2, membership=membership_of(before.start_of(2)))
    job.advance(RECOVERY_TIMEOUT)
    return job


@pytest.mark.parametrize("has_stopped", [True, False], ids=["ended", "ends"])
def test_a_failure_in_a_newer_round_than_the_restored_one_is_charged(has_stopped: bool) -> None:
    """The older store went on with agents 0 and 1; agent 2, which it had lost, comes first."""
    before = job_of(0, 1, 2)
    older, newer = before.start_of(2), RoundId(1, 0, 2)
    job = recovered_with_the_older_round(before)
    assert job.sent_end(2)
    if has_stopped:
        job.send(2, WorkersStopped(older.round, 6002))
    starts = [replace(before.start_of(index), round=newer, group_world_size=2) for index in (0, 1)]
    job.announce(0, membership=membership_of(starts[0], MemberState.FAILED))
    job.send(0, WorkersFailed(newer, FAILURE))
    job.announce(1, membership=membership_of(starts[1]))
    for index in (0, 1):
        job.send(index, WorkersStopped(newer, 6000 + index))
    assert [(e.charged, e.failure) for e in job.report.ended_rounds if e.round == newer] == [(True, FAILURE)]
    assert job.members == ["j-0-0", "j-1-0", *(["j-2-0"] if has_stopped else [])]


def test_an_older_round_is_not_restored_again_if_the_newer_one_vanishes() -> None:
    before = job_of(0, 1, 2)
    older, newer = before.start_of(2), RoundId(1, 0, 2)
    job = recovered_with_the_older_round(before)
    job.send(2, WorkersStopped(older.round, 6002))
    job.announce(0, membership=membership_of(replace(before.start_of(0), round=newer)))
    job.disconnect(0)
    job.advance(RECOVERY_TIMEOUT)
    assert (job.phase(), len(job.report.ended_rounds)) == (RoundPhase.GATHERING, 1)


def test_a_failed_member_that_stays_alone_after_recovery_is_charged() -> None:
    before = job_of(0, 1)
    job = recovered_without_a_round(before)
    for event in late_greetings(before, FAILURE)[:3]:
        job.decide(event)
    assert job.phase() is RoundPhase.RECOVERING
    job.advance(RECOVERY_TIMEOUT)
    assert [(e.charged, e.failure) for e in job.report.ended_rounds] == [(True, FAILURE)]


def test_members_that_still_train_after_recovery_go_on() -> None:
    before = job_of(0, 1)
    job = recovered_without_a_round(before)
    for index in (0, 1):
        job.announce(index, membership=membership_of(before.start_of(index)))
    assert (job.phase(), job.report.round) == (RoundPhase.RUNNING, before.start_of(0).round)
    assert not job.report.ended_rounds


def test_a_success_that_is_reported_after_recovery_ends_the_job() -> None:
    before = job_of(0, 1)
    job = recovered_without_a_round(before)
    for index in (0, 1):
        job.announce(index, membership=membership_of(before.start_of(index), MemberState.SUCCEEDED))
    assert job.report.outcome is Outcome.SUCCEEDED


def test_a_confirmation_from_before_a_resumed_recovery_does_not_count() -> None:
    """The operator did not know of the round that the member announces."""
    before = job_of(0, 1)
    job = recovered_without_a_round(before)
    job.announce(1, incarnation=1)
    job.advance(job.state.settings.last_call_timeout)
    request = job.report.confirmation_request
    assert request
    job.decide(late_greetings(before, FAILURE)[0])
    assert (job.phase(), job.report.confirmation_request) == (RoundPhase.RECOVERING, 0)
    job.confirm(request)
    assert (job.members, job.state.confirmed_until) == ([], None)


def test_a_member_of_an_older_round_stops_once_the_store_has_started_its_own() -> None:
    before = job_of(0, 1)
    job = recovered_without_a_round(before)
    job.operator_confirms = True
    job.announce(1, incarnation=1)
    job.advance(job.state.settings.last_call_timeout)
    assert job.report.round == RoundId(1, 1, 1)
    job.announce(0, membership=membership_of(before.start_of(0)))
    assert job.sent_end(0)
    assert job.report.round == RoundId(1, 1, 1)


def test_a_store_that_paused_for_a_minute_goes_on_unchanged() -> None:
    job = job_of(0, 1)
    job.now += 60
    job.decide(Tick())
    assert (job.phase(), job.report.rounds, job.sent_end(0)) == (RoundPhase.RUNNING, 1, False)
    job.fail(1)
    job.now += 60
    job.stopped(0, 1)
    assert job.start_of(0).round == RoundId(1, 0, 2)


def test_succeeded_nodes_do_not_run_again_before_the_operator_has_sent_its_view() -> None:
    job = restarted(job_of(0, 1, 2), n1=MemberState.SUCCEEDED, n2=MemberState.SUCCEEDED)
    job.advance(60)
    assert job.phase() is RoundPhase.RECOVERING
    job.operator_view(finish=Finish(Outcome.SUCCEEDED, "AllAgentsSucceeded"))
    assert job.report.outcome is Outcome.SUCCEEDED
    assert [job.finished(index) for index in (1, 2)] == [Finish(Outcome.SUCCEEDED, "AllAgentsSucceeded")] * 2
    job = restarted(job_of(0, 1, 2), n1=MemberState.SUCCEEDED, n2=MemberState.SUCCEEDED)
    job.advance(60)
    job.operator_view(*pods(1, 2))
    assert job.sent_end(1, 2)


def test_if_one_success_is_enough_no_node_runs_again_before_the_operator_has_sent_its_view() -> None:
    """The explorer found it: agent 0 had received the success, and the store started again without memory."""
    before = job_of(0, 1, 2, success_policy=SuccessPolicy.ANY)
    job = restarted(before, n1=MemberState.RUNNING, n2=MemberState.RUNNING)
    job.advance(60)
    assert (job.phase(), job.sent_end(1)) == (RoundPhase.RECOVERING, False)
    job.operator_view(*pods(1, 2), success_policy=SuccessPolicy.ANY)
    assert job.sent_end(1, 2)


@pytest.mark.parametrize("finish", [Finish(Outcome.SUCCEEDED, "s"), Finish(Outcome.FAILED, "f", "why")])
def test_an_outcome_from_the_operator_is_final_for_a_store_that_did_not_declare_it(finish: Finish) -> None:
    job = job_of(0, 1)
    job.operator_view(finish=finish)
    assert (job.report.outcome, job.phase()) == (finish.outcome, RoundPhase.FINISHED)
    assert [job.finished(index) for index in (0, 1)] == [finish] * 2
    job.stopped(0, 1)
    job.operator_view(*pods(0, 1), target=2)
    job.advance(60)
    assert job.report.rounds == 1


# ---- without an operator


def test_without_an_operator_restarts_follow_the_last_settings_and_are_kept_until_acknowledged() -> None:
    job = job_of(0, 1, max_restarts=2)
    job.operator_confirms = False
    ended = []
    for _ in range(3):
        ended.append(job.start_of(1).round)
        job.fail(1)
        job.stopped(0, 1)
        if job.report.outcome is None:
            job.started(0, 1)
    assert [e.round for e in job.report.ended_rounds] == ended
    assert [e.charged for e in job.report.ended_rounds] == [True, True, False]
    assert (job.report.outcome, job.start_of(0).restarts) == (Outcome.FAILED, 2)
    job.advance(3600)
    assert len(job.report.ended_rounds) == 3
    job.operator_view(*pods(0, 1), charged=1, charged_round=ended[0])
    assert [e.round for e in job.report.ended_rounds] == ended[1:]
    job.operator_view(*pods(0, 1), charged=2, charged_round=ended[2])
    assert not job.report.ended_rounds


def test_ended_rounds_are_bounded_and_no_charge_is_forgotten() -> None:
    job = job_of(0, 1, max_restarts=10**6)
    for number in range(MAX_ENDED_ROUNDS + 50):
        job.fail(1, FailureClass.USER_ERROR)
        if number % 3 == 0:
            job.leave(1)  # the agent has left: its failure is not charged
        job.stopped(0, 1)
        if number % 3 == 0:
            job.announce(1)
        job.started(0, 1)
    charged = (MAX_ENDED_ROUNDS + 50) * 2 // 3
    assert len(job.report.ended_rounds) == MAX_ENDED_ROUNDS
    assert sum(e.charged for e in job.report.ended_rounds) == job.state.charged == charged
    for _ in range(300):
        job.fail(1)
        job.stopped(0, 1)
        job.started(0, 1)
    assert (len(job.report.ended_rounds), job.state.charged) == (MAX_ENDED_ROUNDS, charged + 300)

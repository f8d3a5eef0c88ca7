"""The rules of rounds, one by one. Numbers in calls of `Job` are the indices of agents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from elasticjob._runtime.contract.messages import (
    AgentToCoordinator,
    EndReason,
    EndRound,
    Failure,
    FailureClass,
    Finish,
    HangAction,
    LastMembership,
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
    WorkersStarted,
    WorkersStopped,
    WorkersSucceeded,
)
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.diagnosis import HANG_GRACE
from elasticjob._runtime.rendezvous.decision import RoundDecision
from elasticjob._runtime.rendezvous.observations.stalls import STALL_REPORT_SECONDS
from elasticjob._runtime.rendezvous.rounds import rounds
from elasticjob._runtime.rendezvous.state import (
    RECONNECT_GRACE,
    AgentDisconnected,
    AgentMessage,
    CoordinatorEvent,
    CoordinatorState,
)
from support.rendezvous.rounds import SETTINGS, Job, agent_id, announcement, job_of, membership_of, pods

FAILURE = Failure(FailureClass.KILLED, "j-0-0", 1.0)


# ---- a round starts


def test_a_round_starts_at_once_when_the_target_is_reached() -> None:
    job = Job()
    job.announce(0, 1, 2)
    assert job.phase() is RoundPhase.GATHERING
    job.announce(3)
    assert job.members == ["j-0-0", "j-1-0", "j-2-0", "j-3-0"]
    assert [job.start_of(index).rank for index in range(4)] == [0, 1, 2, 3]
    assert job.start_of(3).master_addr == "10.0.0.0"
    assert job.start_of(3).master_port == 5000


def test_with_an_operator_the_round_has_all_pods_that_it_expects_without_a_last_call() -> None:
    job = Job()
    job.operator_view(*pods(0, 1), *pods(2, state=PodState.STARTING), *pods(3, state=PodState.UNSCHEDULABLE))
    job.announce(0, 1)
    assert job.members == []
    job.announce(2)
    assert len(job.members) == 3


def test_a_pod_that_still_starts_is_waited_for_until_the_last_call_is_over() -> None:
    job = Job()
    job.operator_view(*pods(0, 1), *pods(2, state=PodState.STARTING))
    job.announce(0, 1)
    job.advance(SETTINGS.last_call_timeout - 1)
    assert job.members == []
    job.advance(1)
    assert len(job.members) == 2


def test_without_an_operator_the_last_call_decides() -> None:
    job = Job()
    job.announce(0, 1)
    job.advance(SETTINGS.last_call_timeout - 1)
    assert job.members == []
    job.advance(1)
    assert len(job.members) == 2


def test_falling_below_min_cancels_the_last_call() -> None:
    job = Job()
    job.announce(0, 1)
    job.advance(29)
    job.disconnect(1)
    job.advance(5)
    job.announce(1)
    job.advance(29)
    assert job.members == []
    job.advance(1)
    assert len(job.members) == 2


def test_the_first_round_does_not_wait_for_nodes_to_be_ready() -> None:
    job = Job()
    job.operator_view(*pods(0, 1), target=2)
    job.announce(0, 1, ready=False)
    assert len(job.members) == 2


def test_a_node_without_an_expected_pod_waits() -> None:
    job = Job()
    job.operator_view(*pods(0, 1), target=2)
    job.announce(2)
    assert isinstance(job.last(2), Standby)
    job.announce(0, 1)
    assert job.members == ["j-0-0", "j-1-0"]


def test_a_node_beyond_the_target_becomes_standby() -> None:
    job = job_of(0, 1, 2)
    job.announce(3)
    assert isinstance(job.last(3), Standby)
    assert len(job.members) == 3


def test_heterogeneous_nodes_get_consecutive_ranks() -> None:
    job = Job(RoundSettings(min_nodes=3, max_nodes=3, target=3))
    job.announce(0, workers=2)
    job.announce(1, workers=4)
    job.announce(2, workers=1)
    starts = [job.start_of(index) for index in range(3)]
    assert [(s.rank, s.role_rank, s.world_size, s.group_rank) for s in starts] == [
        (0, 0, 7, 0),
        (2, 2, 7, 1),
        (6, 6, 7, 2),
    ]


@pytest.mark.parametrize(
    ("reported", "known"),
    [([True, True], True), ([True, False], True), ([False, True], True), ([False, False], False)],
)
def test_a_round_without_any_training_state_says_so(reported: list[bool], known: bool) -> None:
    """An agent that has just announced itself, as the third one, has none."""
    job = job_of(0, 1)
    job.operator_view(*pods(0, 1, 2), target=3, scale_up_stabilization=600.0)
    job.announce(2)
    assert job.start_of(0).state_known, "there is nothing to be outdated in the first round"
    job.fail(1)
    for index, has_state in enumerate(reported):
        job.send(index, WorkersStopped(job.start_of(index).round, 5000, has_state=has_state))
    assert [job.start_of(index).state_known for index in range(3)] == [known] * 3


def job_between_rounds(*stopped: tuple[int, bool]) -> tuple[Job, RoundId]:
    """Return a job of two agents, of which the second one has failed, and the round that has ended.

    `stopped`: (index, whether it has a training state) of the agents that say that their workers have stopped.
    """
    job = job_of(0, 1)
    job.fail(1)
    ended = job.start_of(0).round
    for index, has_state in stopped:
        job.send(index, WorkersStopped(ended, 5000, has_state=has_state))
    return job, ended


def test_a_node_that_loses_its_state_while_it_waits_for_the_next_round_corrects_its_report() -> None:
    job, _ = job_between_rounds((0, True), (0, False), (1, False))
    assert not job.start_of(0).state_known


def test_a_state_that_is_lost_as_the_round_begins_ends_the_round() -> None:
    """The correction comes after the assignments: the scripts may have read something that is outdated."""
    job, round_id = job_between_rounds((0, True), (1, False))
    assert job.start_of(0).state_known
    job.send(0, WorkersStopped(round_id, 5000, has_state=False))
    assert job.sent_end(0, 1)
    for index in (0, 1):
        job.send(index, WorkersStopped(RoundId(1, 0, 2), 6000, has_state=False))
    assert job.start_of(0).round == RoundId(1, 0, 3)
    assert not job.start_of(0).state_known
    assert [(e.reason, e.charged) for e in job.report.ended_rounds] == [
        (EndReason.WORKER_FAILED, True),
        (EndReason.AGENT_LOST, False),
    ]


def test_a_state_that_another_member_has_too_is_not_lost() -> None:
    job = job_of(0, 1)
    job.fail(1)
    round_id = job.start_of(0).round
    for index in (0, 1, 0):
        job.send(index, WorkersStopped(round_id, 5000, has_state=job.start_of(0).round == round_id))
    assert not job.sent_end(0, 1)
    job.announce(0, 1)  # over new links: what is known of their states stays
    assert not job.sent_end(0, 1)


def test_a_state_that_is_lost_ends_the_round_although_its_last_workers_start_at_the_same_moment() -> None:
    job, first = job_between_rounds((0, True), (1, False))
    second = job.start_of(0).round
    lost = WorkersStopped(first, 5000, has_state=False)
    messages = ((1, WorkersStarted(second)), (0, lost), (0, WorkersStarted(second)))
    together = [AgentMessage(f"{index}.0", message) for index, message in messages]
    job.state = rounds.decide_together(job.state, together, job.now).state
    assert job.state.round is not None
    assert job.state.round.ending is not None


def test_a_round_has_formed_when_the_last_node_reports_success_before_its_start() -> None:
    job = Job(replace(SETTINGS, min_nodes=4, max_nodes=4, target=4))
    job.announce(0, 1, 2, 3)
    job.started(0, 1, 2)
    for index in (0, 3):
        assert not job.report.formed_at
        job.send(index, WorkersSucceeded(job.start_of(index).round))
    assert job.report.formed_at


# ---- a round ends


def test_a_failed_worker_ends_the_round_and_is_charged_once() -> None:
    job = job_of(0, 1)
    job.fail(1)
    assert job.sent_end(0, 1)
    job.stopped(0, 1)
    assert job.start_of(0).round == RoundId(1, 0, 2)
    assert job.start_of(0).restarts == 1
    (ended,) = job.report.ended_rounds
    assert (ended.reason, ended.charged, ended.failure and ended.failure.rank) == (EndReason.WORKER_FAILED, True, 1)


def test_a_failure_that_arrives_together_with_the_stop_counts() -> None:
    job = job_of(0, 1)
    start = job.start_of(1)
    messages = (WorkersFailed(start.round, replace(FAILURE, pod="j-1-0", rank=1)), WorkersStopped(start.round, 6001))
    job.state = rounds.decide_together(job.state, [AgentMessage("1.0", message) for message in messages], job.now).state
    assert job.state.round is not None
    assert job.state.round.ending is not None
    assert job.state.round.ending.reason is EndReason.WORKER_FAILED


@pytest.mark.parametrize("reconnects", [True, False])
def test_a_brief_disconnect_while_a_round_concludes_costs_no_second_round(reconnects: bool) -> None:
    job = job_of(0, 1, 2)
    job.fail(1)
    start = job.start_of(2)
    job.stopped(1, 2)
    job.disconnect(2)
    job.stopped(0)
    assert job.members == []
    if reconnects:
        job.announce(2, membership=membership_of(start, MemberState.STOPPED))
    job.advance(RECONNECT_GRACE)
    assert job.members == ["j-0-0", "j-1-0", "j-2-0"][: 2 + reconnects]
    assert job.report.rounds == 2


def test_a_round_with_a_spare_does_not_wait_for_a_disconnected_node() -> None:
    job = job_of(0, 1, 2, spares=1)
    job.operator_view(*pods(0, 1, 2, 3))
    job.announce(3)
    job.fail(1)
    job.stopped(1, 2)
    job.disconnect(2)
    job.stopped(0)
    assert job.members == ["j-0-0", "j-1-0", "j-3-0"]


def test_messages_to_a_link_that_was_lost_are_not_sent_on_the_next_one() -> None:
    job = job_of(0, 1)
    round_id = job.start_of(0).round
    job.fail(1)
    job.stopped(1)
    again = announcement(1, membership_of(job.start_of(1), MemberState.STOPPED))
    events: list[CoordinatorEvent] = [
        AgentMessage(agent_id(0), WorkersStopped(round_id, 6000)),
        AgentDisconnected(agent_id(1)),
        AgentMessage(agent_id(1), again),
    ]
    decision = rounds.decide_together(job.state, events, job.now)
    assert [type(e.message).__name__ for e in decision.effects if e.agent_id == agent_id(1)] == ["StartRound"]


def test_the_rules_run_a_few_times_for_any_number_of_events(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[float] = []
    apply_rules = rounds.apply_rules

    def counted(state: CoordinatorState, now: float) -> RoundDecision:
        runs.append(now)
        return apply_rules(state, now)

    monkeypatch.setattr(rounds, "apply_rules", counted)
    size = 300
    job = Job(RoundSettings(min_nodes=size, max_nodes=size, target=size))

    def together(*messages: Callable[[int], AgentToCoordinator]) -> bool:
        """Decide on the messages of all agents; return whether the rules ran only a few times."""
        events = [AgentMessage(agent_id(index), message(index)) for index in range(size) for message in messages]
        runs.clear()
        job.state = rounds.decide_together(job.state, events, job.now).state
        return len(runs) < 10

    assert together(announcement)
    assert job.state.round is not None
    number, members = job.state.round.id, job.state.round.members
    assert together(lambda index: WorkersStarted(number))
    failure = replace(FAILURE, kind=FailureClass.COLLECTIVE_FAILED)
    assert together(lambda index: WorkersFailed(number, failure), lambda index: WorkersStopped(number, index))
    (ended,) = job.state.ended_rounds
    assert (ended.charged, job.state.round.id.number) == (True, 2)

    job = Job(job.state.settings, store=1, recovering=True)
    failed = {name: LastMembership(m.assignment, MemberState.FAILED) for name, m in members.items()}
    assert together(
        lambda index: announcement(index, failed[agent_id(index)]),
        lambda index: WorkersFailed(number, failure),
        lambda index: WorkersStopped(number, index),
    )
    assert [e.charged for e in job.state.ended_rounds] == [True]


def test_the_next_round_waits_until_all_members_have_stopped() -> None:
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


@pytest.mark.parametrize("kind", [FailureClass.COLLECTIVE_FAILED, FailureClass.USER_ERROR])
def test_a_broken_collective_names_the_ranks_that_had_ended_before(kind: FailureClass) -> None:
    job = job_of(0, 1, 2)
    job.fail(0, kind)
    job.stopped(0)
    round_id = job.start_of(0).round
    job.send(2, WorkersStopped(round_id, 6002, ended_ranks=(2,)))
    job.send(1, WorkersStopped(round_id, 6001, ended_ranks=(1,)))
    (ended,) = job.report.ended_rounds
    assert ended.failure is not None
    if kind is FailureClass.USER_ERROR:
        assert (ended.failure.ended_ranks, ended.failure.message) == ((), "")
        return
    assert (ended.failure.rank, ended.failure.ended_ranks) == (0, (1, 2))
    assert ended.failure.message == (
        "ranks 1, 2 had already ended with success: all ranks must make the same number of steps"
    )
    assert ended.message == f"rank 0 in j-0-0 failed: ValueError: {ended.failure.message}"


def test_agents_get_the_sentence_of_the_condition_when_the_job_fails() -> None:
    job = job_of(0, 1, max_restarts=0)
    job.fail(1)
    job.stopped(0, 1)
    message = "workers failed after 0 of 0 restarts; last failure: rank 1 in j-1-0 failed: ValueError"
    assert job.finished(0) == Finish(Outcome.FAILED, "MaxRestartsExceeded", message)


@pytest.mark.parametrize(
    ("exception", "reason"), [("SeparateWorldError", "TrainsApart"), ("RefusedCommandError", "CommandRefused")]
)
def test_what_no_restart_can_mend_fails_the_job_at_once(exception: str, reason: str) -> None:
    job = job_of(0, 1)
    job.fail(1, exception=exception)
    job.stopped(0, 1)
    message = f"no restart can mend this: rank 1 in j-1-0 failed: {exception}"
    assert job.finished(0) == Finish(Outcome.FAILED, reason, message)


def test_a_lost_node_is_not_charged_though_collectives_broke_first() -> None:
    job = job_of(0, 1, 2)
    job.fail(0, FailureClass.COLLECTIVE_FAILED)
    job.disconnect(2)
    job.stopped(0, 1)
    job.advance(1)
    (ended,) = job.report.ended_rounds
    assert (ended.reason, ended.charged, ended.lost_pods) == (EndReason.AGENT_LOST, False, ("j-2-0",))
    assert job.members == ["j-0-0", "j-1-0"]
    assert job.report.lost_pods == ("j-2-0",)


def test_agents_that_end_with_the_job_are_not_lost() -> None:
    job = job_of(0, 1, max_restarts=0)
    job.fail(1)
    job.stopped(0, 1)
    job.disconnect(0)
    job.disconnect(1)
    job.advance(1000)
    assert (job.report.outcome, job.report.lost_pods) == (Outcome.FAILED, ())


def test_a_worker_that_died_with_its_node_is_not_charged() -> None:
    job = job_of(0, 1, 2)
    job.fail(2, FailureClass.KILLED)
    job.disconnect(2)
    job.stopped(0, 1)
    job.advance(1)
    assert not job.report.ended_rounds[0].charged


def test_a_short_disconnect_does_not_lose_the_node() -> None:
    job = job_of(0, 1)
    job.disconnect(1)
    job.advance(0.1)
    job.announce(1, membership=membership_of(job.start_of(1)))
    job.advance(5)
    assert job.phase() is RoundPhase.RUNNING
    assert job.report.rounds == 1


def test_an_announcement_makes_up_for_a_message_lost_with_the_link() -> None:
    job = job_of(0, 1)
    job.disconnect(1)
    job.announce(1, membership=membership_of(job.start_of(1), MemberState.SUCCEEDED))
    job.succeed(0)
    assert job.report.outcome is Outcome.SUCCEEDED


def test_an_assignment_that_did_not_arrive_is_sent_again() -> None:
    job = Job()
    job.operator_view(*pods(0, 1), target=2)
    job.announce(0, 1)
    job.disconnect(1)
    job.announce(1)
    assert [type(m) for m in job.sent["1.0"]].count(StartRound) == 2


def test_an_end_that_did_not_arrive_is_sent_again() -> None:
    job = job_of(0, 1)
    job.disconnect(1)
    job.fail(0)
    job.announce(1, membership=membership_of(job.start_of(1)))
    assert [type(m) for m in job.sent["1.0"]].count(EndRound) == 2
    job.stopped(0, 1)
    assert job.start_of(1).round.number == 2


def test_a_lost_node_that_reconnects_must_stop_before_it_may_join() -> None:
    job = job_of(0, 1, 2)
    job.disconnect(2)
    job.advance(1)
    job.stopped(0, 1)
    job.started(0, 1)
    old = job.start_of(2)
    job.announce(2, membership=membership_of(old))
    assert job.last(2) == EndRound(old.round, 1.0, "the job went on without this pod")
    assert job.report.rounds == 2
    job.stopped(2)
    job.stopped(0, 1)
    assert len(job.members) == 3


def test_messages_about_an_old_round_have_no_effect() -> None:
    job = job_of(0, 1)
    old = job.start_of(1).round
    job.fail(0)
    job.stopped(0, 1)
    job.started(0, 1)
    job.send(1, WorkersFailed(old, FAILURE))
    job.send(1, WorkersStopped(old, 7777))
    assert job.phase() is RoundPhase.RUNNING


def test_a_node_that_never_stops_counts_as_lost() -> None:
    job = job_of(0, 1, 2)
    job.fail(0)
    job.stopped(0, 1)
    job.advance(31.5)
    assert job.members == ["j-0-0", "j-1-0"]


def test_no_round_starts_below_min() -> None:
    job = job_of(0, 1)
    job.disconnect(1)
    job.advance(1)
    job.stopped(0)
    assert job.phase() is RoundPhase.GATHERING
    assert job.report.reason == "1 of at least 2 worker pods available"
    job.operator_view(*pods(0), *pods(1, incarnation=1, state=PodState.STARTING))
    job.announce(1, incarnation=1, ready=False)
    assert job.members == ["j-0-0", "j-1-1"]


# ---- agents leave, join, are replaced


def test_a_leaving_node_is_released_after_the_round_has_ended() -> None:
    job = job_of(0, 1, 2)
    job.leave(2)
    assert job.sent_end(0, 1, 2)
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


def test_an_unhealthy_node_leaves_uncharged_however_its_workers_failed() -> None:
    job = job_of(0, 1, 2)
    unhealthy = Failure(FailureClass.DEVICE_UNHEALTHY, "j-1-0", 1.0, message="GPU 0 is lost")
    job.fail(1)
    job.send(1, Leaving("DeviceUnhealthy: GPU 0 is lost", unhealthy))
    job.stopped(0, 1, 2)
    (ended,) = job.report.ended_rounds
    assert (ended.reason, ended.charged, ended.failure, ended.lost_pods) == (
        EndReason.NODE_LEFT,
        False,
        unhealthy,
        ("j-1-0",),
    )
    assert job.finished(1) is not None
    assert job.members == ["j-0-0", "j-2-0"]
    assert job.report.unhealthy == (unhealthy,)
    job.operator_view(*pods(0, 2), *pods(1, incarnation=1, state=PodState.STARTING))
    assert not job.report.unhealthy


def test_a_failure_that_arrives_after_a_broken_collective_is_still_the_cause() -> None:
    job = job_of(0, 1)
    job.fail(0, FailureClass.COLLECTIVE_FAILED)
    job.fail(1)
    job.stopped(0, 1)
    (ended,) = job.report.ended_rounds
    assert ended.failure is not None
    assert (ended.failure.pod, ended.failure.kind) == ("j-1-0", FailureClass.USER_ERROR)


def hang(job: Job, index: int, step: int, *, waiting: bool) -> None:
    start = job.start_of(index)
    failure = Failure(
        FailureClass.HANG, f"j-{index}-0", 1.0, rank=start.rank, message="m", step=step, waits_for_peers=waiting
    )
    job.send(index, WorkersFailed(start.round, failure))


def test_a_hang_ends_the_round_dumps_all_stacks_and_blames_the_worker_farthest_behind() -> None:
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


def test_a_hang_fails_the_job_with_the_action_fail_job() -> None:
    job = job_of(0, 1, hang_action=HangAction.FAIL_JOB)
    hang(job, 0, 7, waiting=False)
    job.stopped(0, 1)
    assert job.report.outcome is Outcome.FAILED
    assert job.report.failure is not None
    assert job.report.failure.kind is FailureClass.HANG
    assert job.state.outcome_reason == "FailurePolicyRule"  # as the operator's condition says


def stall(job: Job, index: int, step: int, *, waiting: bool = False) -> None:
    start = job.start_of(index)
    failure = Failure(
        FailureClass.HANG, f"j-{index}-0", job.now, rank=start.rank, message="m", step=step, waits_for_peers=waiting
    )
    job.send(index, WorkersStalled(start.round, failure))


def test_a_hang_is_reported_and_ends_nothing_with_the_action_event() -> None:
    job = job_of(0, 1, 2, hang_action=HangAction.EVENT)
    assert not job.start_of(0).hang_ends_round
    before = dict(job.sent)
    for index in (0, 1, 2):
        assert job.report.stall is None, "not before all nodes have reported their steps"
        stall(job, index, 7, waiting=index != 1)
    assert job.report.stall is not None
    assert job.report.stall.pod == "j-1-0"
    assert (job.sent, job.report.ended_rounds, job.phase()) == (before, (), RoundPhase.RUNNING)
    assert rounds.next_deadline(job.state, job.now) is None
    job.fail(0)
    job.stopped(0, 1, 2)
    job.started(0, 1, 2)
    assert job.report.stall is None, "the stall belongs to the ended round"


def test_a_stall_that_not_all_nodes_report_is_named_after_a_delay_and_so_is_the_next() -> None:
    job = job_of(0, 1, 2, hang_action=HangAction.EVENT)
    stall(job, 0, 7, waiting=True)
    first = job.state.round and job.state.round.stall_reports["0.0"]
    job.advance(STALL_REPORT_SECONDS)
    assert job.report.stall == first
    assert first is not None
    job.send(0, WorkersStalled(job.start_of(0).round, first))  # sent again after a reconnect
    assert rounds.next_deadline(job.state, job.now) is None
    job.advance(20)
    stall(job, 2, 9)
    stall(job, 0, 9, waiting=True)
    job.advance(STALL_REPORT_SECONDS)
    assert job.report.stall is not None
    assert (job.report.stall.pod, job.report.stall.step) == ("j-2-0", 9)


def test_the_progress_timeout_holds_from_the_next_round_on() -> None:
    job = job_of(0, 1)
    job.operator_view(*pods(0, 1), progress_timeout=30.0)
    assert job.start_of(0).progress_timeout == 0.0
    job.fail(1)
    job.stopped(0, 1)
    assert job.start_of(0).progress_timeout == 30.0


def test_the_report_counts_nodes_that_start_workers_by_exec_and_gives_the_first_reason() -> None:
    job = job_of(0, 1, 2)
    assert (job.report.fork_disabled_reason, job.report.fork_disabled_nodes) == ("", 0)
    for index in (1, 2):
        job.send(index, Ready(f"reason {index}"))
    assert (job.report.fork_disabled_reason, job.report.fork_disabled_nodes) == ("reason 1", 2)


def test_the_report_says_what_guards_the_workers_in_place_of_torchs_time_out() -> None:
    job = job_of(0, 1)
    assert job.report.hang_guard == ""
    job.send(0, Ready(hang_guard="ends after 600 s"))
    assert job.report.hang_guard == "ends after 600 s"
    job.send(0, Ready())
    assert job.report.hang_guard == ""


def test_a_draining_pod_leaves_before_its_agent_reports_it() -> None:
    job = job_of(0, 1, 2)
    job.operator_view(*pods(0, 1), *pods(2, state=PodState.DRAINING), target=3)
    assert job.sent_end(0, 1, 2)


@pytest.mark.parametrize("source", ["operator", "node"])
def test_a_node_beyond_the_target_that_leaves_is_scaling_down(source: str) -> None:
    job = job_of(0, 1, 2)
    draining = pods(2, state=PodState.DRAINING) if source == "operator" else pods(2)
    job.operator_view(*pods(0, 1), *draining, target=2)
    if source == "node":
        job.leave(2)
    job.stopped(0, 1, 2)
    assert job.report.ended_rounds[0].reason is EndReason.SCALING_DOWN
    assert job.members == ["j-0-0", "j-1-0"]


def test_of_a_round_that_is_too_large_any_member_that_leaves_is_scaling_down() -> None:
    """The operator lets an agent go that must leave its Node, and enlarges the spares for the higher index."""
    job = job_of(0, 1, 2)
    job.operator_view(*pods(0, 2), *pods(1, state=PodState.DRAINING), target=2, spares=1)
    job.stopped(0, 1, 2)
    ended = job.report.ended_rounds[0]
    assert (ended.reason, ended.lost_pods) == (EndReason.SCALING_DOWN, ())
    assert job.members == ["j-0-0", "j-2-0"]


def test_more_members_that_leave_than_the_round_can_do_without_are_no_scaling_down() -> None:
    job = job_of(0, 1, 2)
    job.operator_view(*pods(0), *pods(1, 2, state=PodState.DRAINING), target=2, spares=1)
    job.stopped(0, 1, 2)
    assert job.report.ended_rounds[0].reason is EndReason.NODE_LEFT


def test_waiting_nodes_join_only_when_ready_and_together() -> None:
    job = job_of(0, 1, target=4)
    job.operator_view(*pods(0, 1, 2), *pods(3, state=PodState.STARTING), target=4)
    job.announce(2, ready=True)
    job.announce(3, ready=False)
    job.advance(1)
    assert job.phase() is RoundPhase.RUNNING
    job.ready(3)
    assert job.phase() is RoundPhase.ENDING
    job.stopped(0, 1)
    assert job.members == ["j-0-0", "j-1-0", "j-2-0", "j-3-0"]
    assert job.report.ended_rounds[0].reason is EndReason.SCALING_UP
    assert (job.report.ended_rounds[0].charged, job.start_of(0).restarts) == (False, 0)


@pytest.mark.parametrize(("available", "size"), [(2, 2), (3, 2), (4, 4), (5, 4), (6, 6)])
def test_a_round_has_the_minimum_and_a_multiple_of_the_increment(available: int, size: int) -> None:
    job = Job(settings=RoundSettings(min_nodes=2, max_nodes=6, target=6, increment=2))
    job.announce(*range(available))
    job.advance(SETTINGS.last_call_timeout)
    assert len(job.members) == size


def test_a_node_joins_only_with_those_that_make_a_full_step() -> None:
    job = Job(settings=RoundSettings(min_nodes=2, max_nodes=6, target=6, increment=2))
    job.announce(0, 1)
    job.advance(SETTINGS.last_call_timeout)
    job.started(0, 1)
    job.announce(2)
    job.advance(60)
    assert job.phase() is RoundPhase.RUNNING
    job.announce(3, 4)
    job.advance(60)
    assert job.phase() is RoundPhase.ENDING
    assert "2 worker pods can join: j-2-0, j-3-0" in job.report.reason
    job.stopped(0, 1)
    assert job.members == ["j-0-0", "j-1-0", "j-2-0", "j-3-0"]


def test_after_a_loss_the_next_round_has_a_size_of_the_increments() -> None:
    job = Job(settings=RoundSettings(min_nodes=2, max_nodes=4, target=4, increment=2))
    job.announce(0, 1, 2, 3)
    job.started(0, 1, 2, 3)
    job.disconnect(3)
    job.advance(1)
    job.stopped(0, 1, 2)
    assert job.members == ["j-0-0", "j-1-0"]


def test_a_pod_that_does_not_start_delays_joining_nodes_by_the_window_at_most() -> None:
    job = job_of(0, 1, target=4)
    job.operator_view(*pods(0, 1, 2), *pods(3, state=PodState.STARTING), target=4)
    job.announce(2)
    job.advance(29)
    assert job.phase() is RoundPhase.RUNNING
    job.advance(1)
    assert job.phase() is RoundPhase.ENDING


def test_no_node_joins_once_a_member_has_succeeded() -> None:
    job = job_of(0, 1, target=3)
    job.succeed(0)
    job.announce(2)
    job.advance(60)
    assert job.phase() is RoundPhase.RUNNING


def test_a_lower_target_ends_the_round_once_and_drops_the_highest_indices() -> None:
    job = job_of(0, 1, 2, 3)
    job.operator_view(*pods(0, 1, 2, 3), target=2)
    job.stopped(0, 1, 2, 3)
    assert job.members == ["j-0-0", "j-1-0"]
    job.started(0, 1)
    job.leave(3)
    job.leave(2)
    assert job.report.rounds == 2
    assert job.finished(2) is not None


def test_nodes_that_stay_keep_their_ranks() -> None:
    job = job_of(0, 1, 2)
    job.disconnect(0)
    job.advance(1)
    job.stopped(1, 2)
    job.started(1, 2)
    assert job.members == ["j-1-0", "j-2-0"]
    job.operator_view(*pods(1, 2), *pods(0, incarnation=1), target=3)
    job.announce(0, incarnation=1)
    job.stopped(1, 2)
    assert job.members == ["j-1-0", "j-2-0", "j-0-1"]
    assert job.start_of(2).master_port == 6001


def test_an_older_pod_of_an_index_is_superseded() -> None:
    job = job_of(0, 1, 2)
    job.disconnect(2)
    job.advance(1)
    job.operator_view(*pods(0, 1), *pods(2, incarnation=1, state=PodState.STARTING), target=3)
    job.announce(2, membership=membership_of(job.start_of(2)))
    finish = job.finished(2)
    assert finish is not None
    assert finish.outcome is Outcome.SUPERSEDED


@pytest.mark.parametrize("view_is_late", [False, True])
def test_a_member_that_leaves_has_its_time_although_its_successor_has_connected(view_is_late: bool) -> None:
    job = job_of(0, 1)
    job.leave(1)
    job.operator_view(*pods(0), *pods(1, incarnation=0 if view_is_late else 1), target=2)
    job.announce(1, incarnation=1)
    job.stopped(0)
    assert (job.finished(1), job.phase()) == (None, RoundPhase.ENDING)
    job.stopped(1)
    finish = job.finished(1)
    assert finish is not None
    assert finish.outcome is Outcome.SUPERSEDED
    assert [(e.reason, e.lost_pods) for e in job.report.ended_rounds] == [(EndReason.NODE_LEFT, ("j-1-0",))]
    assert job.members == ["j-0-0", "j-1-1"]


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
    assert job.sent_end(0, 1)
    job.stopped(0, 1)
    assert job.start_of(0).round.number == 2


def test_the_job_fails_with_the_root_cause_when_max_restarts_is_exceeded() -> None:
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


def test_charges_that_status_contains_are_not_counted_twice() -> None:
    job = job_of(0, 1, max_restarts=2)
    job.fail(1)
    job.stopped(0, 1)
    job.started(0, 1)
    job.operator_view(*pods(0, 1), charged=1, charged_round=RoundId(1, 0, 1))
    assert job.report.ended_rounds == ()
    job.fail(1)
    job.stopped(0, 1)
    assert job.start_of(0).restarts == 2
    assert job.report.outcome is None


@pytest.mark.parametrize("when", ["before the round ends", "after it ended"])
def test_a_round_that_status_counts_for_one_of_its_pods_is_not_counted_twice(when: str) -> None:
    """A pod was killed with its agent, and its kubelet has reported that: the operator charged the round for it."""
    job, counted = job_of(0, 1, max_restarts=1), (RoundId(1, 0, 1),)
    if when == "before the round ends":
        job.operator_view(*pods(0, 1), charged=1, charged_rounds=counted)
    job.fail(1)
    job.stopped(0, 1)
    if when == "after it ended":
        job.operator_view(*pods(0, 1), charged=1, charged_rounds=counted)
    assert job.report.outcome is None, "the job failed after one restart of one"
    assert (job.state.charged, job.start_of(0).restarts) == (1, 1)
    job.started(0, 1)
    job.fail(0)
    job.stopped(0, 1)
    assert job.report.outcome is Outcome.FAILED


def test_a_node_that_announces_itself_after_the_end_gets_the_outcome() -> None:
    job = job_of(0, 1)
    job.succeed(0, 1)
    job.announce(2)
    finish = job.finished(2)
    assert finish is not None
    assert finish.outcome is Outcome.SUCCEEDED


def test_an_older_operator_view_is_dropped() -> None:
    job = job_of(0, 1, target=2)
    job.sequence = 0
    job.operator_view(*pods(0), target=3)
    assert job.state.settings.target == 2


# ---- the process-group store of a round


def test_a_leaving_node_is_released_only_when_all_members_have_stopped() -> None:
    job = job_of(0, 1, 2)
    job.leave(0)
    job.stopped(0)
    job.advance(5)
    job.stopped(1)
    assert job.finished(0) is None
    job.stopped(2)
    assert job.finished(0) is not None


def test_every_round_has_a_master_endpoint_of_its_own() -> None:
    job = job_of(0, 1)
    endpoints = [(job.start_of(0).master_addr, job.start_of(0).master_port)]
    for port in (7001, 7002):
        round_id = job.start_of(0).round
        job.fail(1)
        for index in (0, 1):
            job.send(index, WorkersStopped(round_id, port + index))
        job.started(0, 1)
        endpoints.append((job.start_of(0).master_addr, job.start_of(0).master_port))
    assert endpoints == [("10.0.0.0", 5000), ("10.0.0.0", 7001), ("10.0.0.0", 7002)]

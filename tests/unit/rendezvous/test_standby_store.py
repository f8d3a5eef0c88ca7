"""The standby store: when it takes over, which agents it waits for, and what it must not do before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticjob._runtime.contract.messages import (
    NO_STANDBY_STORE,
    Close,
    EndReason,
    EndRound,
    MemberState,
    OperatorView,
    PodState,
    QueryClosed,
    RoundPhase,
    StandbyStore,
    StartRound,
    StoreActive,
    WorkersFailed,
    WorkersStopped,
)
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.rendezvous import standby_store
from elasticjob._runtime.rendezvous.state import (
    RECONNECT_GRACE,
    RECOVERY_TIMEOUT,
    TAKEOVER_TIMEOUT,
    AgentDisconnected,
    AgentMessage,
    OperatorViewReceived,
    Tick,
    initial_state,
)
from support.rendezvous.rounds import SETTINGS, Job, agent_id, announcement, job_of, membership_of, pods

ADDRESS = StandbyStore(1, "10.0.0.9", 29400)


def view(*indices: int, sequence: int = 1, **fields: Any) -> OperatorView:
    """The operator's view of a job with these pods, whose store 0 serves."""
    settings = replace(SETTINGS, min_nodes=1, target=len(indices))
    return OperatorView(1, sequence, settings, 0, None, pods(*indices), serving=0, **fields)


def standby(*indices: int, restarted: bool = False, **fields: Any) -> Job:
    """A passive standby store that has received the operator's view."""
    job = Job(store=1)
    job.state = initial_state(SETTINGS, attempt=1, store=1, now=job.now, standby=True, restarted=restarted)
    job.sequence = 1
    job.decide(OperatorViewReceived(view(*indices, **fields)))
    return job


def come(job: Job, before: Job, *indices: int, state: MemberState = MemberState.RUNNING) -> None:
    """Agents of the running round connect to the standby store."""
    for index in indices:
        job.announce(index, membership=membership_of(before.start_of(index), state))


def receive(job: Job, sent: OperatorView) -> None:
    job.sequence += 1
    job.decide(OperatorViewReceived(replace(sent, sequence=job.sequence)))


def active(job: Job) -> bool:
    return job.phase() is not RoundPhase.STANDBY


@pytest.mark.parametrize(("size", "connected", "takes_over"), [
    (1, 0, False), (1, 1, True), (2, 1, False), (2, 2, True), (3, 1, False), (3, 2, True), (4, 2, False), (4, 3, True),
])  # fmt: skip
def test_a_standby_store_takes_over_with_more_than_half_of_the_newest_round(
    size: int, connected: int, takes_over: bool
) -> None:
    before, job = job_of(*range(size), min_nodes=1), standby(*range(size))
    come(job, before, *range(connected))
    assert active(job) is takes_over


def test_a_passive_store_gives_out_nothing_and_needs_no_timer() -> None:
    before, job = job_of(0, 1, 2, 3), standby(0, 1, 2, 3)
    come(job, before, 0, 1)
    job.advance(100.0)
    assert not any(job.sent.values())
    assert not active(job)


def test_members_must_be_connected_at_the_same_time() -> None:
    before, job = job_of(0, 1, 2), standby(0, 1, 2)
    come(job, before, 0)
    job.decide(AgentDisconnected(agent_id(0)))
    come(job, before, 1)
    assert not active(job)
    come(job, before, 0)
    assert active(job)


def test_only_the_newest_round_counts() -> None:
    older, job = job_of(0, 1, 2), standby(0, 1, 2)
    newer = job_of(0, 1, 2)
    newer.fail(0)
    newer.stopped(0, 1, 2)
    come(job, newer, 2)
    come(job, older, 0, 1)
    assert not active(job)


def test_a_round_older_than_the_newest_one_that_the_operator_knows_does_not_count() -> None:
    before, job = job_of(0, 1, 2), standby(0, 1, 2, newest_round=RoundId(1, 0, 2))
    come(job, before, 0, 1, 2)
    assert not active(job)


def test_without_an_operators_view_a_standby_store_stays_passive() -> None:
    before, job = job_of(0, 1, 2), Job(store=1)
    job.state = initial_state(SETTINGS, attempt=1, store=1, now=job.now, standby=True)
    come(job, before, 0, 1, 2)
    assert not active(job)


def test_a_restarted_standby_store_leaves_the_decision_to_the_operator() -> None:
    """It may have been active before: it must neither decide alone nor confirm that it never did."""
    before, job = job_of(0, 1, 2), standby(0, 1, 2, restarted=True)
    come(job, before, 0, 1, 2)
    receive(job, view(0, 1, 2, retired=True))
    assert not active(job)
    assert not job.report.retired
    receive(job, replace(view(0, 1, 2), serving=1))
    assert active(job)


def test_a_retired_standby_store_never_takes_over_and_reports_it() -> None:
    before, job = job_of(0, 1, 2), standby(0, 1, 2)
    receive(job, view(0, 1, 2, retired=True))
    come(job, before, 0, 1, 2)
    assert not active(job)
    assert job.report.retired


def test_a_store_that_has_taken_over_is_not_retired() -> None:
    before, job = job_of(0, 1, 2), standby(0, 1, 2)
    come(job, before, 0, 1)
    receive(job, view(0, 1, 2, retired=True))
    assert active(job)
    assert not job.report.retired


def test_if_all_members_come_the_round_is_restored() -> None:
    before, job = job_of(0, 1, 2), standby(0, 1, 2)
    come(job, before, 0, 1)
    job.advance(0.1)
    come(job, before, 2)
    assert job.phase() is RoundPhase.RUNNING
    assert [job.sent[agent_id(index)] for index in range(3)] == [
        [StoreActive(), before.start_of(0)], [StoreActive(), before.start_of(1)],
        [StoreActive(), before.start_of(2)],
    ]  # fmt: skip


@pytest.mark.parametrize(("beside", "seconds"), [(("j-2-0",), RECONNECT_GRACE), ((), TAKEOVER_TIMEOUT)])
def test_the_wait_for_missing_members_is_short_and_shorter_for_those_beside_the_old_store(
    beside: tuple[str, ...], seconds: float
) -> None:
    before, job = job_of(0, 1, 2), standby(0, 1, 2, beside_store=beside)
    come(job, before, 0, 1)
    job.advance(seconds - 0.01)
    assert job.phase() is RoundPhase.RECOVERING
    job.advance(0.02)
    assert isinstance(job.last(0), EndRound)
    for index in (0, 1):
        job.send(index, WorkersStopped(before.start_of(index).round, 1))
    assert job.members == ["j-0-0", "j-1-0"]
    assert job.start_of(0).round == RoundId(1, 1, 1)
    assert [(e.reason, e.charged) for e in job.report.ended_rounds] == [(EndReason.AGENT_LOST, False)]
    assert not job.report.confirmation_request


def test_if_the_machine_of_the_old_store_has_vanished_nodes_on_it_are_not_waited_for() -> None:
    before, job = job_of(0, 1, 2), standby(0, 1, 2, beside_store=("j-2-0",))
    for index in (0, 1):
        announce = replace(announcement(index, membership_of(before.start_of(index))), store_vanished=index == 1)
        job.decide(AgentMessage(announce.agent_id, announce))
    assert isinstance(job.last(0), EndRound)


def test_the_wait_goes_on_as_long_as_announcements_come() -> None:
    before, job = job_of(*range(4)), standby(*range(4), beside_store=("j-3-0",))
    job.state = replace(job.state, operator_view=replace(job.state.operator_view, beside_store=("j-2-0", "j-3-0")))
    come(job, before, 0, 1, 2)
    job.advance(RECONNECT_GRACE - 0.05)
    come(job, before, 3)
    assert job.phase() is RoundPhase.RUNNING


def test_a_store_that_status_names_takes_over_with_any_number_of_nodes() -> None:
    before, job = job_of(0, 1, min_nodes=1), standby(0, 1)
    come(job, before, 1)
    receive(job, replace(view(0, 1), serving=1, pods=(*pods(0, state=PodState.LOST), *pods(1))))
    assert active(job)
    job.advance(RECONNECT_GRACE + 0.01)
    assert isinstance(job.last(1), EndRound)
    job.send(1, WorkersStopped(before.start_of(1).round, 1))
    assert job.report.confirmation_request
    assert job.report.half_missing_round == before.start_of(1).round


def test_without_a_majority_the_usual_time_out_applies() -> None:
    before, job = job_of(0, 1, 2, 3), standby(0, 1, 2, 3)
    receive(job, replace(view(0, 1, 2, 3), serving=1))
    come(job, before, 0)
    job.advance(RECOVERY_TIMEOUT - 0.1)
    assert job.phase() is RoundPhase.RECOVERING


def test_nodes_learn_the_standby_store_when_they_announce_themselves_and_when_it_changes() -> None:
    job = job_of(0, 1)
    receive(job, view(0, 1, standby_store=ADDRESS))
    assert [job.last(index) for index in (0, 1)] == [ADDRESS, ADDRESS]
    receive(job, view(0, 1, standby_store=ADDRESS, newest_round=RoundId(1, 0, 1)))
    assert job.sent[agent_id(0)].count(ADDRESS) == 1
    job.disconnect(0)
    job.announce(0, membership=membership_of(job.start_of(0)))
    assert job.last(0) == ADDRESS
    receive(job, view(0, 1))
    assert job.last(1) == NO_STANDBY_STORE


def test_a_failure_that_a_standby_store_received_is_charged_after_the_takeover() -> None:
    before, job = job_of(0, 1, 2), standby(0, 1, 2)
    come(job, before, 0)
    before.fail(0)
    failure = before.state.round.failures[0] if before.state.round else None
    assert failure is not None
    job.send(0, WorkersFailed(before.start_of(0).round, failure))
    come(job, before, 1, 2)
    for index in range(3):
        job.send(index, WorkersStopped(before.start_of(index).round, 1))
    assert [(e.reason, e.charged) for e in job.report.ended_rounds] == [(EndReason.WORKER_FAILED, True)]
    assert isinstance(job.last(0), StartRound)


def test_a_confirmation_for_half_lapses_when_more_nodes_are_missing() -> None:
    job = job_of(0, 1, 2, 3, min_nodes=1)
    job.operator_confirms = False
    for index in (2, 3):
        job.disconnect(index)
    job.advance(RECONNECT_GRACE + 0.01)
    job.stopped(0)
    job.stopped(1)
    assert job.report.half_missing_round is not None
    job.disconnect(1)
    confirmed = view(0, 1, 2, 3, confirmed_request=job.report.confirmation_request, confirmed_half=True)
    receive(job, confirmed)
    job.advance(1.0)
    assert job.members == []
    assert job.report.half_missing_round is None
    receive(job, replace(confirmed, confirmed_half=False))
    assert job.members == ["j-0-0"]


def test_where_no_node_knows_the_newest_round_the_pods_that_may_write_are_unknown() -> None:
    before, job = job_of(0, 1, 2), standby(0, 1, 2, newest_round=RoundId(1, 0, 2))
    receive(job, replace(view(0, 1, 2), serving=1))
    come(job, before, 0, 1, 2, state=MemberState.STOPPED)
    assert job.report.confirmation_request
    assert (job.report.half_missing_round, job.report.pods_that_may_write) == (None, None)


@pytest.mark.parametrize("message", [QueryClosed(), Close("done")])
def test_a_passive_store_neither_closes_nor_answers_visitors(message: Close | QueryClosed) -> None:
    before, job = job_of(0, 1, 2), standby(0, 1, 2)
    come(job, before, 0)
    for sender in (agent_id(0), "visitor@10.0.0.7"):
        job.decide(AgentMessage(sender, message))
    assert not any(job.sent.values())
    assert not job.state.closed_reason


def test_a_confirmation_for_half_starts_the_round() -> None:
    job = job_of(0, 1, 2, 3)
    job.operator_confirms = False
    for index in (2, 3):
        job.disconnect(index)
    job.advance(RECONNECT_GRACE + 0.01)
    job.stopped(0, 1)
    request = job.report.confirmation_request
    receive(job, view(0, 1, 2, 3, confirmed_request=request, confirmed_half=True))
    job.decide(Tick())
    assert job.members == ["j-0-0", "j-1-0"]


# ---- a store that is to end


def may_end(job: Job) -> tuple[bool, bool]:
    """Return whether the store may end, and whether it may once no standby store has come in time."""
    early, late = (standby_store.may_end(job.state, without_standby=late) for late in (False, True))
    return early, late


def test_a_store_that_is_to_end_waits_for_a_standby_store() -> None:
    job = job_of(0, 1)
    assert may_end(job) == (False, True)
    receive(job, view(0, 1, standby_store=ADDRESS))
    assert may_end(job) == (True, True)


def test_a_store_that_is_to_end_concludes_a_round_that_ends() -> None:
    job = job_of(0, 1)
    job.leave(1)
    assert may_end(job) == (False, False)
    job.stopped(0, 1)
    job.announce(1, incarnation=1)
    assert job.phase() is RoundPhase.RUNNING  # its workers start
    assert may_end(job) == (False, False)
    job.started(0)
    job.started(1, incarnation=1)
    assert may_end(job) == (False, True)


def test_a_store_without_nodes_or_without_a_job_may_end_at_once() -> None:
    job = job_of(0, 1)
    job.disconnect(0)
    job.disconnect(1)
    assert may_end(job) == (True, True)
    ended = job_of(0, 1)
    ended.succeed(0, 1)
    assert may_end(ended) == (True, True)
    assert may_end(standby(0, 1)) == (True, True)

"""Two stores must never run two worlds: the operator's confirmation, and a store that a newer one closes."""

from __future__ import annotations

from dataclasses import replace

from elasticjob._runtime.contract.messages import (
    MemberState,
    PodState,
    RoundPhase,
    RoundSettings,
    Standby,
    WorkersStopped,
)
from elasticjob._runtime.rendezvous.rounds import rounds
from elasticjob._runtime.rendezvous.rounds.starts.confirmation import CONFIRMATION_SECONDS
from elasticjob._runtime.rendezvous.state import RECOVERY_TIMEOUT, STOP_TIMEOUT, NewerStoreSeen, OperatorViewReceived
from support.rendezvous.rounds import Job, membership_of, pods

SETTINGS = RoundSettings(min_nodes=1, max_nodes=4, target=4)


def halved(*, operator: bool = False) -> Job:
    """Two of four agents are lost, the others have stopped. The operator confirms nothing unless `operator`."""
    job = Job(SETTINGS)
    job.operator_view(*pods(0, 1, 2, 3))
    job.running(0, 1, 2, 3)
    job.operator_confirms = operator
    job.disconnect(2)
    job.disconnect(3)
    job.advance(0.3)
    job.stopped(0, 1)
    return job


def test_a_round_without_half_of_the_last_one_needs_confirmation() -> None:
    job = halved()
    assert job.phase() is RoundPhase.GATHERING
    assert job.report.confirmation_request > 0
    assert job.report.reason == "2 of 4 worker pods are missing; the operator must confirm that this is the only store"
    job.confirm()
    assert job.members == ["j-0-0", "j-1-0"]
    assert job.report.confirmation_request == 0


def test_a_connected_operator_confirms_at_once() -> None:
    assert halved(operator=True).members == ["j-0-0", "j-1-0"]


def test_a_round_with_most_of_the_last_one_needs_no_confirmation() -> None:
    job = Job(SETTINGS)
    job.operator_view(*pods(0, 1, 2, 3))
    job.running(0, 1, 2, 3)
    job.operator_confirms = False
    job.disconnect(3)
    job.advance(0.3)
    job.stopped(0, 1, 2)
    assert len(job.members) == 3


def test_a_node_that_reported_its_workers_stopped_is_not_missing() -> None:
    job = halved()
    old = job.start_of(2)
    job.announce(2, membership=membership_of(old))
    assert job.members == []
    job.stopped(2)
    assert job.members == ["j-0-0", "j-1-0", "j-2-0"]


def test_a_stopped_node_that_disconnects_counts_as_missing_again() -> None:
    """Another store may have started workers on it since."""
    job = halved()
    job.disconnect(1)
    assert job.state.last_round.missing == 3
    job.announce(1, membership=membership_of(job.start_of(1), MemberState.STOPPED))
    assert job.state.last_round.missing == 2


def test_a_round_whose_workers_never_all_started_is_not_the_last() -> None:
    """Its lost agents may not have received an assignment: another store may know the round before as the last one."""
    job = Job(RoundSettings(min_nodes=2, max_nodes=5, target=5))
    job.operator_view(*pods(0, 1, 2, 3, 4))
    job.running(0, 1, 2, 3, 4)
    job.operator_confirms = False
    for index in (3, 4):
        job.disconnect(index)
    job.advance(0.3)
    job.stopped(0, 1, 2)
    assert len(job.members) == 3
    job.started(0, 1)
    job.disconnect(2)
    job.advance(0.3)
    job.stopped(0, 1)
    assert job.members == []
    assert job.report.reason == "3 of 5 worker pods are missing; the operator must confirm that this is the only store"
    assert job.report.half_missing_round is None
    job.confirm()
    assert job.members == ["j-0-0", "j-1-0"]


def test_a_request_names_the_round_of_which_exactly_half_is_missing() -> None:
    job = halved()
    assert job.report.half_missing_round == job.start_of(0).round
    job.disconnect(1)
    assert job.report.half_missing_round is None


def test_nodes_that_were_released_are_not_missing() -> None:
    job = Job(SETTINGS)
    job.operator_view(*pods(0, 1, 2, 3))
    job.running(0, 1, 2, 3)
    job.operator_confirms = False
    job.leave(2)
    job.leave(3)
    job.stopped(0, 1, 2, 3)
    assert job.members == ["j-0-0", "j-1-0"]


def test_a_request_is_renewed_after_ten_seconds_and_an_older_answer_does_not_count() -> None:
    job = halved()
    first = job.report.confirmation_request
    job.advance(CONFIRMATION_SECONDS)
    assert job.report.confirmation_request == first + CONFIRMATION_SECONDS
    job.confirm(first)
    assert job.members == []
    job.confirm()
    assert len(job.members) == 2


def test_a_confirmation_that_expires_unused_is_requested_again() -> None:
    job = Job(RoundSettings(min_nodes=2, max_nodes=4, target=4))
    job.operator_view(*pods(0, 1, 2, 3))
    job.running(0, 1, 2, 3)
    job.operator_confirms = False
    for index in (2, 3):
        job.disconnect(index)
    job.advance(0.3)
    job.stopped(0, 1)
    first = job.report.confirmation_request
    job.disconnect(1)
    job.confirm(first)
    assert job.members == []
    job.advance(CONFIRMATION_SECONDS)
    job.announce(1)
    assert job.members == []
    assert job.report.confirmation_request > first
    job.confirm()
    assert len(job.members) == 2


def test_a_first_store_without_an_operator_needs_no_confirmation() -> None:
    job = Job(SETTINGS)
    job.announce(0, 1, 2, 3)
    job.started(0, 1, 2, 3)
    for index in (1, 2, 3):
        job.disconnect(index)
    job.advance(0.3)
    job.stopped(0)
    assert job.members == ["j-0-0"]


def test_a_successor_that_finds_nothing_needs_confirmation() -> None:
    job = Job(SETTINGS, store=1, recovering=True)
    job.announce(0, 1, 2, 3)
    job.advance(10)
    assert job.members == []
    assert job.report.confirmation_request > 0
    job.operator_view(*pods(0, 1, 2, 3))
    assert len(job.members) == 4


def test_a_new_node_after_recovery_says_nothing_about_earlier_rounds() -> None:
    """The agents of the last round may train with the older store."""
    job = Job(SETTINGS, store=1, recovering=True)
    job.operator_view(*pods(0, 1), target=2)
    job.operator_confirms = False
    job.announce(0)
    job.advance(RECOVERY_TIMEOUT)
    job.announce(1)
    assert job.members == []
    assert job.report.confirmation_request
    job.confirm()
    assert job.members == ["j-0-0", "j-1-0"]


def test_a_successor_whose_nodes_have_all_stopped_needs_no_confirmation() -> None:
    before = Job(SETTINGS)
    before.running(0, 1)
    job = Job(SETTINGS, store=1, recovering=True)
    for index in (0, 1):
        job.announce(index, membership=membership_of(before.start_of(index), MemberState.STOPPED))
    job.advance(40)
    assert len(job.members) == 2


def test_a_successor_that_finds_half_of_a_round_ends_it_and_requests_confirmation() -> None:
    before = Job(SETTINGS)
    before.running(0, 1, 2, 3)
    job = Job(SETTINGS, store=1, recovering=True)
    for index in (0, 1):
        job.announce(index, membership=membership_of(before.start_of(index)))
    job.advance(10)
    assert job.sent_end(0, 1)
    for index in (0, 1):
        job.send(index, WorkersStopped(before.start_of(index).round, 6000 + index))
    assert job.members == []
    assert job.report.reason.startswith("2 of 4 worker pods are missing")
    job.operator_view(*pods(0, 1, 2, 3))
    assert job.members == ["j-0-0", "j-1-0"]


def test_fresh_nodes_wait_while_a_store_recovers() -> None:
    job = Job(SETTINGS, store=1, recovering=True)
    job.operator_view(*pods(0, 1, state=PodState.RUNNING))
    job.announce(0)
    job.advance(9)
    assert job.phase() is RoundPhase.RECOVERING
    assert job.members == []
    assert not isinstance(job.last(0), Standby)


def test_a_store_closes_once_a_newer_one_was_seen() -> None:
    job = Job(SETTINGS)
    job.operator_view(*pods(0, 1), target=2)
    job.decide(NewerStoreSeen(0))
    assert job.state.newer_store is None
    job.decide(NewerStoreSeen(1))
    assert job.reasons[-1] == "store closed: store 1 has taken over"
    job.announce(0, 1)
    job.operator_view(*pods(0, 1), target=2)
    job.advance(60)
    assert job.members == []
    assert job.sent == {}
    assert rounds.next_deadline(job.state, job.now) is None


# ---- agents that may go on with the last round


def job_of_four() -> Job:
    """Four agents train."""
    job = Job(SETTINGS)
    job.operator_view(*pods(0, 1, 2, 3))
    job.running(0, 1, 2, 3)
    return job


def test_a_request_names_the_pods_that_may_write_if_more_than_half_is_missing() -> None:
    job = halved()
    assert not job.report.pods_that_may_write  # the missing half freezes its workers
    job.disconnect(1)
    assert job.report.pods_that_may_write == ("j-1-0", "j-2-0", "j-3-0")
    job.confirm()
    job.advance(0.3)
    assert job.members == ["j-0-0"]
    assert not job.report.pods_that_may_write


def test_a_successor_that_does_not_know_the_missing_nodes_says_so() -> None:
    start = job_of_four().start_of(0)
    job = Job(SETTINGS, store=1, recovering=True)
    job.announce(0, membership=membership_of(start))
    job.operator_view(*pods(0, 1, 2, 3))
    job.operator_confirms = False
    job.advance(RECOVERY_TIMEOUT)
    job.send(0, WorkersStopped(start.round, 6000))
    assert job.report.confirmation_request > 0
    assert job.report.pods_that_may_write is None


def test_a_node_that_does_not_stop_is_lost_and_may_write_until_it_has_stopped() -> None:
    """Its agent hangs: it does not freeze the workers."""
    job = job_of_four()
    job.operator_confirms = False
    job.fail(0)
    job.stopped(0, 1)
    assert job.report.lost_pods == ()
    job.advance(job.state.settings.stop_grace + STOP_TIMEOUT)
    assert job.report.reason.startswith("2 of 4 worker pods are missing")
    assert job.report.lost_pods == job.report.pods_that_may_write == ("j-2-0", "j-3-0")
    job.stopped(2)
    assert job.members == ["j-0-0", "j-1-0", "j-2-0"]
    assert job.report.lost_pods == ("j-3-0",)
    job.announce(3, membership=membership_of(job.start_of(3)))
    assert job.report.lost_pods == ()


def test_a_node_that_does_not_stop_may_write_although_its_pod_is_replaced() -> None:
    job = job_of_four()
    job.operator_confirms = False
    job.fail(0)
    job.stopped(0, 1)
    job.advance(job.state.settings.stop_grace + STOP_TIMEOUT)
    replaced = (*pods(0, 1, 3), *pods(2, incarnation=1))
    job.decide(OperatorViewReceived(replace(job.state.operator_view, sequence=99, pods=replaced)))
    assert job.report.pods_that_may_write == ("j-2-0", "j-3-0")
    job.announce(2, incarnation=1)
    assert job.report.pods_that_may_write == ("j-2-0", "j-3-0")


def test_a_message_about_an_older_round_from_a_node_that_may_run_a_newer_one_does_not_count() -> None:
    job = job_of_four()
    job.operator_confirms = False
    first = job.start_of(0).round
    job.fail(0)
    job.stopped(0, 1, 2, 3)
    job.started(0)
    job.fail(0)
    job.stopped(0)
    job.advance(job.state.settings.stop_grace + STOP_TIMEOUT)
    assert job.state.last_round.missing == 3
    job.send(1, WorkersStopped(first, 6001))
    assert job.state.last_round.missing == 3
    job.stopped(1, 2)
    assert job.members == ["j-0-0", "j-1-0", "j-2-0"]


def test_a_lost_node_that_connects_again_without_workers_is_not_missing() -> None:
    job = job_of_four()
    job.operator_confirms = False
    first = job.start_of(0)
    job.fail(0)
    job.stopped(0, 1, 2, 3)
    for index in (2, 3):
        job.disconnect(index)
    job.advance(0.3)
    job.announce(2, membership=membership_of(first, MemberState.STOPPED))
    job.announce(3)
    job.stopped(0, 1)
    assert job.members == ["j-0-0", "j-1-0", "j-2-0", "j-3-0"]


def test_a_message_about_an_older_round_than_the_one_that_the_node_announced_does_not_count() -> None:
    """The agent was in a later round of another store, which may go on with the other agents of that round."""
    older = job_of_four()
    first = older.start_of(0)
    older.fail(0)
    older.stopped(0, 1, 2, 3)
    job = Job(SETTINGS, store=1, recovering=True)
    job.announce(0, 1, membership=membership_of(first))
    job.operator_view(*pods(0, 1, 2, 3))
    job.operator_confirms = False
    job.advance(RECOVERY_TIMEOUT)
    for index in (0, 1):
        job.send(index, WorkersStopped(first.round, 6000))
    job.announce(2, membership=membership_of(older.start_of(2), MemberState.STOPPED))
    assert job.report.reason.startswith("2 of 4 worker pods are missing")
    job.send(2, WorkersStopped(first.round, 6000))
    assert job.report.reason.startswith("2 of 4 worker pods are missing")

"""Two stores at once must not make two worlds: the operator's word, and a store that closes itself."""

from __future__ import annotations

from elasticjob.contract.messages import MemberState, PodState, RoundPhase, RoundSettings, Standby, WorkersStopped
from elasticjob.rendezvous import rounds
from elasticjob.rendezvous.confirmation import CONFIRMATION_SECONDS
from elasticjob.rendezvous.state import NewerStoreSeen
from support.rounds import Job, member_of, pods

SETTINGS = RoundSettings(min_nodes=1, max_nodes=4, target=4)


def halved(*, operator: bool = False) -> Job:
    """Two of four nodes vanished, the others have stopped; the operator is away unless `operator`."""
    job = Job(SETTINGS)
    job.facts(*pods(0, 1, 2, 3))
    job.running(0, 1, 2, 3)
    job.operator = operator
    job.gone(2)
    job.gone(3)
    job.later(0.3)
    job.stopped(0, 1)
    return job


def test_a_round_that_drops_half_of_the_last_one_needs_the_word() -> None:
    job = halved()
    assert job.phase() is RoundPhase.GATHERING
    assert job.report.confirmation_request > 0
    assert job.report.reason == "2 of 4 nodes are missing: is there another store?"
    job.answer()
    assert job.members == ["j-0-0", "j-1-0"]
    assert job.report.confirmation_request == 0


def test_with_an_operator_at_hand_nobody_waits() -> None:
    assert halved(operator=True).members == ["j-0-0", "j-1-0"]


def test_a_round_that_drops_less_does_not_need_it() -> None:
    job = Job(SETTINGS)
    job.facts(*pods(0, 1, 2, 3))
    job.running(0, 1, 2, 3)
    job.operator = False
    job.gone(3)
    job.later(0.3)
    job.stopped(0, 1, 2)
    assert len(job.members) == 3


def test_who_said_that_it_stopped_is_not_missing() -> None:
    job = halved()
    old = job.start_of(2)
    job.announce(2, membership=member_of(old))
    assert job.members == []
    job.stopped(2)
    assert job.members == ["j-0-0", "j-1-0", "j-2-0"]


def test_who_stopped_and_went_away_is_missing_again() -> None:
    """Another store may have it run something by now."""
    job = halved()
    job.gone(1)
    assert job.state.last_round.missing == 3
    job.announce(1, membership=member_of(job.start_of(1), MemberState.STOPPED))
    assert job.state.last_round.missing == 2


def test_a_round_that_never_ran_whole_is_not_the_last() -> None:
    """Who vanished before it began may have heard nothing of it, and count for another store as one of the last."""
    job = Job(RoundSettings(min_nodes=2, max_nodes=5, target=5))
    job.facts(*pods(0, 1, 2, 3, 4))
    job.running(0, 1, 2, 3, 4)
    job.operator = False
    for index in (3, 4):
        job.gone(index)
    job.later(0.3)
    job.stopped(0, 1, 2)
    assert len(job.members) == 3
    job.started(0, 1)
    job.gone(2)
    job.later(0.3)
    job.stopped(0, 1)
    assert job.members == []
    assert job.report.reason == "3 of 5 nodes are missing: is there another store?"
    assert job.report.half_missing_round is None
    job.answer()
    assert job.members == ["j-0-0", "j-1-0"]


def test_a_question_says_of_which_round_just_half_is_missing() -> None:
    job = halved()
    assert job.report.half_missing_round == job.start_of(0).round
    job.gone(1)
    assert job.report.half_missing_round is None


def test_nodes_that_left_in_good_order_are_not_missing() -> None:
    job = Job(SETTINGS)
    job.facts(*pods(0, 1, 2, 3))
    job.running(0, 1, 2, 3)
    job.operator = False
    job.leave(2)
    job.leave(3)
    job.stopped(0, 1, 2, 3)
    assert job.members == ["j-0-0", "j-1-0"]


def test_the_word_holds_for_ten_seconds_after_the_asking_and_is_asked_for_again() -> None:
    job = halved()
    first = job.report.confirmation_request
    job.later(CONFIRMATION_SECONDS)
    assert job.report.confirmation_request == first + CONFIRMATION_SECONDS
    job.answer(first)
    assert job.members == []
    job.answer()
    assert len(job.members) == 2


def test_a_word_that_is_not_used_in_time_is_renewed() -> None:
    job = Job(RoundSettings(min_nodes=2, max_nodes=4, target=4))
    job.facts(*pods(0, 1, 2, 3))
    job.running(0, 1, 2, 3)
    job.operator = False
    for index in (2, 3):
        job.gone(index)
    job.later(0.3)
    job.stopped(0, 1)
    first = job.report.confirmation_request
    job.gone(1)
    job.answer(first)
    assert job.members == []
    job.later(CONFIRMATION_SECONDS)
    job.announce(1)
    assert job.members == []
    assert job.report.confirmation_request > first
    job.answer()
    assert len(job.members) == 2


def test_a_store_that_no_operator_ever_spoke_to_goes_without() -> None:
    job = Job(SETTINGS)
    job.announce(0, 1, 2, 3)
    job.started(0, 1, 2, 3)
    for index in (1, 2, 3):
        job.gone(index)
    job.later(0.3)
    job.stopped(0)
    assert job.members == ["j-0-0"]


def test_a_successor_that_finds_nothing_needs_the_word() -> None:
    job = Job(SETTINGS, store=1, recovering=True)
    job.announce(0, 1, 2, 3)
    job.later(10)
    assert job.members == []
    assert job.report.confirmation_request > 0
    job.facts(*pods(0, 1, 2, 3))
    assert len(job.members) == 4


def test_a_successor_whose_nodes_have_all_stopped_does_not() -> None:
    before = Job(SETTINGS)
    before.running(0, 1)
    job = Job(SETTINGS, store=1, recovering=True)
    for index in (0, 1):
        job.announce(index, membership=member_of(before.start_of(index), MemberState.STOPPED))
    job.later(40)
    assert len(job.members) == 2


def test_a_successor_that_finds_half_of_a_round_ends_it_and_asks() -> None:
    before = Job(SETTINGS)
    before.running(0, 1, 2, 3)
    job = Job(SETTINGS, store=1, recovering=True)
    for index in (0, 1):
        job.announce(index, membership=member_of(before.start_of(index)))
    job.later(10)
    assert job.told_to_end(0, 1)
    for index in (0, 1):
        job.say(index, WorkersStopped(before.start_of(index).round, 6000 + index))
    assert job.members == []
    assert job.report.reason.startswith("2 of 4 nodes are missing")
    job.facts(*pods(0, 1, 2, 3))
    assert job.members == ["j-0-0", "j-1-0"]


def test_fresh_nodes_wait_while_a_store_recovers() -> None:
    job = Job(SETTINGS, store=1, recovering=True)
    job.facts(*pods(0, 1, state=PodState.RUNNING))
    job.announce(0)
    job.later(9)
    assert job.phase() is RoundPhase.RECOVERING
    assert job.members == []
    assert not isinstance(job.last(0), Standby)


def test_a_store_that_hears_of_a_newer_one_closes_itself() -> None:
    job = Job(SETTINGS)
    job.facts(*pods(0, 1), target=2)
    job.decide(NewerStoreSeen(0))
    assert job.state.newer_store is None
    job.decide(NewerStoreSeen(1))
    assert job.reasons[-1] == "closed: store 1 has taken over"
    job.announce(0, 1)
    job.facts(*pods(0, 1), target=2)
    job.later(60)
    assert job.members == []
    assert job.told == {}
    assert rounds.next_deadline(job.state, job.now) is None

"""Which state wins at the start of a round, and who sends it: as a table. And the numbers that order states."""

from __future__ import annotations

import pytest

from elasticjob._runtime.contract.snapshot_format.commit_sequence import ROUND, CommitSequence
from elasticjob._runtime.contract.snapshot_format.state_block import BlockHeader
from elasticjob._runtime.contract.snapshot_format.state_sources import (
    NO_VERSION,
    AvailableStates,
    Source,
    Transfer,
    choose_transfer,
    equal_generators,
    lost_steps,
)


def block(sequence: int, step: int) -> BlockHeader:
    return BlockHeader(sequence, step, 100, 1000)


OLD, NEW = (1, 10), (2, 11)
NOTHING = AvailableStates()
LIVE, BEHIND, IN_MEMORY = AvailableStates(live=NEW), AvailableStates(live=OLD), AvailableStates(memory=block(*NEW))


@pytest.mark.parametrize(
    ("available", "transfer"),
    [
        pytest.param([NOTHING, NOTHING], None, id="no state"),
        pytest.param([AvailableStates(half_changed=True), NOTHING], None, id="no complete state"),
        pytest.param([LIVE, LIVE], Transfer(NEW, None, Source.MEMORY), id="all live: nothing is sent"),
        pytest.param([LIVE, IN_MEMORY], Transfer(NEW, None, Source.MEMORY), id="live or in memory"),
        pytest.param([BEHIND, LIVE], Transfer(NEW, 1, Source.LIVE, ((1, 0),), copies_first=True), id="one step apart"),
        pytest.param([NOTHING, LIVE], Transfer(NEW, 1, Source.LIVE, ((1, 0),), copies_first=True), id="a joiner"),
        pytest.param([LIVE, NOTHING, LIVE], Transfer(NEW, 0, Source.LIVE, ((0, 1),)), id="one that has it stays out"),
        pytest.param([LIVE, NOTHING, NOTHING], Transfer(NEW, 0, Source.LIVE, (), copies_first=True), id="broadcast"),
        pytest.param(
            [NOTHING, LIVE, IN_MEMORY], Transfer(NEW, 2, Source.MEMORY, ((2, 0),)), id="the copy in memory is ready"
        ),
        pytest.param(
            [AvailableStates(live=OLD, memory=block(*NEW)), BEHIND],
            Transfer(NEW, 0, Source.MEMORY, ((0, 1),)),
            id="newer in memory than live",
        ),
        pytest.param(
            [AvailableStates(live=OLD, file=block(*NEW)), AvailableStates(memory=block(*OLD))],
            Transfer(NEW, 0, Source.FILE, ((0, 1),)),
            id="newest in the file",
        ),
        pytest.param(
            [AvailableStates(file=block(*NEW)), AvailableStates(file=block(*NEW))],
            Transfer(NEW, 0, Source.FILE, ((0, 1),)),
            id="one rank reads the file for all",
        ),
        pytest.param(
            [AvailableStates(live=(3, 2)), AvailableStates(live=(2, 9))],
            Transfer((3, 2), 0, Source.LIVE, ((0, 1),), copies_first=True),
            id="a rollback wins",
        ),
        pytest.param(
            [AvailableStates(live=(0, 5)), AvailableStates(file=block(0, 1000))],
            Transfer((0, 1000), 1, Source.FILE, ((1, 0),)),
            id="a file of version 0.1.0",
        ),
    ],
)
def test_choose(available: list[AvailableStates], transfer: Transfer | None) -> None:
    assert choose_transfer(available) == transfer


@pytest.mark.parametrize(
    ("available", "pairs"),
    [
        pytest.param([LIVE, NOTHING, LIVE, NOTHING], ((0, 1), (2, 3)), id="two joiners, two senders"),
        pytest.param([LIVE, NOTHING, BEHIND], (), id="more receivers than senders: a broadcast"),
        pytest.param([IN_MEMORY, NOTHING, LIVE], ((0, 1),), id="copies in memory come first"),
        pytest.param(
            [AvailableStates(file=block(*NEW)), AvailableStates(file=block(*NEW)), NOTHING],
            (),
            id="one rank reads the file",
        ),
    ],
)
def test_each_rank_that_lacks_the_state_gets_a_sender_of_its_own(
    available: list[AvailableStates], pairs: tuple[tuple[int, int], ...]
) -> None:
    transfer = choose_transfer(available)
    assert transfer is not None
    assert transfer.pairs == pairs


def test_an_offer_is_exchanged_as_numbers() -> None:
    offer = AvailableStates((1, 2), block(3, 4), block(5, 6), True, 13, (7, 8), (9, 10, 11, 12))
    assert AvailableStates.parse(offer.numbers()) == offer


@pytest.mark.parametrize(
    ("reached", "lost"),
    [
        pytest.param([-1, -1], 0, id="no rank was interrupted inside a step"),
        pytest.param([6, -1], 0, id="another rank has the step"),
        pytest.param([7, 9], 3, id="no rank has it"),
    ],
)
def test_lost_steps(reached: list[int], lost: int) -> None:
    available = [AvailableStates(half_changed=step >= 0, reached=step) for step in reached]
    assert lost_steps(available, Transfer((5, 6), None, Source.MEMORY)) == lost


@pytest.mark.parametrize(
    ("digests", "result"),
    [
        pytest.param([(NEW, (5, 1)), (NEW, (5, 2)), (OLD, (6, 1))], [True, False], id="of this version only"),
        pytest.param([(NEW, (5, 1)), (OLD, (5, 1))], [None, None], id="one rank knows"),
        pytest.param([(OLD, (5, 1))], [None, None], id="no rank knows"),
        pytest.param([(NEW, (5, 0)), (NEW, (5, 0))], [True, None], id="a generator that is not used"),
    ],
)
def test_generators_are_equal_if_all_ranks_that_know_their_states_have_the_same(
    digests: list[tuple[tuple[int, int], tuple[int, ...]]], result: list[bool | None]
) -> None:
    assert (
        equal_generators([AvailableStates(random=version, digests=numbers) for version, numbers in digests], NEW)
        == result
    )


def test_every_step_and_commit_has_a_higher_number() -> None:
    sequence, numbers = CommitSequence(), []
    for _ in range(3):
        sequence.advance()
        numbers.append(sequence.number)
    assert numbers == [1, 2, 3]


def test_all_ranks_continue_from_the_adopted_state_with_the_same_numbers() -> None:
    ahead, behind = CommitSequence(), CommitSequence()
    for _ in range(7):
        ahead.advance()
    for rank in (ahead, behind):
        rank.adopt(7)
        assert rank.number == 7
        rank.advance()
    assert ahead.number == behind.number == ROUND


def test_a_rank_that_missed_the_start_of_a_round_has_lower_numbers_however_often_it_commits() -> None:
    cut_off, continued = CommitSequence(), CommitSequence()
    for rank in (cut_off, continued):
        rank.adopt(3 * ROUND + 5)
        rank.advance()
    for _ in range(1000):
        cut_off.advance()
    continued.adopt(continued.number)
    continued.advance()
    assert continued.number > cut_off.number


def test_no_version_is_lower_than_that_of_any_block() -> None:
    assert NO_VERSION < (0, 0)

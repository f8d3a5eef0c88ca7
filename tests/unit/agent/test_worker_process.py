"""The states of a worker's process: the table of transitions, and all that can happen to two processes of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

from elasticjob._runtime.agent.workers.processes.process_table import ProcessTable
from elasticjob._runtime.agent.workers.processes.worker_process import (
    FOR_NEXT_ROUND,
    IN_ROUND,
    INITIAL,
    REPORTS,
    SPARES,
    ImpossibleEventError,
    ProcessEvent,
    ProcessState,
    next_state,
)
from elasticjob._runtime.agent.workers.worker import Worker
from elasticjob._runtime.contract.names import RoundId

S, E = ProcessState, ProcessEvent

TRANSITIONS = {
    S.LOADING: {
        E.CALL: S.CALLED, E.JOIN_STOP: S.RUNNING, E.DISCARD: S.EXITING, E.KILL: S.KILLED, E.AT_FUNCTION: S.PARKED,
    },
    S.PARKED: {
        E.CALL: S.CALLED, E.JOIN_STOP: S.RETURNED, E.DISCARD: S.EXITING, E.KILL: S.KILLED,
        E.NOT_AT_FUNCTION: S.LOADING,
    },
    S.SPARE_LOADING: {
        E.TAKE_PLACE: S.LOADING, E.DISCARD: S.EXITING, E.KILL: S.KILLED, E.AT_FUNCTION: S.SPARE, E.EXITS: S.EXITING,
    },
    S.SPARE: {
        E.CALL: S.CALLED, E.TAKE_PLACE: S.PARKED, E.DISCARD: S.EXITING, E.KILL: S.KILLED,
        E.NOT_AT_FUNCTION: S.SPARE_LOADING, E.EXITS: S.EXITING,
    },
    S.CALLED: {E.START_OVER: S.RUNNING, E.ABANDON: S.ABANDONED},
    S.RUNNING: {
        E.INTERRUPT: S.INTERRUPTED, E.ABANDON: S.ABANDONED, E.AT_FUNCTION: S.RETURNED, E.EXITS: S.EXITING,
        E.HAND_OVER: S.ENDED,
    },
    S.RETURNED: {
        E.INTERRUPT: S.RETURNED, E.PARK: S.PARKED, E.ABANDON: S.ABANDONED, E.NOT_AT_FUNCTION: S.RUNNING,
        E.EXITS: S.EXITING,
    },
    S.INTERRUPTED: {
        E.GRACE_OVER: S.RUNNING, E.ABANDON: S.ABANDONED, E.AT_FUNCTION: S.RETURNED, E.EXITS: S.EXITING,
    },
    S.KILLED: {E.ABANDON: S.ABANDONED},
    S.EXITING: {E.ABANDON: S.ABANDONED},
    S.ABANDONED: {},
    S.ENDED: {},
}  # fmt: skip
"""Every transition to another state, but for REAPED."""


@pytest.mark.parametrize("state", S)
@pytest.mark.parametrize("event", E)
def test_every_event_in_every_state(state: ProcessState, event: ProcessEvent) -> None:
    expected = TRANSITIONS[state].get(event)
    if state is not S.ENDED:
        expected = S.ENDED if event is E.REAPED else expected or (state if event in REPORTS else None)
    if expected is not None:
        assert next_state(state, event) is expected
        return
    with pytest.raises(ImpossibleEventError, match=f"{event.value} in state {state.value}"):
        next_state(state, event)


def test_a_process_that_has_ended_does_nothing_any_more() -> None:
    for event in E:
        with pytest.raises(ImpossibleEventError):
            next_state(S.ENDED, event)


def test_whatever_a_process_reports_is_possible_until_it_is_reaped() -> None:
    """It may lie, and it may be killed at any time."""
    for state in set(S) - {S.ENDED}:
        for event in (*REPORTS, E.REAPED):
            next_state(state, event)


def test_a_process_that_runs_no_more_only_ends() -> None:
    for state in (S.KILLED, S.EXITING, S.ABANDONED):
        reached = {after for event in E if (after := possible(state, event)) is not None}
        assert reached <= {state, S.ABANDONED, S.ENDED}


def test_every_state_can_be_reached() -> None:
    reached = set(INITIAL)
    while more := {after for state in reached for event in E if (after := possible(state, event))} - reached:
        reached |= more
    assert reached == set(S)


def possible(state: ProcessState, event: ProcessEvent) -> ProcessState | None:
    try:
        return next_state(state, event)
    except ImpossibleEventError:
        return None


# ---- two processes of one rank, in any order of events -----------------------------------------------------------


def worker(local_rank: int = 0) -> Worker:
    return Worker(RoundId(1, 0, 1), local_rank, local_rank, "", "", cast(Any, ()), cast(Any, ()))


States = tuple[ProcessState | None, ProcessState | None]
Step = tuple[int, ProcessState | ProcessEvent]
"""A process id, and the state in which this process starts or what happens to it."""


def replay(steps: tuple[Step, ...]) -> ProcessTable:
    table = ProcessTable()
    for step in steps:
        take(table, step)
    return table


def take(table: ProcessTable, step: Step) -> None:
    pid, what = step
    if isinstance(what, ProcessEvent):
        table.apply(pid, what)
    else:
        table.add(pid, worker(), what)


def states_of(table: ProcessTable) -> States:
    return table.state(1), table.state(2)


def explored() -> Iterator[tuple[States, Step, States | None]]:
    """Yield all that can happen in each pair of states that two processes of one rank come to, from none of them on,
    and the states after it; None: it is refused."""
    histories: dict[States, tuple[Step, ...]] = {(None, None): ()}
    todo = list(histories)
    while todo:
        states = todo.pop(0)  # the shortest history first
        history = histories[states]
        for pid, state in enumerate(states, 1):
            for what in S if state is None else E:
                table = replay(history)
                try:
                    take(table, (pid, what))
                except ImpossibleEventError:
                    assert states_of(table) == states, "what is refused changes nothing"
                    yield states, (pid, what), None
                    continue
                after = states_of(table)
                yield states, (pid, what), after
                if after not in histories:
                    histories[after] = (*history, (pid, what))
                    todo.append(after)


STEPS = list(explored())


def test_a_rank_never_has_two_processes_in_a_round_or_two_for_the_next_one() -> None:
    for _, _, after in STEPS:
        for states in (IN_ROUND, FOR_NEXT_ROUND):
            assert after is None or sum(state in states for state in after) <= 1


def test_a_second_process_of_a_rank_is_refused_loudly() -> None:
    table = ProcessTable()
    table.add(1, worker(), S.RUNNING)
    with pytest.raises(ImpossibleEventError, match="a second process of local rank 0 would be running"):
        table.add(2, worker(), S.RUNNING)
    table.add(2, worker(), S.SPARE_LOADING)
    table.add(3, worker(1), S.RUNNING)
    with pytest.raises(ImpossibleEventError, match="process 3 starts"):
        table.add(3, worker(2), S.RUNNING)


def test_a_kill_in_any_state_is_possible_and_takes_the_process_out_of_the_table() -> None:
    """By another program, or the kernel's OOM killer: the agent sees that the process exits, or only reaps it."""
    for states, (pid, what), after in STEPS:
        if what is E.EXITS:
            assert after is not None, states
            assert after[pid - 1] in (states[pid - 1], S.EXITING)
        if what is E.REAPED:
            assert after is not None, states
            assert after[pid - 1] is None
    killed = {states[pid - 1] for states, (pid, what), _ in STEPS if what is E.REAPED}
    assert killed == set(S) - {S.ENDED}


def test_a_process_leaves_the_table_only_when_it_is_reaped_or_handed_over() -> None:
    for _, (pid, what), after in STEPS:
        assert after is None or (after[pid - 1] is None) == (what in (E.REAPED, E.HAND_OVER))


def test_an_event_of_one_process_leaves_the_other_as_it_is() -> None:
    for states, (pid, _), after in STEPS:
        assert after is None or after[2 - pid] == states[2 - pid]


def test_a_spare_process_beside_any_process_of_its_rank() -> None:
    beside = {states[0] for states, _, _ in STEPS if states[1] in SPARES}
    assert beside == {None, *S} - {S.ENDED}


def test_why_new_workers_wait_is_known_while_a_process_exits() -> None:
    table = ProcessTable()
    table.add(1, worker(), S.RUNNING)
    table.apply(1, E.EXITS, now=5.0)
    table.set_reason_to_wait(1, "it has /dev/nvidia0 open")
    table.apply(1, E.EXITS, now=6.0)
    exiting = table.get(1)
    assert exiting is not None
    assert (exiting.exiting_since, exiting.reason_to_wait) == (5.0, "it has /dev/nvidia0 open")
    table.apply(1, E.ABANDON)
    abandoned = table.get(1)
    assert abandoned is not None
    assert not abandoned.reason_to_wait

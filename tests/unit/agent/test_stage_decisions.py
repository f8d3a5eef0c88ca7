"""The agent's decisions about stages: a launcher whose ranks have ended waits until its stage is finished."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from elasticjob._runtime.agent.state_machine.decide import decide, greeting
from elasticjob._runtime.agent.state_machine.effects import Effect, EndLaunchers, LaunchWorkers, Log, Send, StopWorkers
from elasticjob._runtime.agent.state_machine.events import (
    AgentEvent,
    AllWorkersStopped,
    LauncherReady,
    Received,
    StageOver,
    StageStarted,
    WorkerEnded,
    WorkersHeld,
    WorkersLaunched,
)
from elasticjob._runtime.agent.state_machine.state import AgentState, Running
from elasticjob._runtime.agent.workers.pod_command.command_process import CommandProcess, CommandState
from elasticjob._runtime.agent.workers.pod_command.stage import FinishedStages, stage_of
from elasticjob._runtime.contract.messages import (
    Announce,
    EndRound,
    MemberState,
    PlanEnd,
    StageBegan,
    StageEnded,
    StageFinished,
    StartRound,
    StepReport,
    WorkersStarted,
    WorkersSucceeded,
)
from elasticjob._runtime.contract.names import RoundId

ME = Announce(0, 0, "agent_id", "job-0-0", "10.0.0.1", 1000, local_world_size=2)
R1, R2 = RoundId(1, 0, 1), RoundId(1, 0, 2)


def start(round_id: RoundId, finished: int = 0) -> StartRound:
    return StartRound(round_id, 0, 2, 0, 4, 0, 4, "10.0.0.1", 1000, 0, 3, finished_stages=finished)


def play(*events: AgentEvent, state: AgentState | None = None) -> tuple[AgentState, list[Effect]]:
    """Return the state after the events, and the effects of the last one without log lines."""
    state = state or AgentState(ME, stop_grace=1.0)
    effects: tuple[Effect, ...] = ()
    for event in events:
        state, effects = (decision := decide(state, event)).state, decision.effects
    return state, [effect for effect in effects if not isinstance(effect, Log)]


RUNNING, _ = play(LauncherReady(), Received(start(R1)), WorkersLaunched(R1))


def test_a_launcher_waits_until_its_stage_is_finished() -> None:
    state, effects = play(StageOver(R1, 1), state=RUNNING)
    assert effects == [Send(StageEnded(R1, 1))]
    assert isinstance(state.activity, Running)
    state, effects = play(Received(StageFinished(R1, 1)), state=state)
    assert effects == [EndLaunchers(1)]
    state, effects = play(StageOver(R1, 2), state=state)
    assert effects == [Send(StageEnded(R1, 2))]
    _, effects = play(WorkerEnded(R1, 0), WorkerEnded(R1, 1), state=state)
    assert effects == [Send(WorkersSucceeded(R1))]


def test_a_launcher_whose_stage_is_finished_ends_at_once() -> None:
    state, _ = play(Received(StageFinished(R1, 1)), state=RUNNING)  # with successPolicy Any others may be ahead
    _, effects = play(StageOver(R1, 1), state=state)
    assert effects == [EndLaunchers(1)]


def test_a_new_link_learns_what_has_ended_and_what_is_finished() -> None:
    state, _ = play(StageOver(R1, 1), Received(StageFinished(R1, 1)), StageOver(R1, 2), state=RUNNING)
    announce = greeting(state)[0]
    assert isinstance(announce, Announce)
    assert announce.membership is not None
    assert (announce.finished_stages, announce.membership.ended_stage) == (1, 2)
    assert announce.membership.state is MemberState.RUNNING


def test_a_round_names_the_finished_stages_and_begins_with_none_that_has_ended() -> None:
    state, _ = play(StageOver(R1, 1), Received(EndRound(R1, 1.0, "why")), AllWorkersStopped(1001), state=RUNNING)
    state, effects = play(Received(start(R2, finished=3)), state=state)
    assert effects[-1] == LaunchWorkers(start(R2, finished=3))
    assert (state.announcement.finished_stages, state.waits_for_stage) == (3, False)
    announce = greeting(state)[0]
    assert isinstance(announce, Announce)
    assert announce.membership is not None
    assert announce.membership.ended_stage == 0


def test_what_comes_for_another_round_or_in_a_stop_ends_no_launcher() -> None:
    assert play(StageOver(R2, 1), state=RUNNING)[1] == []
    state, effects = play(Received(StageFinished(R2, 1)), state=RUNNING)
    assert (effects, state.announcement.finished_stages) == ([], 1)  # the fact is kept
    stopping, _ = play(Received(EndRound(R1, 1.0, "why")), state=RUNNING)
    assert play(StageOver(R1, 1), state=stopping)[1] == []
    state, effects = play(Received(StageFinished(R1, 1)), state=stopping)
    assert (effects, state.announcement.finished_stages) == ([], 1)


@pytest.mark.parametrize("ended_first", [True, False])
def test_a_planned_end_does_not_wait_for_a_step_of_ranks_that_have_ended(ended_first: bool) -> None:
    over, last = StageOver(R1, 1), Received(EndRound(R1, 5.0, "why", planned=True, last_step=7))
    state, effects = play(Received(PlanEnd(R1, "why")), WorkersHeld(R1, 6), state=RUNNING)
    assert effects == [Send(StepReport(R1, 6))]
    _, effects = play(*((over, last) if ended_first else (last, over)), state=state)
    assert [effect for effect in effects if isinstance(effect, StopWorkers)] == [StopWorkers(1.0)]


def test_an_agent_that_starts_may_be_at_the_end_of_a_stage() -> None:
    state, _ = play(LauncherReady(), Received(start(R1)), StageOver(R1, 1))
    _, effects = play(WorkersLaunched(R1), state=state)
    assert effects == [Send(WorkersStarted(R1))]


@pytest.mark.parametrize(
    ("state", "launcher", "finished", "expected"),
    [
        (CommandState.WAITS, 1, 0, False),
        (CommandState.WAITS, 2, 1, False),
        (CommandState.WAITS, 1, 1, True),  # behind
        (CommandState.WAITS, 3, 1, True),  # ahead
        (CommandState.ENDED, 0, 1, False),
        (CommandState.OFF, 0, 1, False),
    ],
)
def test_which_command_starts_again(state: CommandState, launcher: int, finished: int, expected: bool) -> None:
    assert CommandProcess(state, stage=launcher).is_elsewhere(finished) is expected


async def test_a_launcher_after_one_that_was_killed_waits_for_the_other_pods() -> None:
    finished = FinishedStages()
    waits = asyncio.ensure_future(finished.until(2))
    await asyncio.sleep(0)
    finished.add(1)
    await asyncio.sleep(0)
    assert not waits.done()
    finished.add(2)
    await waits
    waits = asyncio.ensure_future(finished.until(3))
    await asyncio.sleep(0)
    finished.release()
    await waits


@pytest.mark.parametrize(
    ("name", "passed", "finished", "launchers", "expected"),
    [
        ("a.py 1", 0, 0, (), 1),
        ("b.py 1", 1, 1, ("a.py 1",), 2),
        ("a.py 1", 0, 1, ("a.py 1", "b.py 1"), 1),  # passes
        ("b.py 1", 1, 1, ("a.py 1", "b.py 1"), 2),
        ("b.py 1", 0, 1, ("a.py 1", "b.py 1"), 2),  # the command has skipped the first one by itself
        ("b.py 1", 0, 2, ("a.py 1", "b.py 1"), 2),
        ("c.py 1", 0, 2, ("a.py 1", "b.py 1"), 3),  # nobody has come to it before
        ("a.py 9", 0, 1, ("a.py 1",), 1),  # a date among its words
        ("t.py 2", 0, 1, ("t.py 1", "t.py 2"), 2),  # the same script with other words
        ("t.py 1", 0, 2, ("t.py 1", "t.py 1"), 1),  # the same line twice
        ("t.py 1", 1, 2, ("t.py 1", "t.py 1"), 2),
        ("a.py 1", 0, 1, (), 1),  # without names the number has to tell
    ],
)
def test_at_which_launcher_a_command_is(
    name: str, passed: int, finished: int, launchers: tuple[str, ...], expected: int
) -> None:
    assert stage_of(name, passed, finished, launchers) == expected


def test_what_a_launcher_runs_is_reported_and_kept() -> None:
    state, effects = play(StageStarted(R1, 1, "a.py 1"), state=RUNNING)
    assert effects == [Send(StageBegan(R1, 1, "a.py 1"))]
    state, _ = play(StageStarted(R1, 1, "a.py 2"), state=state)
    assert state.announcement.launchers == ("a.py 1",)
    state, _ = play(Received(EndRound(R1, 1.0, "why")), AllWorkersStopped(1001), state=state)
    again = replace(start(R2, finished=1), launchers=("a.py 1", "b.py 1"))
    assert play(Received(again), state=state)[0].announcement.launchers == ("a.py 1", "b.py 1")

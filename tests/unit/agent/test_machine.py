"""The agent's decisions: each test plays a sequence of events and checks the effects of each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticjob._runtime.agent.state_machine.decide import decide, greeting
from elasticjob._runtime.agent.state_machine.effects import (
    AdmitWorkers,
    BreakCollectivesOfWorkers,
    CheckHealth,
    DumpStacks,
    Effect,
    Exit,
    FreezeWorkers,
    HoldWorkers,
    LaunchWorkers,
    Log,
    PrestartWorkers,
    Send,
    SetNodeEnd,
    StartLeaveTimer,
    StopWorkers,
    StopWorkersAt,
)
from elasticjob._runtime.agent.state_machine.endings.leaving import FINISH_TIMEOUT, LAST_STEP_TIMEOUT
from elasticjob._runtime.agent.state_machine.events import (
    AgentEvent,
    AllResultsEnded,
    AllWorkersStopped,
    CutOff,
    FunctionCalled,
    HangGuardKnown,
    LastStepMissed,
    LauncherReady,
    LeaveTimedOut,
    LogConditionMet,
    NodeUnhealthy,
    ProgressTimedOut,
    Received,
    SignalReceived,
    StackReport,
    StateLost,
    StoreUnreachable,
    WorkerEnded,
    WorkersHeld,
    WorkersLaunched,
    WorkersPrestarted,
)
from elasticjob._runtime.agent.state_machine.state import (
    Activity,
    AgentPhase,
    AgentState,
    Leave,
    Running,
    Starting,
    Succeeded,
)
from elasticjob._runtime.contract.messages import (
    Announce,
    BreakRound,
    CoordinatorToAgent,
    EndRound,
    Failure,
    FailureClass,
    Finish,
    LastMembership,
    Leaving,
    MachineEnd,
    MemberState,
    NewProcesses,
    NodeResultsEnded,
    Outcome,
    PlanEnd,
    Ready,
    Standby,
    StartRound,
    StepReport,
    WorkersFailed,
    WorkersStalled,
    WorkersStarted,
    WorkersStopped,
    WorkersSucceeded,
)
from elasticjob._runtime.contract.names import PRESTART_ROUND, ExitCode, RoundId
from elasticjob._runtime.diagnosis import HANG_GRACE

ME = Announce(0, 0, "agent_id", "job-0-0", "10.0.0.1", 1000, local_world_size=2)
R1, R2 = RoundId(1, 0, 1), RoundId(1, 0, 2)


def start(round_id: RoundId) -> StartRound:
    return StartRound(round_id, 0, 2, 0, 4, 0, 4, "10.0.0.1", 1000, 0, 3)


START, AGAIN = start(R1), start(R2)
END = EndRound(R1, 0.5, "why")
FAILURE = Failure(FailureClass.USER_ERROR, "job-0-0", 1.0, rank=1, exit_code=1, exception="ValueError", message="bad")
BOOM = WorkerEnded(R1, 1, FAILURE)
DONE = (WorkerEnded(R1, 0), WorkerEnded(R1, 1))
PLAN, LAST = PlanEnd(R1, "why"), EndRound(R1, 0.5, "why", planned=True, last_step=7)
STOPPED_AS_PLANNED = (WorkerEnded(R1, 0, as_planned=True), WorkerEnded(R1, 1, as_planned=True))
SUCCEEDED = Finish(Outcome.SUCCEEDED, "AllAgentsSucceeded")


def play(*events: AgentEvent, state: AgentState | None = None) -> tuple[AgentState, list[list[Effect]]]:
    """Return the state after the events, and the effects of each event.

    Log lines, health checks and `AdmitWorkers` are left out.
    """
    state = state or AgentState(ME, stop_grace=1.0)
    effects: list[list[Effect]] = []
    for event in events:
        decision = decide(state, event)
        state = decision.state
        effects.append([e for e in decision.effects if not isinstance(e, (Log, CheckHealth, AdmitWorkers))])
    return state, effects


def running() -> AgentState:
    return play(LauncherReady(), Received(START), WorkersLaunched(R1))[0]


def last(*events: AgentEvent, state: AgentState | None = None) -> list[Effect]:
    return play(*events, state=state)[1][-1]


def exits(effects: list[Effect]) -> list[ExitCode]:
    return [e.code for e in effects if isinstance(e, Exit)]


def test_a_round_from_start_to_success() -> None:
    state, effects = play(
        LauncherReady(), Received(Standby("wait")), Received(START), WorkersLaunched(R1), *DONE, Received(SUCCEEDED)
    )
    assert effects[:6] == [
        [Send(Ready())], [], [LaunchWorkers(START)], [Send(WorkersStarted(R1))], [], [Send(WorkersSucceeded(R1))],
    ]  # fmt: skip
    assert exits(effects[6]) == [ExitCode.SUCCEEDED]
    assert state.phase is AgentPhase.FINISHED


def test_a_round_waits_for_the_imports() -> None:
    assert play(Received(START), LauncherReady())[1] == [[], [Send(Ready()), LaunchWorkers(START)]]
    waits = decide(AgentState(ME, stop_grace=1.0), Received(START)).effects[-1]
    # The health check takes its time too, and preload may be empty.
    assert waits == Log("workers start once the agent is ready")


def test_the_reason_for_exec_is_sent_at_once_and_on_every_new_link() -> None:
    state, effects = play(LauncherReady("bash is not Python"), state=AgentState(ME, stop_grace=1.0))
    assert effects == [[Send(Ready("bash is not Python"))]]
    assert greeting(state) == (replace(ME, ready=True, fork_disabled_reason="bash is not Python"),)
    # The fork server was lost at a launch: the workers run nevertheless.
    assert last(LauncherReady("it ended"), state=running()) == [Send(Ready("it ended"))]


def test_the_first_failure_is_sent_at_once_and_the_other_workers_are_stopped() -> None:
    other = WorkerEnded(R1, 0)
    state, effects = play(BOOM, other, AllWorkersStopped(1001), state=running())
    assert effects == [
        [Send(WorkersFailed(R1, FAILURE)), StopWorkers(1.0)],
        [],
        [Send(WorkersStopped(R1, 1001))],
    ]
    assert (state.phase, state.announcement.store_port) == (AgentPhase.IDLE, 1001)
    assert last(Received(AGAIN), state=state) == [LaunchWorkers(AGAIN)]


def test_an_ended_round_is_stopped_with_its_own_grace_and_another_may_follow() -> None:
    _, effects = play(Received(END), Received(END), AllWorkersStopped(1001), Received(AGAIN), state=running())
    assert effects == [[StopWorkers(0.5)], [], [Send(WorkersStopped(R1, 1001))], [LaunchWorkers(AGAIN)]]


def test_collectives_are_broken_once_the_coordinator_answers() -> None:
    _, effects = play(
        AllResultsEnded(R1), Received(END), AllResultsEnded(R1), Received(BreakRound(R1)), Received(BreakRound(R1)),
        state=running(),
    )  # fmt: skip
    assert effects == [[], [StopWorkers(0.5)], [Send(NodeResultsEnded(R1))], [BreakCollectivesOfWorkers()], []]


def test_a_node_that_waits_to_break_its_collectives_says_so_on_every_new_link() -> None:
    state, _ = play(Received(END), AllResultsEnded(R1), state=running())
    for waits, found in (True, state), (False, play(Received(BreakRound(R1)), state=state)[0]):
        announced = greeting(found)[0]
        assert isinstance(announced, Announce)
        assert announced.membership is not None
        assert announced.membership.results_ended is waits


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (BreakRound(R1, discard=True), StopWorkers(0.0, at_once=True, discard_state=True)),
        (Finish(Outcome.LEFT, "NodeLeft"), StopWorkers(0.0, at_once=True)),
    ],
)
def test_workers_that_wait_to_break_their_collectives_end_if_they_may_not(
    answer: CoordinatorToAgent, expected: StopWorkers
) -> None:
    state, _ = play(Received(END), AllResultsEnded(R1), state=running())
    assert last(Received(answer), state=state) == [expected]


def test_finished_workers_run_again_when_the_round_ends_otherwise() -> None:
    _, effects = play(*DONE, Received(END), AllWorkersStopped(1001), Received(AGAIN), state=running())
    assert effects[2:] == [[StopWorkers(0.5)], [Send(WorkersStopped(R1, 1001))], [LaunchWorkers(AGAIN)]]


def test_a_planned_end() -> None:
    _, effects = play(
        Received(PLAN),
        WorkersHeld(R1, 7),
        Received(LAST),
        *STOPPED_AS_PLANNED,
        AllWorkersStopped(1001),
        state=running(),
    )
    assert effects == [
        [HoldWorkers(R1)],
        [Send(StepReport(R1, 7))],
        [StopWorkersAt(R1, 7)],
        [],
        [StopWorkers(1.0)],
        [Send(WorkersStopped(R1, 1001))],
    ]


def test_a_repeated_plan_end_is_answered_until_the_last_step_is_known() -> None:
    assert play(Received(PLAN), WorkersHeld(R1, 7), Received(PLAN), state=running())[1][2] == [HoldWorkers(R1)]
    assert play(Received(LAST), Received(PLAN), Received(LAST), state=running())[1][1:] == [[], []]


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ((LauncherReady(), Received(START)), [Send(StepReport(R1, None))]),
        ((LauncherReady(), Received(START), WorkersLaunched(R1), *DONE), [HoldWorkers(R1)]),
        ((LauncherReady(), Received(START), WorkersLaunched(R1), Received(END)), [Send(StepReport(R1, None))]),
        (
            (LauncherReady(), Received(START), WorkersLaunched(R1), Received(END), AllWorkersStopped(1001)),
            [Send(WorkersStopped(R1, 1001))],
        ),
    ],
    ids=["starting", "succeeded", "stopping", "stopped"],
)
def test_the_answer_to_a_plan_end_by_phase(before: tuple[AgentEvent, ...], expected: list[Effect]) -> None:
    assert last(*before, Received(PLAN)) == expected


def test_workers_that_may_be_past_the_last_step_are_stopped() -> None:
    assert last(Received(PLAN), WorkersHeld(R1, 7), Received(LAST), LastStepMissed(R1), state=running()) == [
        StopWorkers(1.0)
    ]


def test_a_planned_end_that_fails_stops_the_workers_with_grace() -> None:
    assert last(Received(PLAN), WorkersHeld(R1, 7), Received(LAST), Received(END), state=running()) == [
        StopWorkers(0.5)
    ]


def test_a_failure_before_the_last_step_is_reported() -> None:
    effects = last(Received(PLAN), Received(LAST), WorkerEnded(R1, 0, as_planned=True), BOOM, state=running())
    assert effects == [Send(WorkersFailed(R1, FAILURE)), StopWorkers(1.0)]


def test_workers_done_before_the_last_step_have_succeeded() -> None:
    assert last(Received(PLAN), Received(LAST), *DONE, state=running()) == [Send(WorkersSucceeded(R1))]
    assert last(*DONE, Received(LAST), state=running()) == []


def test_a_node_with_workers_that_stopped_as_planned_has_not_succeeded() -> None:
    assert last(Received(LAST), STOPPED_AS_PLANNED[0], DONE[1], state=running()) == [StopWorkers(1.0)]


def test_a_leaving_node_waits_for_the_planned_end() -> None:
    _, effects = play(SignalReceived("SIGTERM"), Received(PLAN), LeaveTimedOut(), state=running())
    assert effects[1:] == [[HoldWorkers(R1)], []]


def test_a_round_that_ends_before_the_imports_are_done_never_starts() -> None:
    _, effects = play(Received(START), Received(END), LauncherReady(), AllWorkersStopped(1001))
    assert effects[1:] == [[StopWorkers(0.5)], [Send(Ready())], [Send(WorkersStopped(R1, 1001))]]


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (Received(START), []),
        (Received(start(RoundId(1, 0, 0))), []),
        (Received(EndRound(RoundId(1, 0, 0), 1.0, "old")), []),
        (Received(EndRound(R2, 1.0, "unknown round")), [Send(WorkersStopped(R2, 1000))]),
        (WorkersLaunched(R2), []),
        (WorkerEnded(R2, 0, FAILURE), []),
        (AllWorkersStopped(1001), []),
        (LeaveTimedOut(), []),
    ],
)
def test_messages_and_events_of_another_round_change_nothing(event: AgentEvent, expected: list[Effect]) -> None:
    before = replace(running(), end_announced=True)
    after, (effects,) = play(event, state=before)
    assert (after, effects) == (before, expected)


def test_an_end_of_a_round_already_stopped_is_answered_again() -> None:
    idle = play(Received(END), AllWorkersStopped(1001), state=running())[0]
    assert last(Received(END), state=idle) == [Send(WorkersStopped(R1, 1001))]


def test_a_newer_round_replaces_the_running_one() -> None:
    assert play(Received(AGAIN), AllWorkersStopped(1001), state=running())[1] == [
        [StopWorkers(1.0)],
        [LaunchWorkers(AGAIN)],
    ]


def test_a_round_that_ends_while_it_waits_for_an_older_one_to_stop_never_starts() -> None:
    end = EndRound(R2, 0.5, "why")
    _, effects = play(Received(AGAIN), Received(end), AllWorkersStopped(1001), state=running())
    assert effects[1:] == [[Send(WorkersStopped(R2, 1000))], [Send(WorkersStopped(R1, 1001))]]


def test_an_agent_that_is_about_to_exit_starts_no_round() -> None:
    """The coordinator assigned the round before it read that the agent leaves."""
    idle = play(Received(END), AllWorkersStopped(1001, parked=True), state=running())[0]
    events = (SignalReceived("SIGTERM"), LeaveTimedOut(), Received(AGAIN), AllWorkersStopped(1001))
    assert exits(last(*events, state=idle)) == [ExitCode.LEFT]


def test_the_announced_end_of_the_machine_is_for_the_workers_and_ends_nothing() -> None:
    before = running()
    after, effects = play(Received(MachineEnd(93.0)), Received(MachineEnd(None)), state=before)
    assert (after, effects) == (before, [[SetNodeEnd(93.0)], [SetNodeEnd(None)]])


def test_leaving_as_a_member() -> None:
    left = Finish(Outcome.LEFT, "NodeLeft")
    _, effects = play(
        SignalReceived("SIGTERM"), Received(END), AllWorkersStopped(1001), Received(left), state=running()
    )
    assert effects[:3] == [
        [Send(Leaving("SIGTERM")), StartLeaveTimer(1.0)],
        [StopWorkers(0.5, for_good=True)],
        [Send(WorkersStopped(R1, 1001)), StartLeaveTimer(FINISH_TIMEOUT)],
    ]
    assert exits(effects[3]) == [ExitCode.LEFT]


def test_leaving_without_an_answer() -> None:
    _, effects = play(SignalReceived("SIGTERM"), LeaveTimedOut(), AllWorkersStopped(1001), state=running())
    assert effects[1] == [StopWorkers(1.0, for_good=True)]
    assert effects[2][0] == Send(WorkersStopped(R1, 1001))
    assert exits(effects[2]) == [ExitCode.LEFT]


def test_leaving_while_idle_and_alone() -> None:
    assert exits(last(SignalReceived("SIGTERM"), LeaveTimedOut())) == [ExitCode.LEFT]


def test_a_second_signal_kills_at_once() -> None:
    _, effects = play(SignalReceived("SIGTERM"), SignalReceived("SIGTERM"), AllWorkersStopped(1001), state=running())
    assert effects[1] == [StopWorkers(0.0, at_once=True)]
    assert exits(effects[2]) == [ExitCode.LEFT]


@pytest.mark.parametrize(
    ("finish", "code"),
    [
        (Finish(Outcome.FAILED, "MaxRestartsExceeded"), ExitCode.FAILED),
        (Finish(Outcome.SUPERSEDED, "Superseded"), ExitCode.SUPERSEDED),
        (Finish(Outcome.ERROR, "StoreUnreachable"), ExitCode.UNAVAILABLE),
        (Finish(Outcome.ERROR, "other"), ExitCode.INTERNAL),
    ],
)
def test_a_finish_stops_what_runs_before_the_exit(finish: Finish, code: ExitCode) -> None:
    _, effects = play(Received(finish), AllWorkersStopped(1001), Received(AGAIN), state=running())
    assert effects[0] == [StopWorkers(1.0, for_good=True)]
    assert exits(effects[1]) == [code]
    assert effects[2] == []


def test_the_termination_message_names_round_and_failure_but_for_success() -> None:
    def termination(finish: Finish, state: AgentState) -> object:
        (exit_,) = (e for e in last(Received(finish), state=state) if isinstance(e, Exit))
        return (exit_.termination.outcome, exit_.termination.round, exit_.termination.failure)

    failed = play(BOOM, AllWorkersStopped(1001), state=running())[0]
    succeeded = play(*DONE, state=running())[0]
    assert termination(Finish(Outcome.FAILED, "x"), failed) == (Outcome.FAILED, R1, FAILURE)
    assert termination(SUCCEEDED, succeeded) == (Outcome.SUCCEEDED, R1, None)


def test_no_store_within_the_join_timeout() -> None:
    assert exits(last(StoreUnreachable("refused"))) == [ExitCode.UNAVAILABLE]


@pytest.mark.parametrize(
    ("events", "member", "messages"),
    [
        ((), MemberState.RUNNING, ()),
        ((BOOM,), MemberState.FAILED, (WorkersFailed(R1, FAILURE),)),
        ((BOOM, AllWorkersStopped(1001)), MemberState.FAILED, (WorkersFailed(R1, FAILURE), WorkersStopped(R1, 1001))),
        ((Received(EndRound(R1, 1.0, "x")), AllWorkersStopped(1001)), MemberState.STOPPED, (WorkersStopped(R1, 1001),)),
        ((SignalReceived("SIGTERM"),), MemberState.RUNNING, (Leaving("SIGTERM"),)),
    ],
)
def test_a_greeting_repeats_what_a_broken_link_may_have_lost(
    events: tuple[AgentEvent, ...], member: MemberState, messages: tuple[object, ...]
) -> None:
    state = play(*events, state=running())[0]
    announce, *rest = greeting(state)
    assert tuple(rest) == messages
    assert announce == replace(state.announcement, ready=True, membership=LastMembership(START, member))


def test_the_announced_state_follows_the_round() -> None:
    states = [
        play(*events, state=running())[0].member for events in ((), DONE, (BOOM,), (BOOM, AllWorkersStopped(1001)))
    ]
    assert states == [MemberState.RUNNING, MemberState.SUCCEEDED, MemberState.FAILED, MemberState.STOPPED]
    assert greeting(AgentState(ME, 1.0)) == (ME,)


def test_a_stopping_node_does_not_announce_stopped_workers() -> None:
    state, _ = play(LauncherReady(), Received(START), WorkersLaunched(R1), Received(END))
    first = greeting(state)[0]
    assert isinstance(first, Announce)
    assert first.membership == LastMembership(START, MemberState.RUNNING)


# ---- states that cannot be built -------------------------------------------------------------------------------------


@pytest.mark.parametrize("activity", [Starting(), Running(), Succeeded()])
def test_workers_run_only_in_a_round(activity: Activity) -> None:
    with pytest.raises(ValueError, match="an agent without a round cannot be"):
        AgentState(ME, stop_grace=1.0, activity=activity)


def test_a_node_does_not_leave_without_a_reason() -> None:
    with pytest.raises(ValueError, match="one of them is needed"):
        Leave()


# ---- the time from SIGTERM to SIGKILL --------------------------------------------------------------------------------

PLANNED_END = EndRound(R1, 20.0, "why", planned=True)
LONG_LAST = replace(PLANNED_END, last_step=7)
TERM = SignalReceived("SIGTERM")


def graceful(*events: AgentEvent) -> AgentState:
    """Return the state after these events of a node whose workers run, with 20 s for a planned end and 1 s else."""
    return play(*events, state=replace(running(), graceful_shutdown=20.0))[0]


def grace(*events: AgentEvent) -> float | None:
    """Return the grace period of the stop that the last event begins or shortens; None without one."""
    return next((e.grace for e in last(events[-1], state=graceful(*events[:-1])) if isinstance(e, StopWorkers)), None)


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ((Received(PLANNED_END),), 20.0),
        ((TERM, Received(PLANNED_END)), 20.0),
        ((TERM, LeaveTimedOut()), 20.0),
        ((Received(PLAN), WorkersHeld(R1, 7), Received(LONG_LAST), LastStepMissed(R1)), 20.0),
        ((BOOM,), 1.0),
        ((TERM, BOOM), 1.0),
        ((ProgressTimedOut(R1),), HANG_GRACE),
        ((Received(END),), 0.5),
        ((Received(AGAIN),), 1.0),
        ((Received(Finish(Outcome.SUPERSEDED, "Superseded")),), 1.0),
    ],
    ids=["planned end", "leaving", "no coordinator", "last step missed", "failure here", "failure while leaving",
         "hang", "failure elsewhere", "newer round", "superseded"],
)  # fmt: skip
def test_planned_ends_have_the_graceful_time_and_failures_have_the_stop_grace(
    events: tuple[AgentEvent, ...], expected: float
) -> None:
    assert grace(*events) == expected


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (Received(PLANNED_END), None),
        (Received(END), 0.5),
        (Received(AGAIN), 1.0),
        (Received(Finish(Outcome.SUPERSEDED, "Superseded")), 1.0),
        (CutOff(), 0.0),
        (TERM, None),
        (LeaveTimedOut(), None),
        (WorkerEnded(R1, 0), None),
    ],
    ids=["repeated", "stale round", "newer round", "superseded", "cut off", "signal", "timer", "worker ended"],
)
def test_a_graceful_stop_is_shortened_once_other_nodes_may_train(event: AgentEvent, expected: float | None) -> None:
    assert grace(Received(PLANNED_END), event) == expected
    assert grace(Received(PLANNED_END), Received(END), Received(AGAIN)) is None  # it is short already


def test_a_leaving_node_that_is_cut_off_saves_nevertheless() -> None:
    assert grace(TERM, Received(PLANNED_END), CutOff()) is None


def test_a_leaving_node_does_not_wait_for_a_coordinator_that_ends_during_the_planned_end() -> None:
    state, effects = play(TERM, Received(PLAN), WorkersHeld(R1, None), state=graceful())
    assert effects[2] == [Send(StepReport(R1, None)), StartLeaveTimer(LAST_STEP_TIMEOUT)]
    assert last(LeaveTimedOut(), state=state) == [StopWorkers(20.0, for_good=True)]
    assert last(Received(LONG_LAST), state=state) == [StartLeaveTimer(20.0), StopWorkersAt(R1, 7)]
    assert last(Received(LONG_LAST), LeaveTimedOut(), state=state) == [StopWorkers(1.0, for_good=True)]


@pytest.mark.parametrize(
    ("before", "seconds"),
    [
        ((), 1.0),
        ((Received(PLAN), WorkersHeld(R1, 7)), LAST_STEP_TIMEOUT),
        ((Received(PLAN), WorkersHeld(R1, 7), Received(LONG_LAST)), 20.0),
    ],
    ids=["running", "step reported", "last step known"],
)
def test_a_signal_leaves_a_planned_end_its_time(before: tuple[AgentEvent, ...], seconds: float) -> None:
    assert last(TERM, state=graceful(*before))[-1] == StartLeaveTimer(seconds)


def test_a_signal_after_a_planned_end_leaves_the_coordinator_no_more_time_than_after_any_end() -> None:
    """Its last step is done. A deleted job's store may be gone by then."""
    ended = graceful(Received(PLAN), WorkersHeld(R1, 7), Received(LONG_LAST), Received(PLANNED_END))
    state, _ = play(AllWorkersStopped(1001), state=ended)
    assert last(TERM, state=state)[-1] == StartLeaveTimer(FINISH_TIMEOUT)


def test_the_end_of_an_earlier_round_does_not_acknowledge_that_the_node_leaves() -> None:
    second_round = (Received(END), AllWorkersStopped(1001), Received(AGAIN), WorkersLaunched(R2))
    assert grace(*second_round, TERM, LeaveTimedOut()) == 20.0


def test_the_deletion_of_an_unhealthy_node_leaves_its_workers_their_time() -> None:
    unhealthy = (NodeUnhealthy(BROKEN), Received(PLANNED_END))
    assert grace(*unhealthy, TERM) is None
    assert grace(*unhealthy, TERM, TERM) == 0.0


# ---- an unhealthy node -----------------------------------------------------------------------------------------------

BROKEN = Failure(FailureClass.DEVICE_UNHEALTHY, "job-0-0", 2.0, message="GPU 1 is lost")
UNHEALTHY = Send(Leaving("DeviceUnhealthy: GPU 1 is lost", BROKEN))


@pytest.mark.parametrize(
    ("event", "checked"),
    [
        (BOOM, True),
        (Received(END), True),
        (Received(replace(END, planned=True)), False),
        (SignalReceived("SIGTERM"), False),
    ],
)
def test_a_failure_here_or_elsewhere_is_followed_by_a_health_check(event: AgentEvent, checked: bool) -> None:
    assert (CheckHealth() in decide(running(), event).effects) is checked


def test_an_unhealthy_node_leaves_with_the_problem_in_its_termination_message() -> None:
    left = Finish(Outcome.LEFT, "NodeLeft")
    _, effects = play(
        NodeUnhealthy(BROKEN),
        NodeUnhealthy(BROKEN),
        Received(END),
        AllWorkersStopped(1001),
        Received(left),
        state=running(),
    )
    assert effects[:4] == [
        [UNHEALTHY, StartLeaveTimer(1.0)],
        [],
        [StopWorkers(0.5, for_good=True)],
        [Send(WorkersStopped(R1, 1001)), StartLeaveTimer(FINISH_TIMEOUT)],
    ]
    (exit_,) = (e for e in effects[4] if isinstance(e, Exit))
    assert (exit_.code, exit_.termination.failure) == (ExitCode.LEFT, BROKEN)


def test_a_node_unhealthy_at_its_start_never_becomes_ready() -> None:
    state, effects = play(Received(START), NodeUnhealthy(BROKEN), Received(END), AllWorkersStopped(1001))
    assert effects[1] == [UNHEALTHY, StartLeaveTimer(1.0)]
    assert greeting(state)[-1] == Leaving("DeviceUnhealthy: GPU 1 is lost", BROKEN)
    assert not state.launcher_ready


def test_a_device_failure_of_a_worker_makes_the_node_leave() -> None:
    died = replace(BROKEN, rank=1, exit_code=1, exception="AcceleratorError", message="uncorrectable ECC error")
    _, (effects,) = play(WorkerEnded(R1, 1, died), state=running())
    reason = "DeviceUnhealthy: uncorrectable ECC error"
    assert effects == [
        Send(WorkersFailed(R1, died)),
        StopWorkers(1.0),
        Send(Leaving(reason, died)),
        StartLeaveTimer(1.0),
    ]


def test_a_node_with_a_stuck_worker_sends_leaving_before_workers_stopped() -> None:
    stuck = AllWorkersStopped(1001, BROKEN)
    _, effects = play(Received(END), stuck, Received(Finish(Outcome.LEFT, "NodeLeft")), state=running())
    assert effects[1] == [
        UNHEALTHY,
        StartLeaveTimer(1.0),
        Send(WorkersStopped(R1, 1001)),
        StartLeaveTimer(FINISH_TIMEOUT),
    ]
    assert exits(effects[2]) == [ExitCode.LEFT]
    _, effects = play(Received(AGAIN), stuck, state=running())
    assert not [e for e in effects[1] if isinstance(e, LaunchWorkers)]


def test_a_worker_that_failed_before_the_stop_is_reported_too() -> None:
    echo = replace(FAILURE, kind=FailureClass.COLLECTIVE_FAILED, rank=0)
    state, effects = play(WorkerEnded(R1, 0, echo), BOOM, WorkerEnded(R1, 0, echo), state=running())
    assert effects[1:] == [[Send(WorkersFailed(R1, FAILURE))], []]
    assert state.failure == FAILURE


# ---- hangs -----------------------------------------------------------------------------------------------------------

HUNG = Failure(FailureClass.HANG, "job-0-0", 2.0, rank=0, message="no progress", step=6)


def test_a_hang_on_this_node_dumps_stacks_before_the_workers_are_stopped() -> None:
    state, effects = play(ProgressTimedOut(R1), StackReport(R1, HUNG), AllWorkersStopped(1001), state=running())
    assert effects == [
        [StopWorkers(HANG_GRACE, dump_stacks=True)],
        [Send(WorkersFailed(R1, HUNG))],
        [Send(WorkersStopped(R1, 1001))],
    ]
    assert state.failure == HUNG


def test_a_hang_on_another_node_dumps_stacks_here_too() -> None:
    end = replace(END, dump_stacks=True, grace_seconds=HANG_GRACE)
    _, effects = play(Received(end), StackReport(R1, HUNG), AllWorkersStopped(1001), state=running())
    assert effects[:2] == [[StopWorkers(HANG_GRACE, dump_stacks=True)], [Send(WorkersFailed(R1, HUNG))]]


@pytest.mark.parametrize("event", [ProgressTimedOut(R2), StackReport(R2, HUNG), StackReport(R1, HUNG)])
def test_a_hang_of_another_round_changes_nothing(event: AgentEvent) -> None:
    before = running()
    assert play(event, state=before) == (before, [[]])


NOT_ENDING = replace(START, hang_ends_round=False)


def running_where_a_hang_ends_nothing() -> AgentState:
    return play(LauncherReady(), Received(NOT_ENDING), WorkersLaunched(R1))[0]


def test_a_hang_that_does_not_end_the_round_is_reported_with_stacks() -> None:
    state, effects = play(ProgressTimedOut(R1), StackReport(R1, HUNG), state=running_where_a_hang_ends_nothing())
    assert effects == [[DumpStacks(R1)], [Send(WorkersStalled(R1, HUNG))]]
    assert (state.phase, state.member, state.failure) == (AgentPhase.RUNNING, MemberState.RUNNING, None)
    assert greeting(state)[1:] == (WorkersStalled(R1, HUNG),)
    ended, effects = play(Received(END), StackReport(R1, HUNG), state=state)
    assert effects == [[StopWorkers(0.5)], []], "the stacks were requested before the round ended"
    assert greeting(play(AllWorkersStopped(1001), state=ended)[0])[1:] == (WorkersStopped(R1, 1001),)


# ---- conditions of log rules -----------------------------------------------------------------------------------------

MET = Failure(FailureClass.USER_ERROR, "pod-0", 12.0, rank=4, message="loss is nan at step 6", log_rule="steps")


def test_a_condition_that_is_met_ends_the_round_as_a_failure_of_the_worker() -> None:
    state, effects = play(LogConditionMet(R1, MET, ends_round=True), state=running())
    assert effects == [[Send(WorkersFailed(R1, MET)), StopWorkers(1.0)]]
    assert (state.phase, state.member, state.failure) == (AgentPhase.STOPPING, MemberState.FAILED, MET)


def test_a_condition_that_is_only_reported() -> None:
    state, effects = play(LogConditionMet(R1, MET, ends_round=False), state=running())
    assert effects == [[Send(WorkersStalled(R1, MET))]]
    assert (state.phase, state.failure) == (AgentPhase.RUNNING, None)
    assert greeting(state)[1:] == (WorkersStalled(R1, MET),), "the next store learns of it too"


@pytest.mark.parametrize("ends_round", [True, False])
def test_a_condition_counts_only_while_the_workers_of_its_round_run(ends_round: bool) -> None:
    met = LogConditionMet(R1, MET, ends_round)
    assert play(CutOff(), met, state=running())[1][1] == []
    assert play(Received(END), met, state=running())[1][1] == []
    assert play(replace(met, round=R2), state=running())[1] == [[]]


# ---- cut off ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (START, [FreezeWorkers(False)]),
        (PLAN, [FreezeWorkers(False), HoldWorkers(R1)]),
        (LAST, [FreezeWorkers(False), StopWorkersAt(R1, 7)]),
        (END, [StopWorkers(0.0, at_once=True)]),
        (AGAIN, [StopWorkers(0.0, at_once=True)]),
        (SUCCEEDED, [StopWorkers(0.0, at_once=True)]),
    ],
    ids=[
        "the round still runs",
        "its end is planned",
        "its last step is known",
        "it has ended",
        "a new round",
        "the job is over",
    ],
)
def test_a_node_cut_off_freezes_its_workers_until_the_coordinator_reports_on_their_round(
    message: CoordinatorToAgent, expected: list[Effect]
) -> None:
    state, frozen = play(CutOff(), CutOff(), state=running())
    assert frozen == [[FreezeWorkers(True)], []]
    assert play(ProgressTimedOut(R1), state=state)[1] == [[]]  # frozen workers make no steps
    assert play(Received(message), state=state)[1] == [expected]


def test_frozen_workers_get_only_sigkill_when_their_node_leaves() -> None:
    state, _ = play(CutOff(), SignalReceived("SIGTERM"), state=running())
    assert play(LeaveTimedOut(), state=state)[1] == [[StopWorkers(0.0, at_once=True)]]


def test_workers_that_start_while_the_node_is_cut_off_are_frozen_at_once() -> None:
    _, effects = play(LauncherReady(), Received(START), CutOff(), WorkersLaunched(R1))
    assert effects[2:] == [[FreezeWorkers(True)], [Send(WorkersStarted(R1)), FreezeWorkers(True)]]


def test_a_node_without_workers_has_nothing_to_freeze() -> None:
    assert play(CutOff())[1] == [[]]
    assert play(*DONE, CutOff(), state=running())[1][-1] == []


def test_one_torchrun_process_counts_for_all_workers_of_the_node() -> None:
    state = replace(AgentState(replace(ME, local_world_size=4), 1.0, processes=1), launcher_ready=True)
    state = decide(state, Received(START)).state
    assert state.last_round is not None
    assert state.last_round.running_ranks == {0}
    state = decide(decide(state, WorkersLaunched(START.round)).state, WorkerEnded(START.round, 0)).state
    assert state.phase is AgentPhase.SUCCEEDED


def parked() -> AgentState:
    """The state of a node whose round has ended and whose processes wait for the next one."""
    return play(Received(END), AllWorkersStopped(1001, parked=True), state=running())[0]


@pytest.mark.parametrize("has_state", [True, False])
def test_a_node_reports_whether_it_has_a_training_state(has_state: bool) -> None:
    stopped = WorkersStopped(R1, 1001, has_state=has_state)
    state, effects = play(Received(END), AllWorkersStopped(1001, has_state=has_state), state=running())
    assert effects[-1] == [Send(stopped)]
    assert stopped in greeting(state), "on a new link too"


def test_a_node_whose_last_process_with_the_state_ends_while_it_waits_reports_that() -> None:
    state, effects = play(StateLost(), StateLost(), state=parked())
    stopped = WorkersStopped(R1, 1001, has_state=False)
    assert effects == [[Send(stopped)], []]
    assert stopped in greeting(state)
    for other in (running(), play(Received(AGAIN), state=parked())[0], play(state=None)[0]):
        assert last(StateLost(), state=other) == [], "it is known, or the round shows it"


@pytest.mark.parametrize("ready", [True, False])
def test_the_node_of_group_rank_0_admits_the_workers_of_a_round_even_before_it_is_ready(ready: bool) -> None:
    begun = replace(START, member_addresses=("10.0.0.1", "10.0.0.2"))
    state = play(*([LauncherReady()] if ready else []))[0]
    first, other = (decide(state, Received(s)) for s in (begun, replace(START, group_rank=1)))
    assert [e for e in first.effects if isinstance(e, AdmitWorkers)] == [AdmitWorkers(begun)]
    assert not [e for e in other.effects if isinstance(e, AdmitWorkers)]
    (announced,) = greeting(first.state)
    assert isinstance(announced, Announce)
    assert announced.membership == LastMembership(START, MemberState.STARTING), "without addresses"


def test_parked_processes_go_on_in_the_next_round() -> None:
    assert last(Received(AGAIN), state=parked()) == [LaunchWorkers(AGAIN)]


@pytest.mark.parametrize(
    ("events", "goes_on", "code"),
    [
        ((Received(Finish(Outcome.FAILED, "MaxRestartsExceeded")),), False, ExitCode.FAILED),
        ((Received(Finish(Outcome.SUPERSEDED, "why")),), True, ExitCode.SUPERSEDED),
        ((SignalReceived("SIGTERM"), LeaveTimedOut()), True, ExitCode.LEFT),
        ((StoreUnreachable("no answer"),), True, ExitCode.UNAVAILABLE),
    ],
)
def test_parked_processes_end_before_the_exit(events: tuple[AgentEvent, ...], goes_on: bool, code: ExitCode) -> None:
    """Where the job goes on without this node, none of the user's code runs any more."""
    state, effects = play(*events, AllWorkersStopped(1002), state=parked())
    assert effects[-2] == [StopWorkers(1.0, for_good=True, job_goes_on=goes_on)]
    assert exits(effects[-1]) == [code]
    assert state.phase is AgentPhase.FINISHED


def test_processes_that_were_parked_once_are_not_stopped_after_success() -> None:
    started = play(Received(AGAIN), WorkersLaunched(R2), state=parked())[0]
    done = (WorkerEnded(R2, 0), WorkerEnded(R2, 1))
    assert exits(last(*done, Received(SUCCEEDED), state=started)) == [ExitCode.SUCCEEDED]


def test_the_last_round_of_parked_processes_is_announced_as_stopped() -> None:
    messages = greeting(parked())
    assert WorkersStopped(R1, 1001) in messages


PROVISIONAL = replace(START, round=PRESTART_ROUND, group_rank=2, rank=4, master_addr="", master_port=0)
WAIT = Received(Standby("a round runs without this node", provisional=PROVISIONAL))
AHEAD = PrestartWorkers(PROVISIONAL)


def test_a_node_that_joins_reports_itself_ready_once_its_script_waits_at_the_function() -> None:
    state, effects = play(WAIT, LauncherReady("bash"), WAIT, WorkersPrestarted(), Received(START))
    assert effects == [[], [AHEAD], [], [Send(Ready("bash"))], [LaunchWorkers(START)]]
    early = play(WAIT, LauncherReady())[0]
    assert [greeting(s)[0] for s in (early, state)] == [
        ME,
        replace(ME, ready=True, fork_disabled_reason="bash", membership=LastMembership(START, MemberState.STARTING)),
    ]


def test_a_spare_starts_its_script_when_it_learns_that_the_function_can_be_called_again() -> None:
    assert play(LauncherReady(), Received(Standby("full")), WAIT, WAIT, WorkersPrestarted(), WAIT)[1] == [
        [Send(Ready())], [], [AHEAD], [], [Send(Ready())], [],
    ]  # fmt: skip


def test_a_round_waits_for_a_script_that_was_started_ahead() -> None:
    state, effects = play(WAIT, LauncherReady(), LauncherReady("it ended"), Received(START), WorkersPrestarted())
    assert effects[2:] == [[], [], [Send(Ready("it ended")), LaunchWorkers(START)]]
    # The round ends meanwhile.
    state, effects = play(WAIT, LauncherReady(), Received(START), Received(END), AllWorkersStopped(1001, parked=True))
    assert effects[3:] == [[StopWorkers(0.5)], [Send(WorkersStopped(R1, 1001))]]
    assert play(WorkersPrestarted(), Received(AGAIN), state=state)[1] == [[Send(Ready())], [LaunchWorkers(AGAIN)]]


def test_a_node_with_a_round_or_one_that_leaves_starts_nothing_ahead() -> None:
    assert AHEAD not in last(WAIT, state=running())
    idle = play(Received(END), AllWorkersStopped(1001), state=running())[0]
    assert last(WAIT, state=idle) == []
    leaving = play(SignalReceived("SIGTERM"), WAIT, LauncherReady())[1]
    assert leaving[1:] == [[], [Send(Ready())]]


def test_processes_that_were_started_ahead_are_stopped_before_the_agent_exits() -> None:
    ahead = play(WAIT, LauncherReady())[0]
    for state in (ahead, play(WorkersPrestarted(), state=ahead)[0]):
        state, effects = play(Received(SUCCEEDED), AllWorkersStopped(1001), state=state)
        assert effects[0] == [StopWorkers(1.0, for_good=True)]
        assert exits(effects[1]) == [ExitCode.SUCCEEDED]


def test_the_node_of_group_rank_0_reports_once_that_its_function_can_be_called_again() -> None:
    state, effects = play(FunctionCalled(), FunctionCalled(), state=running())
    assert effects == [[Send(Ready(restartable=True))], []]
    assert isinstance(first := greeting(state)[0], Announce)
    assert first.restartable
    other = play(LauncherReady(), Received(replace(START, group_rank=1)), WorkersLaunched(R1))[0]
    assert last(FunctionCalled(), state=other) == []


def test_the_node_of_group_rank_0_reports_what_guards_the_workers_whenever_that_changes() -> None:
    guarded, gone = HangGuardKnown("ends after 600 s"), HangGuardKnown("")
    state, effects = play(guarded, guarded, gone, gone, state=running())
    assert [[e for e in step if isinstance(e, Send)] for step in effects] == [
        [Send(Ready(hang_guard="ends after 600 s"))],
        [],
        [Send(Ready())],
        [],
    ]
    assert state.announcement.hang_guard == ""
    other = play(LauncherReady(), Received(replace(START, group_rank=1)), WorkersLaunched(R1))[0]
    assert last(guarded, state=other) == []
    was_first = replace(other, announcement=replace(other.announcement, hang_guard="ends after 600 s"))
    assert [e for e in last(gone, state=was_first) if isinstance(e, Send)] == [Send(Ready())]


LOST = NewProcesses(1, 3.0, 0.1)


def test_a_node_whose_process_is_lost_starts_another_one_ahead_of_the_next_round() -> None:
    """The round goes on without it. The coordinator knows from each message what has to be started."""
    idle, effects = play(Received(END), AllWorkersStopped(1001, parked=True, new_processes=LOST), state=running())
    assert effects[-1] == [Send(WorkersStopped(R1, 1001, new_processes=LOST))]
    assert isinstance(first := greeting(idle)[0], Announce)
    assert (first.ready, first.new_processes) == (True, LOST)
    ahead, effects = play(WAIT, WAIT, state=idle)
    assert effects == [[AHEAD], []]
    assert isinstance(first := greeting(ahead)[0], Announce)
    assert (first.ready, first.new_processes.count) == (False, 0)
    assert play(WorkersPrestarted(), WAIT, Received(AGAIN), state=ahead)[1] == [
        [Send(Ready())],
        [],
        [LaunchWorkers(AGAIN)],
    ]


def test_a_round_that_ends_before_the_start_ahead_makes_the_node_start_again() -> None:
    """The coordinator may have answered the end of the round before the node knows what became of the start."""
    stopped = AllWorkersStopped(1001, parked=True, new_processes=LOST)
    idle = play(Received(END), stopped, state=running())[0]
    state, effects = play(WAIT, Received(AGAIN), Received(replace(END, round=R2)), stopped, WAIT, state=idle)
    assert effects[-1] == []
    assert play(WorkersPrestarted(), WorkersPrestarted(), state=state)[1] == [[AHEAD], [Send(Ready())]]


def test_a_node_that_waits_for_processes_to_start_leaves_at_once_when_it_is_drained() -> None:
    idle = play(Received(END), AllWorkersStopped(1001, new_processes=LOST), state=running())[0]
    assert play(SignalReceived("SIGTERM"), WAIT, state=idle)[1][-1] == []

"""The agent's decisions: a story a test, told in events and what the agent does about each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticjob.agent.machine.decide import LEAVE_TIMEOUT, decide, greeting
from elasticjob.agent.machine.effects import (
    CheckHealth,
    Effect,
    Exit,
    Freeze,
    Hold,
    Launch,
    Log,
    Look,
    Say,
    Stop,
    StopAt,
    WaitForAnswer,
)
from elasticjob.agent.machine.events import (
    AllStopped,
    CutOff,
    Event,
    Held,
    Launched,
    LeaveUnanswered,
    Signalled,
    Stalled,
    Stood,
    StoreUnreachable,
    Told,
    TooLate,
    Unfit,
    Warm,
    WorkerEnded,
)
from elasticjob.agent.machine.state import Phase, State
from elasticjob.contract.messages import (
    Announce,
    EndRound,
    Failure,
    FailureClass,
    Finish,
    Leaving,
    Membership,
    MemberState,
    Outcome,
    PlanEnd,
    Ready,
    Standby,
    StartRound,
    StepReport,
    ToNode,
    WorkersFailed,
    WorkersStalled,
    WorkersStarted,
    WorkersStopped,
    WorkersSucceeded,
)
from elasticjob.contract.names import ExitCode, RoundId
from elasticjob.diagnosis import HANG_GRACE

ME = Announce(0, 0, "boot", "job-0-0", "10.0.0.1", 1000, local_world_size=2)
R1, R2 = RoundId(1, 0, 1), RoundId(1, 0, 2)


def start(round_id: RoundId) -> StartRound:
    return StartRound(round_id, 0, 2, 0, 4, 0, 4, "10.0.0.1", 1000, 0, 3)


START, AGAIN = start(R1), start(R2)
END = EndRound(R1, 0.5, "why")
FAILURE = Failure(FailureClass.USER_ERROR, "job-0-0", 1.0, rank=1, exit_code=1, exception="ValueError", message="bad")
BOOM = WorkerEnded(R1, 1, FAILURE)
DONE = (WorkerEnded(R1, 0), WorkerEnded(R1, 1))
PLAN, LAST = PlanEnd(R1, "why"), EndRound(R1, 0.5, "why", planned=True, last_step=7)
STOPPED_ON_PLAN = (WorkerEnded(R1, 0, on_plan=True), WorkerEnded(R1, 1, on_plan=True))
SUCCEEDED = Finish(Outcome.SUCCEEDED, "AllAgentsSucceeded")


def play(*events: Event, state: State | None = None) -> tuple[State, list[list[Effect]]]:
    """The state after the events, and the effects of each, without log lines and health checks."""
    state = state or State(ME, stop_grace=1.0)
    acts: list[list[Effect]] = []
    for event in events:
        decision = decide(state, event)
        state = decision.state
        acts.append([e for e in decision.effects if not isinstance(e, (Log, CheckHealth))])
    return state, acts


def running() -> State:
    return play(Warm(), Told(START), Launched(R1))[0]


def last(*events: Event, state: State | None = None) -> list[Effect]:
    return play(*events, state=state)[1][-1]


def exits(effects: list[Effect]) -> list[ExitCode]:
    return [e.code for e in effects if isinstance(e, Exit)]


def test_a_round_from_start_to_success() -> None:
    state, acts = play(Warm(), Told(Standby("wait")), Told(START), Launched(R1), *DONE, Told(SUCCEEDED))
    assert acts[:6] == [
        [Say(Ready())], [], [Launch(START)], [Say(WorkersStarted(R1))], [], [Say(WorkersSucceeded(R1))],
    ]  # fmt: skip
    assert exits(acts[6]) == [ExitCode.SUCCEEDED]
    assert state.phase is Phase.FINISHED


def test_a_round_waits_for_the_imports() -> None:
    assert play(Told(START), Warm())[1] == [[], [Say(Ready()), Launch(START)]]


def test_why_workers_start_by_exec_is_told_at_once_and_on_every_new_link() -> None:
    state, acts = play(Warm("bash is not Python"), state=State(ME, stop_grace=1.0))
    assert acts == [[Say(Ready("bash is not Python"))]]
    assert greeting(state) == (replace(ME, ready=True, warm_off="bash is not Python"),)
    # The warm process was lost at a launch: the workers run all the same.
    assert last(Warm("it ended"), state=running()) == [Say(Ready("it ended"))]


def test_the_first_failure_is_told_at_once_and_the_rest_is_stopped() -> None:
    other = WorkerEnded(R1, 0)
    state, acts = play(BOOM, other, AllStopped(1001), state=running())
    assert acts == [
        [Say(WorkersFailed(R1, FAILURE)), Stop(1.0)],
        [],
        [Say(WorkersStopped(R1, 1001))],
    ]
    assert (state.phase, state.me.store_port) == (Phase.IDLE, 1001)
    assert last(Told(AGAIN), state=state) == [Launch(AGAIN)]


def test_an_ended_round_is_stopped_with_its_own_grace_and_another_may_follow() -> None:
    _, acts = play(Told(END), Told(END), AllStopped(1001), Told(AGAIN), state=running())
    assert acts == [[Stop(0.5)], [], [Say(WorkersStopped(R1, 1001))], [Launch(AGAIN)]]


def test_finished_workers_run_again_when_the_round_ends_otherwise() -> None:
    _, acts = play(*DONE, Told(END), AllStopped(1001), Told(AGAIN), state=running())
    assert acts[2:] == [[Stop(0.5)], [Say(WorkersStopped(R1, 1001))], [Launch(AGAIN)]]


def test_a_planned_end() -> None:
    _, acts = play(Told(PLAN), Held(R1, 7), Told(LAST), *STOPPED_ON_PLAN, AllStopped(1001), state=running())
    assert acts == [
        [Hold(R1)],
        [Say(StepReport(R1, 7))],
        [StopAt(R1, 7)],
        [],
        [Stop(1.0)],
        [Say(WorkersStopped(R1, 1001))],
    ]


def test_a_question_asked_again_is_answered_again_until_the_last_step_is_known() -> None:
    assert play(Told(PLAN), Held(R1, 7), Told(PLAN), state=running())[1][2] == [Hold(R1)]
    assert play(Told(LAST), Told(PLAN), Told(LAST), state=running())[1][1:] == [[], []]


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ((Warm(), Told(START)), [Say(StepReport(R1, None))]),
        ((Warm(), Told(START), Launched(R1), *DONE), [Hold(R1)]),
        ((Warm(), Told(START), Launched(R1), Told(END)), [Say(StepReport(R1, None))]),
        ((Warm(), Told(START), Launched(R1), Told(END), AllStopped(1001)), [Say(WorkersStopped(R1, 1001))]),
    ],
    ids=["starting", "succeeded", "stopping", "stopped"],
)
def test_who_can_be_asked_for_its_steps(before: tuple[Event, ...], expected: list[Effect]) -> None:
    assert last(*before, Told(PLAN)) == expected


def test_workers_that_may_be_past_the_last_step_are_stopped() -> None:
    assert last(Told(PLAN), Held(R1, 7), Told(LAST), TooLate(R1), state=running()) == [Stop(1.0)]


def test_a_plan_that_does_not_come_about_ends_as_any_round() -> None:
    assert last(Told(PLAN), Held(R1, 7), Told(LAST), Told(END), state=running()) == [Stop(0.5)]


def test_a_failure_on_the_way_to_the_last_step_is_a_failure() -> None:
    acts = last(Told(PLAN), Told(LAST), WorkerEnded(R1, 0, on_plan=True), BOOM, state=running())
    assert acts == [Say(WorkersFailed(R1, FAILURE)), Stop(1.0)]


def test_workers_done_before_the_last_step_have_succeeded() -> None:
    assert last(Told(PLAN), Told(LAST), *DONE, state=running()) == [Say(WorkersSucceeded(R1))]
    assert last(*DONE, Told(LAST), state=running()) == []


def test_a_node_with_workers_that_stopped_on_plan_has_not_succeeded() -> None:
    assert last(Told(LAST), STOPPED_ON_PLAN[0], DONE[1], state=running()) == [Stop(1.0)]


def test_leaving_waits_for_the_plan() -> None:
    _, acts = play(Signalled("SIGTERM"), Told(PLAN), LeaveUnanswered(), state=running())
    assert acts[1:] == [[Hold(R1)], []]


def test_a_round_that_ends_before_the_imports_are_done_never_starts() -> None:
    _, acts = play(Told(START), Told(END), Warm(), AllStopped(1001))
    assert acts[1:] == [[Stop(0.5)], [Say(Ready())], [Say(WorkersStopped(R1, 1001))]]


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (Told(START), []),
        (Told(start(RoundId(1, 0, 0))), []),
        (Told(EndRound(RoundId(1, 0, 0), 1.0, "old")), []),
        (Told(EndRound(R2, 1.0, "never heard of")), [Say(WorkersStopped(R2, 1000))]),
        (Launched(R2), []),
        (WorkerEnded(R2, 0, FAILURE), []),
        (AllStopped(1001), []),
        (LeaveUnanswered(), []),
    ],
)
def test_words_of_another_round_change_nothing(event: Event, expected: list[Effect]) -> None:
    before = replace(running(), answered=True)
    after, (effects,) = play(event, state=before)
    assert (after, effects) == (before, expected)


def test_an_end_of_a_round_already_stopped_is_answered_again() -> None:
    idle = play(Told(END), AllStopped(1001), state=running())[0]
    assert last(Told(END), state=idle) == [Say(WorkersStopped(R1, 1001))]


def test_a_newer_round_replaces_the_running_one() -> None:
    assert play(Told(AGAIN), AllStopped(1001), state=running())[1] == [[Stop(1.0)], [Launch(AGAIN)]]


def test_leaving_as_a_member() -> None:
    left = Finish(Outcome.LEFT, "NodeLeft")
    _, acts = play(Signalled("SIGTERM"), Told(END), AllStopped(1001), Told(left), state=running())
    assert acts[:3] == [
        [Say(Leaving("SIGTERM")), WaitForAnswer(1.0)],
        [Stop(0.5)],
        [Say(WorkersStopped(R1, 1001)), WaitForAnswer(LEAVE_TIMEOUT)],
    ]
    assert exits(acts[3]) == [ExitCode.LEFT]


def test_leaving_without_an_answer() -> None:
    _, acts = play(Signalled("SIGTERM"), LeaveUnanswered(), AllStopped(1001), state=running())
    assert acts[1] == [Stop(1.0)]
    assert acts[2][0] == Say(WorkersStopped(R1, 1001))
    assert exits(acts[2]) == [ExitCode.LEFT]


def test_leaving_while_idle_and_alone() -> None:
    assert exits(last(Signalled("SIGTERM"), LeaveUnanswered())) == [ExitCode.LEFT]


def test_a_second_signal_kills_at_once() -> None:
    _, acts = play(Signalled("SIGTERM"), Signalled("SIGTERM"), AllStopped(1001), state=running())
    assert acts[1] == [Stop(0.0)]
    assert exits(acts[2]) == [ExitCode.LEFT]


@pytest.mark.parametrize(
    ("finish", "code"),
    [
        (Finish(Outcome.FAILED, "MaxRestartsExceeded"), ExitCode.FAILED),
        (Finish(Outcome.SUPERSEDED, "Superseded"), ExitCode.SUPERSEDED),
        (Finish(Outcome.ERROR, "JoinTimeout"), ExitCode.JOIN_TIMEOUT),
        (Finish(Outcome.ERROR, "other"), ExitCode.INTERNAL),
    ],
)
def test_a_finish_stops_what_runs_before_the_exit(finish: Finish, code: ExitCode) -> None:
    _, acts = play(Told(finish), AllStopped(1001), Told(AGAIN), state=running())
    assert acts[0] == [Stop(1.0)]
    assert exits(acts[1]) == [code]
    assert acts[2] == []


def test_the_termination_message_names_round_and_failure_but_for_success() -> None:
    def termination(finish: Finish, state: State) -> object:
        (exit_,) = (e for e in last(Told(finish), state=state) if isinstance(e, Exit))
        return (exit_.termination.outcome, exit_.termination.round, exit_.termination.failure)

    failed = play(BOOM, AllStopped(1001), state=running())[0]
    succeeded = play(*DONE, state=running())[0]
    assert termination(Finish(Outcome.FAILED, "x"), failed) == (Outcome.FAILED, R1, FAILURE)
    assert termination(SUCCEEDED, succeeded) == (Outcome.SUCCEEDED, R1, None)


def test_no_store_within_the_join_timeout() -> None:
    assert exits(last(StoreUnreachable("refused"))) == [ExitCode.UNAVAILABLE]


@pytest.mark.parametrize(
    ("events", "member", "said"),
    [
        ((), MemberState.RUNNING, ()),
        ((BOOM,), MemberState.FAILED, (WorkersFailed(R1, FAILURE),)),
        ((BOOM, AllStopped(1001)), MemberState.FAILED, (WorkersFailed(R1, FAILURE), WorkersStopped(R1, 1001))),
        ((Told(EndRound(R1, 1.0, "x")), AllStopped(1001)), MemberState.STOPPED, (WorkersStopped(R1, 1001),)),
        ((Signalled("SIGTERM"),), MemberState.RUNNING, (Leaving("SIGTERM"),)),
    ],
)
def test_a_greeting_repeats_what_a_broken_link_may_have_lost(
    events: tuple[Event, ...], member: MemberState, said: tuple[object, ...]
) -> None:
    state = play(*events, state=running())[0]
    announce, *rest = greeting(state)
    assert tuple(rest) == said
    assert announce == replace(state.me, ready=True, membership=Membership(START, member))


def test_the_announced_state_follows_the_round() -> None:
    states = [play(*events, state=running())[0].member for events in ((), DONE, (BOOM,), (BOOM, AllStopped(1001)))]
    assert states == [MemberState.RUNNING, MemberState.SUCCEEDED, MemberState.FAILED, MemberState.STOPPED]
    assert greeting(State(ME, 1.0)) == (ME,)


def test_a_node_that_is_stopping_does_not_say_that_it_has() -> None:
    state, _ = play(Warm(), Told(START), Launched(R1), Told(END))
    first = greeting(state)[0]
    assert isinstance(first, Announce)
    assert first.membership == Membership(START, MemberState.RUNNING)


# ---- a node that is not fit ------------------------------------------------------------------------------------------

BROKEN = Failure(FailureClass.DEVICE_UNHEALTHY, "job-0-0", 2.0, message="GPU 1 is lost")
UNFIT = Say(Leaving("DeviceUnhealthy: GPU 1 is lost", BROKEN))


@pytest.mark.parametrize(
    ("event", "checked"),
    [(BOOM, True), (Told(END), True), (Told(replace(END, planned=True)), False), (Signalled("SIGTERM"), False)],
)
def test_a_failure_here_or_elsewhere_is_followed_by_a_look_at_this_node(event: Event, checked: bool) -> None:
    assert (CheckHealth() in decide(running(), event).effects) is checked


def test_a_node_that_is_not_fit_leaves_and_its_last_words_say_why() -> None:
    left = Finish(Outcome.LEFT, "NodeLeft")
    _, acts = play(Unfit(BROKEN), Unfit(BROKEN), Told(END), AllStopped(1001), Told(left), state=running())
    assert acts[:4] == [
        [UNFIT, WaitForAnswer(1.0)],
        [],
        [Stop(0.5)],
        [Say(WorkersStopped(R1, 1001)), WaitForAnswer(LEAVE_TIMEOUT)],
    ]
    (exit_,) = (e for e in acts[4] if isinstance(e, Exit))
    assert (exit_.code, exit_.termination.failure) == (ExitCode.LEFT, BROKEN)


def test_a_node_that_is_not_fit_at_its_start_never_gets_ready() -> None:
    state, acts = play(Told(START), Unfit(BROKEN), Told(END), AllStopped(1001))
    assert acts[1] == [UNFIT, WaitForAnswer(1.0)]
    assert greeting(state)[-1] == Leaving("DeviceUnhealthy: GPU 1 is lost", BROKEN)
    assert not state.warm


def test_a_worker_that_died_of_its_device_takes_the_node_along() -> None:
    died = replace(BROKEN, rank=1, exit_code=1, exception="AcceleratorError", message="uncorrectable ECC error")
    _, (effects,) = play(WorkerEnded(R1, 1, died), state=running())
    reason = "DeviceUnhealthy: uncorrectable ECC error"
    assert effects == [Say(WorkersFailed(R1, died)), Stop(1.0), Say(Leaving(reason, died)), WaitForAnswer(1.0)]


def test_a_node_with_a_worker_stuck_in_the_kernel_says_so_before_it_says_that_it_has_stopped() -> None:
    stuck = AllStopped(1001, BROKEN)
    _, acts = play(Told(END), stuck, Told(Finish(Outcome.LEFT, "NodeLeft")), state=running())
    assert acts[1] == [UNFIT, WaitForAnswer(1.0), Say(WorkersStopped(R1, 1001)), WaitForAnswer(LEAVE_TIMEOUT)]
    assert exits(acts[2]) == [ExitCode.LEFT]
    _, acts = play(Told(AGAIN), stuck, state=running())
    assert not [e for e in acts[1] if isinstance(e, Launch)]


def test_a_worker_that_had_failed_before_the_stop_is_told_of_too() -> None:
    echo = replace(FAILURE, kind=FailureClass.COLLECTIVE_FAILED, rank=0)
    state, acts = play(WorkerEnded(R1, 0, echo), BOOM, WorkerEnded(R1, 0, echo), state=running())
    assert acts[1:] == [[Say(WorkersFailed(R1, FAILURE))], []]
    assert state.failure == FAILURE


# ---- hangs -----------------------------------------------------------------------------------------------------------

HUNG = Failure(FailureClass.HANG, "job-0-0", 2.0, rank=0, message="no progress", step=6)


def test_a_hang_here_asks_where_the_workers_stand_before_they_are_stopped() -> None:
    state, acts = play(Stalled(R1), Stood(R1, HUNG), AllStopped(1001), state=running())
    assert acts == [[Stop(HANG_GRACE, stacks=True)], [Say(WorkersFailed(R1, HUNG))], [Say(WorkersStopped(R1, 1001))]]
    assert state.failure == HUNG


def test_a_hang_elsewhere_asks_the_workers_here_too() -> None:
    end = replace(END, stacks=True, grace_seconds=HANG_GRACE)
    _, acts = play(Told(end), Stood(R1, HUNG), AllStopped(1001), state=running())
    assert acts[:2] == [[Stop(HANG_GRACE, stacks=True)], [Say(WorkersFailed(R1, HUNG))]]


@pytest.mark.parametrize("event", [Stalled(R2), Stood(R2, HUNG), Stood(R1, HUNG)])
def test_a_hang_of_another_round_changes_nothing(event: Event) -> None:
    before = running()
    assert play(event, state=before) == (before, [[]])


TOLD_ONLY = replace(START, hang_ends_round=False)


def only_told() -> State:
    return play(Warm(), Told(TOLD_ONLY), Launched(R1))[0]


def test_a_hang_that_ends_nothing_is_told_with_where_the_workers_stand() -> None:
    state, acts = play(Stalled(R1), Stood(R1, HUNG), state=only_told())
    assert acts == [[Look(R1)], [Say(WorkersStalled(R1, HUNG))]]
    assert (state.phase, state.member, state.failure) == (Phase.RUNNING, MemberState.RUNNING, None)
    assert greeting(state)[1:] == (WorkersStalled(R1, HUNG),)
    ended, acts = play(Told(END), Stood(R1, HUNG), state=state)
    assert acts == [[Stop(0.5)], []], "it was asked before the round ended, for nobody to blame"
    assert greeting(play(AllStopped(1001), state=ended)[0])[1:] == (WorkersStopped(R1, 1001),)


# ---- cut off


@pytest.mark.parametrize(
    ("word", "acts"),
    [
        (START, [Freeze(False)]),
        (END, [Stop(0.0)]),
        (AGAIN, [Stop(0.0)]),
        (SUCCEEDED, [Stop(0.0)]),
    ],
    ids=["the round goes on", "it has ended", "another one began", "the job is over"],
)
def test_a_node_cut_off_freezes_its_workers_until_the_coordinator_says_what_became_of_their_round(
    word: ToNode, acts: list[Effect]
) -> None:
    state, frozen = play(CutOff(), CutOff(), state=running())
    assert frozen == [[Freeze(True)], []]
    assert play(Stalled(R1), state=state)[1] == [[]]  # of course they do not make a step
    assert play(Told(word), state=state)[1] == [acts]


def test_frozen_workers_get_no_chance_to_write_when_their_node_is_told_to_go() -> None:
    state, _ = play(CutOff(), Signalled("SIGTERM"), state=running())
    assert play(LeaveUnanswered(), state=state)[1] == [[Stop(0.0)]]


def test_workers_that_start_while_the_node_is_cut_off_are_frozen_at_once() -> None:
    _, acts = play(Warm(), Told(START), CutOff(), Launched(R1))
    assert acts[2:] == [[Freeze(True)], [Say(WorkersStarted(R1)), Freeze(True)]]


def test_a_node_without_workers_has_nothing_to_freeze() -> None:
    assert play(CutOff())[1] == [[]]
    assert play(*DONE, CutOff(), state=running())[1][-1] == []


def test_a_process_that_stands_for_all_workers_of_the_node_ends_for_all() -> None:
    state = replace(State(replace(ME, local_world_size=4), 1.0, processes=1), warm=True)
    state = decide(state, Told(START)).state
    assert state.live == {0}
    state = decide(decide(state, Launched(START.round)).state, WorkerEnded(START.round, 0)).state
    assert state.phase is Phase.SUCCEEDED

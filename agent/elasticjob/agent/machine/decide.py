"""What an agent does about what happens to it: `decide(state, event) -> (state, effects)`. Pure.

                StartRound            Launched              all exit 0
    IDLE ───────────────► STARTING ─────────────► RUNNING ─────────────► SUCCEEDED
      ▲                       │ EndRound, a failure, a newer round, leaving │
      └────────── STOPPING ◄──┴─────────────────────────────────────────────┘     Finish ──► FINISHED (from anywhere)

The link may be lost at any time: what a node says first on a new one is `greeting(state)`, so nothing is lost with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

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
from elasticjob.agent.machine.outcomes import assert_never, describe, exit_code
from elasticjob.agent.machine.state import Phase, State
from elasticjob.contract.messages import (
    Closed,
    EndRound,
    Failure,
    FailureClass,
    Finish,
    FromNode,
    Leaving,
    Membership,
    MemberState,
    Outcome,
    PlanEnd,
    Ready,
    Standby,
    StartRound,
    StepReport,
    Termination,
    ToNode,
    WorkersFailed,
    WorkersStalled,
    WorkersStarted,
    WorkersStopped,
    WorkersSucceeded,
)
from elasticjob.contract.names import RoundId
from elasticjob.diagnosis import HANG_GRACE

LEAVE_TIMEOUT = 10.0
"""Seconds that a leaving node whose workers have ended waits for the coordinator's `Finish`."""


@dataclass(frozen=True)
class Decision:
    """The state after an event, and what to do, in this order."""

    state: State
    effects: tuple[Effect, ...] = field(default=())


def greeting(state: State) -> tuple[FromNode, ...]:
    """Announcement, then what a broken connection may have swallowed."""
    # Who has failed says so before it says that it has stopped: a coordinator that knows neither must hear both.
    member = MemberState.FAILED if state.failure and state.phase is Phase.IDLE else state.member
    membership = Membership(state.assignment, member) if state.assignment else None
    said: list[FromNode] = [replace(state.me, ready=state.warm, membership=membership)]
    if state.assignment and state.failure:
        said.append(WorkersFailed(state.assignment.round, state.failure))
    if state.assignment and state.stalled and state.phase is Phase.RUNNING:
        said.append(WorkersStalled(state.assignment.round, state.stalled))
    if state.assignment and state.phase is Phase.IDLE:
        said.append(WorkersStopped(state.assignment.round, state.me.store_port))
    if state.leaving:
        said.append(Leaving(state.leaving, state.unfit))
    return tuple(said)


def decide(state: State, event: Event) -> Decision:
    """The one step of the machine. After FINISHED nothing happens any more."""
    if state.phase is Phase.FINISHED:
        return Decision(state)
    match event:
        case Told(message):
            return _told(replace(state, answered=state.answered or _answers(message)), message)
        case Warm(off):
            return _warm(state, off)
        case Launched(round_id):
            return _launched(state, round_id)
        case WorkerEnded():
            return _ended(state, event)
        case Held(round_id, step):
            return _held(state, round_id, step)
        case TooLate(round_id):
            return _too_late(state, round_id)
        case AllStopped():
            return _all_stopped(state, event)
        case Stalled(round_id):
            return _stalled(state, round_id)
        case Stood(round_id, failure):
            return _stood(state, round_id, failure)
        case Unfit(failure):
            return _unfit(state, failure)
        case CutOff():
            return _cut_off(state)
        case Signalled(name):
            return _signalled(state, name)
        case LeaveUnanswered():
            return _unanswered(state)
        case StoreUnreachable(why):
            outcome = Finish(Outcome.ERROR, "StoreUnreachable", why)
            return _finish(state, outcome)
        case _ as never:
            return assert_never(never)


def _told(state: State, message: ToNode) -> Decision:
    match message:
        case StartRound():
            return _start(state, message)
        case Standby(reason=reason):
            return Decision(state, (Log(f"waiting: {reason}"),))
        case Closed(reason):
            return Decision(state, (Log(f"no round will follow this one: {reason}"),))
        case PlanEnd():
            return _plan_end(state, message)
        case EndRound():
            return _end_round(state, message)
        case Finish():
            return _finish(state, message)
        case _ as never:
            return assert_never(never)


def _answers(message: ToNode) -> bool:
    return isinstance(message, (PlanEnd, EndRound, Finish))


def _start(state: State, start: StartRound) -> Decision:
    if state.frozen and start.round == state.round:
        thawed = replace(state, frozen=False)
        return Decision(thawed, (Log(f"round {start.round} goes on"), Freeze(False)))
    if state.round is not None and start.round <= state.round:
        return Decision(state)  # said again after a reconnect
    if state.phase is not Phase.IDLE:
        stopped = _stop(replace(state, following=start), state.stop_grace)
        return Decision(stopped.state, (Log(f"round {start.round} replaces {state.round}"), *stopped.effects))
    state = replace(
        state,
        phase=Phase.STARTING,
        assignment=start,
        member=MemberState.STARTING,
        failure=None,
        stalled=None,
        last_step=None,
        stopped_there=False,
        launched=False,
        live=frozenset(range(state.processes or state.me.local_world_size)),
    )
    formed = Log(
        f"round {start.round} formed: node {start.group_rank} of {start.group_world_size},"
        f" ranks {start.rank}-{start.rank + state.me.local_world_size - 1} of {start.world_size}"
    )
    if not state.warm:
        return Decision(state, (formed, Log("importing; workers start when that is done")))
    return Decision(replace(state, launched=True), (formed, Launch(start)))


def _warm(state: State, off: str) -> Decision:
    state = replace(state, warm=True, me=replace(state.me, warm_off=off))
    if state.phase is Phase.STARTING and state.assignment and not state.launched:
        return Decision(replace(state, launched=True), (Say(Ready(off)), Launch(state.assignment)))
    return Decision(state, (Say(Ready(off)),))


def _launched(state: State, round_id: RoundId) -> Decision:
    if state.phase is not Phase.STARTING or round_id != state.round:
        return Decision(state)
    running = replace(state, phase=Phase.RUNNING, member=MemberState.RUNNING)
    return Decision(running, (Say(WorkersStarted(round_id)), *((Freeze(True),) if state.frozen else ())))


def _cut_off(state: State) -> Decision:
    """The others may have gone on without this node: its workers must not write over what they do (a checkpoint)."""
    if state.frozen or state.phase not in (Phase.STARTING, Phase.RUNNING):
        return Decision(state)
    log = Log("cut off from the store and from all other nodes: the workers are frozen")
    return Decision(replace(state, frozen=True), (Freeze(True), log))


def _ended(state: State, event: WorkerEnded) -> Decision:
    if event.round != state.round:
        return Decision(state)
    if state.phase is Phase.STOPPING and event.failure:
        return _failed_before(state, event.round, event.failure)
    if state.phase not in (Phase.STARTING, Phase.RUNNING):
        return Decision(state)
    there = state.stopped_there or event.on_plan
    state = replace(state, live=state.live - {event.local_rank}, stopped_there=there)
    if event.failure:
        state = replace(state, member=MemberState.FAILED, failure=event.failure)
        stopped = _stop(state, state.stop_grace)
        said = (Say(WorkersFailed(event.round, event.failure)), Log(describe(event.failure)))
        done = Decision(stopped.state, (*said, *stopped.effects, CheckHealth()))
        if event.failure.kind is not FailureClass.DEVICE_UNHEALTHY:
            return done
        unfit = _unfit(done.state, event.failure)
        return Decision(unfit.state, done.effects + unfit.effects)
    if state.live:
        return Decision(state)
    if state.stopped_there:
        return _stop(state, state.stop_grace)
    state = replace(state, phase=Phase.SUCCEEDED, member=MemberState.SUCCEEDED)
    return Decision(state, (Say(WorkersSucceeded(event.round)), Log("workers are done; waiting for the other nodes")))


def _plan_end(state: State, message: PlanEnd) -> Decision:
    """Ask the workers where they are; those that are done still know how far they came."""
    if state.phase in (Phase.RUNNING, Phase.SUCCEEDED) and message.round == state.round:
        known = state.last_step is not None
        return Decision(state) if known else Decision(state, (Hold(message.round),))
    if state.phase is Phase.IDLE:
        return Decision(state, (Say(WorkersStopped(message.round, state.me.store_port)),))
    return Decision(state, (Say(StepReport(message.round, None)),))


def _held(state: State, round_id: RoundId, step: int | None) -> Decision:
    if round_id != state.round or state.phase not in (Phase.RUNNING, Phase.SUCCEEDED):
        return Decision(state)
    return Decision(state, (Say(StepReport(round_id, step)),))


def _too_late(state: State, round_id: RoundId) -> Decision:
    if round_id != state.round or state.phase is not Phase.RUNNING:
        return Decision(state)
    stopped = _stop(state, state.stop_grace)
    return Decision(stopped.state, (Log("the workers may be past the last step"), *stopped.effects))


def _failed_before(state: State, round_id: RoundId, failure: Failure) -> Decision:
    """A worker had failed before it was stopped, and took its time to end: it may be the cause of what others saw."""
    if round_id != state.round or state.phase is not Phase.STOPPING:
        return Decision(state)
    if failure.kind is FailureClass.COLLECTIVE_FAILED:
        return Decision(state)
    if state.failure is None or state.failure.kind is FailureClass.COLLECTIVE_FAILED:
        state = replace(state, failure=failure)
    return Decision(state, (Say(WorkersFailed(round_id, failure)), Log(describe(failure))))


def _unfit(state: State, failure: Failure) -> Decision:
    """Leave, and ask for a successor on another machine; a node that is told to go goes anyway."""
    if state.leaving:
        return Decision(state)
    state = replace(state, leaving=f"{failure.kind.value}: {failure.message}", unfit=failure)
    leaving = (Log(f"not fit to train: {failure.message}"), Say(Leaving(state.leaving, failure)))
    return Decision(state, (*leaving, WaitForAnswer(max(1.0, state.stop_grace))))


def _end_round(state: State, message: EndRound) -> Decision:
    if state.phase is Phase.IDLE or (state.round is not None and message.round > state.round):
        return Decision(state, (Say(WorkersStopped(message.round, state.me.store_port)),))
    if state.phase is Phase.STOPPING or message.round != state.round:
        return Decision(state)
    if message.last_step is not None:
        return _end_at(state, message, message.last_step)
    stopped = _stop(state, message.grace_seconds, stacks=message.stacks)
    check = () if message.planned else (CheckHealth(),)
    return Decision(stopped.state, (Log(f"round {message.round} ends: {message.reason}"), *stopped.effects, *check))


def _end_at(state: State, message: EndRound, step: int) -> Decision:
    """Workers that are done stay done: they may have been the last ones."""
    if state.phase is not Phase.RUNNING or state.last_step is not None:
        return Decision(state)
    log = Log(f"round {message.round} ends after step {step}: {message.reason}")
    return Decision(replace(state, last_step=step), (log, StopAt(message.round, step)))


def _stop(state: State, grace: float, *, stacks: bool = False) -> Decision:
    if state.phase is Phase.STOPPING:
        return Decision(state)
    # What is frozen ends as it stands: no handler of its SIGTERM may write anything.
    how = Stop(0.0) if state.frozen else Stop(grace, stacks)
    return Decision(replace(state, phase=Phase.STOPPING), (how,))


def _stalled(state: State, round_id: RoundId) -> Decision:
    """The coordinator hears of it with where the workers stand; if it ends the round, all others are asked then."""
    if round_id != state.round or state.phase is not Phase.RUNNING or state.frozen:
        return Decision(state)
    if _only_tells(state):
        return Decision(state, (Log("no progress; the workers are asked where they stand"), Look(round_id)))
    stopped = _stop(replace(state, member=MemberState.FAILED), min(state.stop_grace, HANG_GRACE), stacks=True)
    return Decision(stopped.state, (Log("no progress; the workers are asked where they stand"), *stopped.effects))


def _only_tells(state: State) -> bool:
    return state.assignment is not None and not state.assignment.hang_ends_round


def _stood(state: State, round_id: RoundId, failure: Failure) -> Decision:
    if not _only_tells(state):
        return _failed_before(state, round_id, failure)
    if round_id != state.round or state.phase is not Phase.RUNNING:
        return Decision(state)
    told = (Say(WorkersStalled(round_id, failure)), Log(f"{describe(failure)}; nothing is restarted"))
    return Decision(replace(state, stalled=failure), told)


def _all_stopped(state: State, event: AllStopped) -> Decision:
    if state.phase is not Phase.STOPPING:
        return Decision(state)
    if event.unfit is not None and not state.leaving:
        # Before the coordinator hears that nothing runs here: it must not take this node into the next round.
        unfit = _unfit(state, event.unfit)
        stopped = _all_stopped(replace(unfit.state, answered=True), event)
        return Decision(stopped.state, unfit.effects + stopped.effects)
    following, store_port = state.following, event.store_port
    state = replace(
        state,
        phase=Phase.IDLE,
        member=MemberState.STOPPED,
        me=replace(state.me, store_port=store_port),
        live=frozenset(),
        following=None,
        frozen=False,
    )
    if isinstance(following, Finish):
        return _exit(state, following)
    if isinstance(following, StartRound) and state.unfit is None:
        return _start(state, following)
    said = (Say(WorkersStopped(state.round, store_port)),) if state.round else ()
    if not state.leaving:
        return Decision(state, said)
    if not state.answered:
        left = _exit(state, Finish(Outcome.LEFT, state.leaving, "the coordinator did not answer"))
        return Decision(left.state, said + left.effects)
    return Decision(state, (*said, WaitForAnswer(LEAVE_TIMEOUT)))


def _signalled(state: State, name: str) -> Decision:
    if state.leaving:
        ended = replace(state, phase=Phase.STOPPING, following=Finish(Outcome.LEFT, name))
        return Decision(ended, (Log(f"{name} again: killing the workers"), Stop(0.0)))
    return Decision(
        replace(state, leaving=name),
        (Log(f"leaving: {name}"), Say(Leaving(name)), WaitForAnswer(max(1.0, state.stop_grace))),
    )


def _unanswered(state: State) -> Decision:
    if state.phase is Phase.STOPPING or (state.answered and state.phase is not Phase.IDLE):
        return Decision(state)
    if state.phase is Phase.IDLE:
        return _exit(state, Finish(Outcome.LEFT, state.leaving))
    stopped = _stop(state, state.stop_grace)
    return Decision(stopped.state, (Log("the coordinator does not answer; stopping the workers"), *stopped.effects))


def _finish(state: State, finish: Finish) -> Decision:
    if state.phase in (Phase.IDLE, Phase.SUCCEEDED):
        return _exit(state, finish)
    return _stop(replace(state, following=finish), state.stop_grace)


def _exit(state: State, finish: Finish) -> Decision:
    failure = (state.unfit or state.failure) if finish.outcome is not Outcome.SUCCEEDED else None
    termination = Termination(finish.outcome, finish.reason, state.round, finish.message, failure)
    why = f" ({finish.reason})" if finish.reason != finish.outcome.value else ""
    log = Log(f"done: {finish.outcome.value}{why}{': ' + finish.message if finish.message else ''}")
    return Decision(replace(state, phase=Phase.FINISHED), (log, Exit(exit_code(finish), termination)))

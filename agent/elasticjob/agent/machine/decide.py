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
    DumpStacks,
    Effect,
    Exit,
    FreezeWorkers,
    HoldWorkers,
    LaunchWorkers,
    Log,
    Send,
    StartLeaveTimer,
    StopWorkers,
    StopWorkersAt,
)
from elasticjob.agent.machine.events import (
    AgentEvent,
    AllWorkersStopped,
    CutOff,
    LastStepMissed,
    LauncherReady,
    LeaveTimedOut,
    NodeUnhealthy,
    ProgressTimedOut,
    Received,
    SignalReceived,
    StackReport,
    StoreUnreachable,
    WorkerEnded,
    WorkersHeld,
    WorkersLaunched,
)
from elasticjob.agent.machine.outcomes import assert_never, describe_failure, exit_code
from elasticjob.agent.machine.state import AgentPhase, AgentState
from elasticjob.contract.messages import (
    Closed,
    CoordinatorToNode,
    EndRound,
    Failure,
    FailureClass,
    Finish,
    LastMembership,
    Leaving,
    MemberState,
    NodeToCoordinator,
    Outcome,
    PlanEnd,
    Ready,
    Standby,
    StartRound,
    StepReport,
    Termination,
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
class AgentDecision:
    """The state after an event, and what to do, in this order."""

    state: AgentState
    effects: tuple[Effect, ...] = field(default=())


def greeting(state: AgentState) -> tuple[NodeToCoordinator, ...]:
    """Announcement, then what a broken connection may have swallowed."""
    # Who has failed says so before it says that it has stopped: a coordinator that knows neither must hear both.
    member = MemberState.FAILED if state.failure and state.phase is AgentPhase.IDLE else state.member
    membership = LastMembership(state.assignment, member) if state.assignment else None
    said: list[NodeToCoordinator] = [replace(state.announcement, ready=state.launcher_ready, membership=membership)]
    if state.assignment and state.failure:
        said.append(WorkersFailed(state.assignment.round, state.failure))
    if state.assignment and state.stall and state.phase is AgentPhase.RUNNING:
        said.append(WorkersStalled(state.assignment.round, state.stall))
    if state.assignment and state.phase is AgentPhase.IDLE:
        said.append(WorkersStopped(state.assignment.round, state.announcement.store_port))
    if state.leaving:
        said.append(Leaving(state.leaving, state.unhealthy))
    return tuple(said)


def decide(state: AgentState, event: AgentEvent) -> AgentDecision:
    """The one step of the machine. After FINISHED nothing happens any more."""
    if state.phase is AgentPhase.FINISHED:
        return AgentDecision(state)
    match event:
        case Received(message):
            return _told(replace(state, leave_acknowledged=state.leave_acknowledged or _answers(message)), message)
        case LauncherReady(off):
            return _warm(state, off)
        case WorkersLaunched(round_id):
            return _launched(state, round_id)
        case WorkerEnded():
            return _ended(state, event)
        case WorkersHeld(round_id, step):
            return _held(state, round_id, step)
        case LastStepMissed(round_id):
            return _too_late(state, round_id)
        case AllWorkersStopped():
            return _all_stopped(state, event)
        case ProgressTimedOut(round_id):
            return _stalled(state, round_id)
        case StackReport(round_id, failure):
            return _stood(state, round_id, failure)
        case NodeUnhealthy(failure):
            return _unfit(state, failure)
        case CutOff():
            return _cut_off(state)
        case SignalReceived(name):
            return _signalled(state, name)
        case LeaveTimedOut():
            return _unanswered(state)
        case StoreUnreachable(why):
            outcome = Finish(Outcome.ERROR, "StoreUnreachable", why)
            return _finish(state, outcome)
        case _ as never:
            return assert_never(never)


def _told(state: AgentState, message: CoordinatorToNode) -> AgentDecision:
    match message:
        case StartRound():
            return _start(state, message)
        case Standby(reason=reason):
            return AgentDecision(state, (Log(f"waiting: {reason}"),))
        case Closed(reason):
            return AgentDecision(state, (Log(f"no round will follow this one: {reason}"),))
        case PlanEnd():
            return _plan_end(state, message)
        case EndRound():
            return _end_round(state, message)
        case Finish():
            return _finish(state, message)
        case _ as never:
            return assert_never(never)


def _answers(message: CoordinatorToNode) -> bool:
    return isinstance(message, (PlanEnd, EndRound, Finish))


def _start(state: AgentState, start: StartRound) -> AgentDecision:
    if state.frozen and start.round == state.round:
        thawed = replace(state, frozen=False)
        return AgentDecision(thawed, (Log(f"round {start.round} goes on"), FreezeWorkers(False)))
    if state.round is not None and start.round <= state.round:
        return AgentDecision(state)  # said again after a reconnect
    if state.phase is not AgentPhase.IDLE:
        stopped = _stop(replace(state, after_stop=start), state.stop_grace)
        return AgentDecision(stopped.state, (Log(f"round {start.round} replaces {state.round}"), *stopped.effects))
    state = replace(
        state,
        phase=AgentPhase.STARTING,
        assignment=start,
        member=MemberState.STARTING,
        failure=None,
        stall=None,
        last_step=None,
        stopped_on_plan=False,
        launched=False,
        running_ranks=frozenset(range(state.processes or state.announcement.local_world_size)),
    )
    formed = Log(
        f"round {start.round} formed: node {start.group_rank} of {start.group_world_size},"
        f" ranks {start.rank}-{start.rank + state.announcement.local_world_size - 1} of {start.world_size}"
    )
    if not state.launcher_ready:
        return AgentDecision(state, (formed, Log("importing; workers start when that is done")))
    return AgentDecision(replace(state, launched=True), (formed, LaunchWorkers(start)))


def _warm(state: AgentState, off: str) -> AgentDecision:
    state = replace(state, launcher_ready=True, announcement=replace(state.announcement, fork_disabled_reason=off))
    if state.phase is AgentPhase.STARTING and state.assignment and not state.launched:
        return AgentDecision(replace(state, launched=True), (Send(Ready(off)), LaunchWorkers(state.assignment)))
    return AgentDecision(state, (Send(Ready(off)),))


def _launched(state: AgentState, round_id: RoundId) -> AgentDecision:
    if state.phase is not AgentPhase.STARTING or round_id != state.round:
        return AgentDecision(state)
    running = replace(state, phase=AgentPhase.RUNNING, member=MemberState.RUNNING)
    return AgentDecision(running, (Send(WorkersStarted(round_id)), *((FreezeWorkers(True),) if state.frozen else ())))


def _cut_off(state: AgentState) -> AgentDecision:
    """The others may have gone on without this node: its workers must not write over what they do (a checkpoint)."""
    if state.frozen or state.phase not in (AgentPhase.STARTING, AgentPhase.RUNNING):
        return AgentDecision(state)
    log = Log("cut off from the store and from all other nodes: the workers are frozen")
    return AgentDecision(replace(state, frozen=True), (FreezeWorkers(True), log))


def _ended(state: AgentState, event: WorkerEnded) -> AgentDecision:
    if event.round != state.round:
        return AgentDecision(state)
    if state.phase is AgentPhase.STOPPING and event.failure:
        return _failed_before(state, event.round, event.failure)
    if state.phase not in (AgentPhase.STARTING, AgentPhase.RUNNING):
        return AgentDecision(state)
    there = state.stopped_on_plan or event.on_plan
    state = replace(state, running_ranks=state.running_ranks - {event.local_rank}, stopped_on_plan=there)
    if event.failure:
        state = replace(state, member=MemberState.FAILED, failure=event.failure)
        stopped = _stop(state, state.stop_grace)
        said = (Send(WorkersFailed(event.round, event.failure)), Log(describe_failure(event.failure)))
        done = AgentDecision(stopped.state, (*said, *stopped.effects, CheckHealth()))
        if event.failure.kind is not FailureClass.DEVICE_UNHEALTHY:
            return done
        unfit = _unfit(done.state, event.failure)
        return AgentDecision(unfit.state, done.effects + unfit.effects)
    if state.running_ranks:
        return AgentDecision(state)
    if state.stopped_on_plan:
        return _stop(state, state.stop_grace)
    state = replace(state, phase=AgentPhase.SUCCEEDED, member=MemberState.SUCCEEDED)
    return AgentDecision(
        state, (Send(WorkersSucceeded(event.round)), Log("workers are done; waiting for the other nodes"))
    )


def _plan_end(state: AgentState, message: PlanEnd) -> AgentDecision:
    """Ask the workers where they are; those that are done still know how far they came."""
    if state.phase in (AgentPhase.RUNNING, AgentPhase.SUCCEEDED) and message.round == state.round:
        known = state.last_step is not None
        return AgentDecision(state) if known else AgentDecision(state, (HoldWorkers(message.round),))
    if state.phase is AgentPhase.IDLE:
        return AgentDecision(state, (Send(WorkersStopped(message.round, state.announcement.store_port)),))
    return AgentDecision(state, (Send(StepReport(message.round, None)),))


def _held(state: AgentState, round_id: RoundId, step: int | None) -> AgentDecision:
    if round_id != state.round or state.phase not in (AgentPhase.RUNNING, AgentPhase.SUCCEEDED):
        return AgentDecision(state)
    return AgentDecision(state, (Send(StepReport(round_id, step)),))


def _too_late(state: AgentState, round_id: RoundId) -> AgentDecision:
    if round_id != state.round or state.phase is not AgentPhase.RUNNING:
        return AgentDecision(state)
    stopped = _stop(state, state.stop_grace)
    return AgentDecision(stopped.state, (Log("the workers may be past the last step"), *stopped.effects))


def _failed_before(state: AgentState, round_id: RoundId, failure: Failure) -> AgentDecision:
    """A worker had failed before it was stopped, and took its time to end: it may be the cause of what others saw."""
    if round_id != state.round or state.phase is not AgentPhase.STOPPING:
        return AgentDecision(state)
    if failure.kind is FailureClass.COLLECTIVE_FAILED:
        return AgentDecision(state)
    if state.failure is None or state.failure.kind is FailureClass.COLLECTIVE_FAILED:
        state = replace(state, failure=failure)
    return AgentDecision(state, (Send(WorkersFailed(round_id, failure)), Log(describe_failure(failure))))


def _unfit(state: AgentState, failure: Failure) -> AgentDecision:
    """Leave, and ask for a successor on another machine; a node that is told to go goes anyway."""
    if state.leaving:
        return AgentDecision(state)
    state = replace(state, leaving=f"{failure.kind.value}: {failure.message}", unhealthy=failure)
    leaving = (Log(f"not fit to train: {failure.message}"), Send(Leaving(state.leaving, failure)))
    return AgentDecision(state, (*leaving, StartLeaveTimer(max(1.0, state.stop_grace))))


def _end_round(state: AgentState, message: EndRound) -> AgentDecision:
    if state.phase is AgentPhase.IDLE or (state.round is not None and message.round > state.round):
        return AgentDecision(state, (Send(WorkersStopped(message.round, state.announcement.store_port)),))
    if state.phase is AgentPhase.STOPPING or message.round != state.round:
        return AgentDecision(state)
    if message.last_step is not None:
        return _end_at(state, message, message.last_step)
    stopped = _stop(state, message.grace_seconds, stacks=message.dump_stacks)
    check = () if message.planned else (CheckHealth(),)
    return AgentDecision(
        stopped.state, (Log(f"round {message.round} ends: {message.reason}"), *stopped.effects, *check)
    )


def _end_at(state: AgentState, message: EndRound, step: int) -> AgentDecision:
    """Workers that are done stay done: they may have been the last ones."""
    if state.phase is not AgentPhase.RUNNING or state.last_step is not None:
        return AgentDecision(state)
    log = Log(f"round {message.round} ends after step {step}: {message.reason}")
    return AgentDecision(replace(state, last_step=step), (log, StopWorkersAt(message.round, step)))


def _stop(state: AgentState, grace: float, *, stacks: bool = False) -> AgentDecision:
    if state.phase is AgentPhase.STOPPING:
        return AgentDecision(state)
    # What is frozen ends as it stands: no handler of its SIGTERM may write anything.
    how = StopWorkers(0.0) if state.frozen else StopWorkers(grace, stacks)
    return AgentDecision(replace(state, phase=AgentPhase.STOPPING), (how,))


def _stalled(state: AgentState, round_id: RoundId) -> AgentDecision:
    """The coordinator hears of it with where the workers stand; if it ends the round, all others are asked then."""
    if round_id != state.round or state.phase is not AgentPhase.RUNNING or state.frozen:
        return AgentDecision(state)
    if _only_tells(state):
        return AgentDecision(state, (Log("no progress; the workers are asked where they stand"), DumpStacks(round_id)))
    stopped = _stop(replace(state, member=MemberState.FAILED), min(state.stop_grace, HANG_GRACE), stacks=True)
    return AgentDecision(stopped.state, (Log("no progress; the workers are asked where they stand"), *stopped.effects))


def _only_tells(state: AgentState) -> bool:
    return state.assignment is not None and not state.assignment.hang_ends_round


def _stood(state: AgentState, round_id: RoundId, failure: Failure) -> AgentDecision:
    if not _only_tells(state):
        return _failed_before(state, round_id, failure)
    if round_id != state.round or state.phase is not AgentPhase.RUNNING:
        return AgentDecision(state)
    told = (Send(WorkersStalled(round_id, failure)), Log(f"{describe_failure(failure)}; nothing is restarted"))
    return AgentDecision(replace(state, stall=failure), told)


def _all_stopped(state: AgentState, event: AllWorkersStopped) -> AgentDecision:
    if state.phase is not AgentPhase.STOPPING:
        return AgentDecision(state)
    if event.unhealthy is not None and not state.leaving:
        # Before the coordinator hears that nothing runs here: it must not take this node into the next round.
        unfit = _unfit(state, event.unhealthy)
        stopped = _all_stopped(replace(unfit.state, leave_acknowledged=True), event)
        return AgentDecision(stopped.state, unfit.effects + stopped.effects)
    following, store_port = state.after_stop, event.store_port
    state = replace(
        state,
        phase=AgentPhase.IDLE,
        member=MemberState.STOPPED,
        announcement=replace(state.announcement, store_port=store_port),
        running_ranks=frozenset(),
        after_stop=None,
        frozen=False,
    )
    if isinstance(following, Finish):
        return _exit(state, following)
    if isinstance(following, StartRound) and state.unhealthy is None:
        return _start(state, following)
    said = (Send(WorkersStopped(state.round, store_port)),) if state.round else ()
    if not state.leaving:
        return AgentDecision(state, said)
    if not state.leave_acknowledged:
        left = _exit(state, Finish(Outcome.LEFT, state.leaving, "the coordinator did not answer"))
        return AgentDecision(left.state, said + left.effects)
    return AgentDecision(state, (*said, StartLeaveTimer(LEAVE_TIMEOUT)))


def _signalled(state: AgentState, name: str) -> AgentDecision:
    if state.leaving:
        ended = replace(state, phase=AgentPhase.STOPPING, after_stop=Finish(Outcome.LEFT, name))
        return AgentDecision(ended, (Log(f"{name} again: killing the workers"), StopWorkers(0.0)))
    return AgentDecision(
        replace(state, leaving=name),
        (Log(f"leaving: {name}"), Send(Leaving(name)), StartLeaveTimer(max(1.0, state.stop_grace))),
    )


def _unanswered(state: AgentState) -> AgentDecision:
    if state.phase is AgentPhase.STOPPING or (state.leave_acknowledged and state.phase is not AgentPhase.IDLE):
        return AgentDecision(state)
    if state.phase is AgentPhase.IDLE:
        return _exit(state, Finish(Outcome.LEFT, state.leaving))
    stopped = _stop(state, state.stop_grace)
    return AgentDecision(
        stopped.state, (Log("the coordinator does not answer; stopping the workers"), *stopped.effects)
    )


def _finish(state: AgentState, finish: Finish) -> AgentDecision:
    if state.phase in (AgentPhase.IDLE, AgentPhase.SUCCEEDED):
        return _exit(state, finish)
    return _stop(replace(state, after_stop=finish), state.stop_grace)


def _exit(state: AgentState, finish: Finish) -> AgentDecision:
    failure = (state.unhealthy or state.failure) if finish.outcome is not Outcome.SUCCEEDED else None
    termination = Termination(finish.outcome, finish.reason, state.round, finish.message, failure)
    why = f" ({finish.reason})" if finish.reason != finish.outcome.value else ""
    log = Log(f"done: {finish.outcome.value}{why}{': ' + finish.message if finish.message else ''}")
    return AgentDecision(replace(state, phase=AgentPhase.FINISHED), (log, Exit(exit_code(finish), termination)))

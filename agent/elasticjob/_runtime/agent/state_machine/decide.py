"""The agent's decisions: `decide(state, event)` returns the next state and the effects to carry out. Pure.

                StartRound        WorkersLaunched          all exit 0
    IDLE ───────────────► STARTING ─────────────► RUNNING ─────────────► SUCCEEDED
      ▲                       │ EndRound, a failure, a newer round, leaving │
      └────────── STOPPING ◄──┴─────────────────────────────────────────────┘     Finish ──► FINISHED (from anywhere)

In IDLE no worker of a round runs. Processes whose function can be called again may wait there for the next round. A
node that waits for a round of such a job starts those that it has not ahead of it, and reports itself ready once they
wait.

The link may be lost at any time. A node sends `greeting(state)` first on every new link, so no message is lost with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from elasticjob._runtime.agent.state_machine.effects import (
    AdmitWorkers,
    CheckHealth,
    DumpStacks,
    Effect,
    Exit,
    FreezeWorkers,
    HoldWorkers,
    LaunchWorkers,
    LeaveCollectives,
    Log,
    Send,
    SetMachineEnd,
    StartAhead,
    StartLeaveTimer,
    StopWorkers,
    StopWorkersAt,
)
from elasticjob._runtime.agent.state_machine.events import (
    AgentEvent,
    AllResultsEnded,
    AllWorkersStopped,
    CutOff,
    FunctionCalled,
    HangGuarded,
    LastStepMissed,
    LauncherReady,
    LeaveTimedOut,
    NodeUnhealthy,
    ProgressTimedOut,
    Received,
    SignalReceived,
    StackReport,
    StartedAhead,
    StateLost,
    StoreUnreachable,
    WorkerEnded,
    WorkersHeld,
    WorkersLaunched,
)
from elasticjob._runtime.agent.state_machine.outcomes import assert_never, describe_failure, exit_code
from elasticjob._runtime.agent.state_machine.state import AgentPhase, AgentState
from elasticjob._runtime.contract.messages import (
    BreakRound,
    Closed,
    CoordinatorToNode,
    EndRound,
    Failure,
    FailureClass,
    Finish,
    LastMembership,
    Leaving,
    MachineEnd,
    MemberState,
    NodeResultsEnded,
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
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.diagnosis import HANG_GRACE

LEAVE_TIMEOUT = 10.0
"""Seconds that a leaving node whose workers have ended waits for the coordinator's `Finish`."""
LAST_STEP_TIMEOUT = 5.0
"""Seconds that a leaving node which has reported its step waits for the last step. The coordinator answers within
`planned_end.STEP_REPORT_TIMEOUT`; when a job is deleted, its store may end in between."""


_KILL = StopWorkers(0.0, at_once=True)


@dataclass(frozen=True)
class AgentDecision:
    """The state after an event, and the effects to carry out, in order."""

    state: AgentState
    effects: tuple[Effect, ...] = field(default=())


def greeting(state: AgentState) -> tuple[NodeToCoordinator, ...]:
    """Return the first messages of a node on a new link: its announcement, then all that an old link may have lost."""
    # A failed node announces FAILED even once its workers have stopped: a coordinator that knows neither needs both.
    member = MemberState.FAILED if state.failure and state.phase is AgentPhase.IDLE else state.member
    # The store that needs the addresses has them: every announcement would be larger by them.
    assignment = replace(state.assignment, member_addresses=()) if state.assignment else None
    membership = LastMembership(assignment, member, state.results_ended) if assignment else None
    announcement = replace(state.announcement, new_processes=state.new_processes)
    messages: list[NodeToCoordinator] = [replace(announcement, ready=state.ready, membership=membership)]
    if state.assignment and state.failure:
        messages.append(WorkersFailed(state.assignment.round, state.failure))
    if state.assignment and state.stall and state.phase is AgentPhase.RUNNING:
        messages.append(WorkersStalled(state.assignment.round, state.stall))
    if state.assignment and state.phase is AgentPhase.IDLE:
        messages.append(_workers_stopped(state, state.assignment.round))
    if state.leaving:
        messages.append(Leaving(state.leaving, state.unhealthy))
    return tuple(messages)


def decide(state: AgentState, event: AgentEvent) -> AgentDecision:
    """Return the decision on one event. In FINISHED every event is ignored."""
    if state.phase is AgentPhase.FINISHED:
        return AgentDecision(state)
    match event:
        case Received(message):
            acknowledged = state.leave_acknowledged or isinstance(message, (PlanEnd, EndRound, Finish))
            return _coordinator_message(replace(state, leave_acknowledged=acknowledged), message)
        case LauncherReady(fork_disabled_reason):
            return _launcher_ready(state, fork_disabled_reason)
        case StartedAhead():
            return _started_ahead(replace(state, starting_ahead=False))
        case FunctionCalled():
            return _function_called(state)
        case HangGuarded(status):
            return _hang_guarded(state, status)
        case WorkersLaunched(round_id):
            return _workers_launched(state, round_id)
        case WorkerEnded():
            return _worker_ended(state, event)
        case WorkersHeld(round_id, step):
            return _workers_held(state, round_id, step)
        case LastStepMissed(round_id):
            return _last_step_missed(state, round_id)
        case AllResultsEnded(round_id):
            return _results_ended(state, round_id)
        case StateLost():
            return _state_lost(state)
        case AllWorkersStopped():
            return _all_stopped(state, event)
        case ProgressTimedOut(round_id):
            return _progress_timed_out(state, round_id)
        case StackReport(round_id, failure):
            return _stack_report(state, round_id, failure)
        case NodeUnhealthy(failure):
            return _leave_unhealthy(state, failure)
        case CutOff():
            return _cut_off(state)
        case SignalReceived(name):
            return _signal_received(state, name)
        case LeaveTimedOut():
            return _leave_timed_out(state)
        case StoreUnreachable(reason):
            return _finish(state, Finish(Outcome.ERROR, "StoreUnreachable", reason))
        case _ as never:
            return assert_never(never)


def _coordinator_message(state: AgentState, message: CoordinatorToNode) -> AgentDecision:
    match message:
        case StartRound():
            return _start(state, message)
        case Standby():
            return _stand_by(state, message)
        case Closed(reason):
            return AgentDecision(state, (Log(f"no further round will form: {reason}"),))
        case PlanEnd(round=round_id) | EndRound(round=round_id, last_step=int()):
            continued = _continue(state, round_id)
            state = continued.state
            ending = _plan_end(state, message) if isinstance(message, PlanEnd) else _end_round(state, message)
            return replace(ending, effects=continued.effects + ending.effects)
        case EndRound():
            return _end_round(state, message)
        case BreakRound():
            return _break_round(state, message)
        case Finish():
            return _finish(state, message)
        case MachineEnd(seconds):
            known = "is announced no longer" if seconds is None else f"is announced, in {seconds:.0f} s"
            announcement = replace(state.announcement, knows_machine_end=seconds is not None)
            log = Log(f"the end of this machine {known}")
            return AgentDecision(replace(state, announcement=announcement), (log, SetMachineEnd(seconds)))
        case _ as never:
            return assert_never(never)


def _start(state: AgentState, start: StartRound) -> AgentDecision:
    if state.round is not None and start.round <= state.round:
        return _continue(state, start.round)  # the coordinator repeats it to a node that announces itself again
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
        step_reported=False,
        stopping_gracefully=False,
        leave_acknowledged=state.leave_acknowledged and bool(state.leaving),
        stopped_as_planned=False,
        results_ended=False,
        new_processes=replace(state.new_processes, count=0),
        launched=False,
        parked=False,
        running_ranks=frozenset(range(state.processes or state.announcement.local_world_size)),
    )
    formed = Log(
        f"round {start.round} formed: node {start.group_rank} of {start.group_world_size},"
        f" ranks {start.rank}-{start.rank + state.announcement.local_world_size - 1} of {start.world_size}"
    )
    # The workers of other nodes may connect before this node is ready.
    admitted = (AdmitWorkers(start),) if start.group_rank == 0 else ()
    effects: tuple[Effect, ...] = (formed, *admitted)
    if not state.ready:
        what = "their script has reached its function" if state.starting_ahead else "the agent is ready"
        return AgentDecision(state, (*effects, Log(f"workers start once {what}")))
    return AgentDecision(replace(state, launched=True), (*effects, LaunchWorkers(start)))


def _continue(state: AgentState, round_id: RoundId) -> AgentDecision:
    """Continue frozen workers of a round of which the coordinator says that it still runs."""
    if not state.frozen or round_id != state.round:
        return AgentDecision(state)
    log = Log(f"round {round_id} still runs: continuing the frozen workers")
    return AgentDecision(replace(state, frozen=False), (log, FreezeWorkers(False)))


def _stand_by(state: AgentState, message: Standby) -> AgentDecision:
    waiting = Log(f"waiting: {message.reason}")
    if state.assignment is not None and not state.new_processes.count:  # its processes are parked
        return AgentDecision(state, (waiting,))
    state = replace(state, provisional=message.provisional)
    if not state.ready or not _may_start_ahead(state):
        return AgentDecision(state, (waiting,))
    started = _start_ahead(state)
    return AgentDecision(started.state, (waiting, *started.effects))


def _launcher_ready(state: AgentState, fork_disabled_reason: str) -> AgentDecision:
    announcement = replace(state.announcement, fork_disabled_reason=fork_disabled_reason)
    first, state = not state.launcher_ready, replace(state, launcher_ready=True, announcement=announcement)
    return _start_ahead(state) if first and _may_start_ahead(state) else _report_ready(state)


def _may_start_ahead(state: AgentState) -> bool:
    """Return whether there are processes to start: all before the first round, later those that could not stay."""
    missing = state.new_processes.count > 0 if state.assignment is not None else not state.parked
    return state.provisional is not None and state.phase is AgentPhase.IDLE and missing and not state.leaving


def _start_ahead(state: AgentState) -> AgentDecision:
    assert state.provisional is not None  # noqa: S101
    begun = replace(state.new_processes, count=0)
    ahead = replace(state, provisional=None, starting_ahead=True, parked=True, new_processes=begun)
    log = Log("the function of this job can be called again: running the script up to it, ahead of the next round")
    return AgentDecision(ahead, (log, StartAhead(state.provisional)))


def _started_ahead(state: AgentState) -> AgentDecision:
    """Report ready, unless a round that took this node meanwhile has ended with what was started."""
    return _start_ahead(state) if _may_start_ahead(state) else _report_ready(state)


def _report_ready(state: AgentState) -> AgentDecision:
    """Report that workers can start at once, and start those of a round that waits for it."""
    if not state.ready:
        return AgentDecision(state)
    me = state.announcement
    ready = Send(Ready(me.fork_disabled_reason, me.restartable, me.hang_guard))
    if state.phase is AgentPhase.STARTING and state.assignment and not state.launched:
        return AgentDecision(replace(state, launched=True), (ready, LaunchWorkers(state.assignment)))
    return AgentDecision(state, (ready,))


def _function_called(state: AgentState) -> AgentDecision:
    """Report once, from the node of group rank 0, that the function of this job can be called again."""
    if state.announcement.restartable or state.assignment is None or state.assignment.group_rank > 0:
        return AgentDecision(state)
    return _report_ready(replace(state, announcement=replace(state.announcement, restartable=True)))


def _hang_guarded(state: AgentState, status: str) -> AgentDecision:
    """Report what guards the workers, from the node of group rank 0: all nodes run the same script.

    A node that had this rank earlier keeps its report up to date.
    """
    before = state.announcement.hang_guard
    reports = state.assignment is not None and (state.assignment.group_rank == 0 or before)
    if before == status or not reports:
        return AgentDecision(state)
    decision = _report_ready(replace(state, announcement=replace(state.announcement, hang_guard=status)))
    return AgentDecision(decision.state, (*((Log(f"hang guard: {status}"),) if status else ()), *decision.effects))


def _workers_launched(state: AgentState, round_id: RoundId) -> AgentDecision:
    if state.phase is not AgentPhase.STARTING or round_id != state.round:
        return AgentDecision(state)
    running = replace(state, phase=AgentPhase.RUNNING, member=MemberState.RUNNING)
    return AgentDecision(running, (Send(WorkersStarted(round_id)), *((FreezeWorkers(True),) if state.frozen else ())))


def _cut_off(state: AgentState) -> AgentDecision:
    """Freeze the workers: the other nodes may train without this one, whose workers must not overwrite a checkpoint.

    Workers that stop gracefully are killed, unless this node leaves: when a job is deleted, all its other nodes and its
    store may end first.
    """
    if state.phase is AgentPhase.STOPPING and state.stopping_gracefully and not state.leaving:
        stopped = _stop(state, 0.0)
        log = Log("cut off from the store and from half or more of the round's nodes: killing the workers")
        return AgentDecision(stopped.state, (log, *stopped.effects))
    if state.frozen or state.phase not in (AgentPhase.STARTING, AgentPhase.RUNNING):
        return AgentDecision(state)
    log = Log("cut off from the store and from half or more of the round's nodes: the workers are frozen")
    return AgentDecision(replace(state, frozen=True), (FreezeWorkers(True), log))


def _worker_ended(state: AgentState, event: WorkerEnded) -> AgentDecision:
    if event.round != state.round:
        return AgentDecision(state)
    if state.phase is AgentPhase.STOPPING and event.failure:
        return _failed_before_stop(state, event.round, event.failure)
    if state.phase not in (AgentPhase.STARTING, AgentPhase.RUNNING):
        return AgentDecision(state)
    state = replace(
        state,
        running_ranks=state.running_ranks - {event.local_rank},
        stopped_as_planned=state.stopped_as_planned or event.as_planned,
    )
    if event.failure:
        return _worker_failed(state, event.round, event.failure)
    if state.running_ranks:
        return AgentDecision(state)
    if state.stopped_as_planned:
        return _stop(state, state.stop_grace)
    state = replace(state, phase=AgentPhase.SUCCEEDED, member=MemberState.SUCCEEDED)
    return AgentDecision(
        state, (Send(WorkersSucceeded(event.round)), Log("all workers succeeded; waiting for the other nodes"))
    )


def _worker_failed(state: AgentState, round_id: RoundId, failure: Failure) -> AgentDecision:
    """Report the failure, stop the other workers, check this node; leave if the failure is one of the device."""
    state = replace(state, member=MemberState.FAILED, failure=failure)
    stopped = _stop(state, state.stop_grace)
    report = (Send(WorkersFailed(round_id, failure)), Log(describe_failure(failure)))
    decision = AgentDecision(stopped.state, (*report, *stopped.effects, CheckHealth()))
    if failure.kind is not FailureClass.DEVICE_UNHEALTHY:
        return decision
    leaving = _leave_unhealthy(decision.state, failure)
    return AgentDecision(leaving.state, decision.effects + leaving.effects)


def _plan_end(state: AgentState, message: PlanEnd) -> AgentDecision:
    """Hold the workers, to report their latest step. Workers that have exited still have one."""
    if state.phase in (AgentPhase.RUNNING, AgentPhase.SUCCEEDED) and message.round == state.round:
        return AgentDecision(state, () if state.last_step is not None else (HoldWorkers(message.round),))
    if state.phase is AgentPhase.IDLE:
        return AgentDecision(state, (Send(_workers_stopped(state, message.round)),))
    return _report_step(state, message.round, None)


def _workers_held(state: AgentState, round_id: RoundId, step: int | None) -> AgentDecision:
    if round_id != state.round or state.phase not in (AgentPhase.RUNNING, AgentPhase.SUCCEEDED):
        return AgentDecision(state)
    return _report_step(state, round_id, step)


def _report_step(state: AgentState, round_id: RoundId, step: int | None) -> AgentDecision:
    state = replace(state, step_reported=state.step_reported or round_id == state.round)
    timer = (_leave_timer(state),) if state.leaving else ()
    return AgentDecision(state, (Send(StepReport(round_id, step)), *timer))


def _last_step_missed(state: AgentState, round_id: RoundId) -> AgentDecision:
    if round_id != state.round or state.phase is not AgentPhase.RUNNING:
        return AgentDecision(state)
    stopped = _stop(state, max(state.stop_grace, state.last_step_seconds), graceful=True)
    log = Log("workers may be past the last step: stopping them now")
    return AgentDecision(stopped.state, (log, *stopped.effects))


def _failed_before_stop(state: AgentState, round_id: RoundId, failure: Failure) -> AgentDecision:
    """Report a worker that failed before the stop and ended after it: it may be the root cause of other failures."""
    if round_id != state.round or state.phase is not AgentPhase.STOPPING:
        return AgentDecision(state)
    if failure.kind is FailureClass.COLLECTIVE_FAILED:
        return AgentDecision(state)
    if state.failure is None or state.failure.kind is FailureClass.COLLECTIVE_FAILED:
        state = replace(state, failure=failure)
    return AgentDecision(state, (Send(WorkersFailed(round_id, failure)), Log(describe_failure(failure))))


def _leave_unhealthy(state: AgentState, failure: Failure) -> AgentDecision:
    """Leave, and ask for a replacement on another machine. A node that is leaving already only leaves."""
    if state.leaving:
        return AgentDecision(state)
    state = replace(state, leaving=f"{failure.kind.value}: {failure.message}", unhealthy=failure)
    leaving = (Log(f"node is unhealthy, leaving: {failure.message}"), Send(Leaving(state.leaving, failure)))
    return AgentDecision(state, (*leaving, _leave_timer(state)))


def _end_round(state: AgentState, message: EndRound) -> AgentDecision:
    if state.phase is AgentPhase.IDLE or (state.round is not None and message.round > state.round):
        return AgentDecision(state, (Send(_workers_stopped(state, message.round)),))
    if message.round != state.round or (state.phase is AgentPhase.STOPPING and message.planned):
        return AgentDecision(state)
    if state.phase is AgentPhase.STOPPING:
        return _stop(state, message.grace_seconds)
    if message.last_step is not None:
        return _end_at_step(state, message, message.last_step)
    stopped = _stop(state, message.grace_seconds, graceful=message.planned, dump_stacks=message.dump_stacks)
    check = () if message.planned else (CheckHealth(),)
    return AgentDecision(
        stopped.state, (Log(f"round {message.round} ends: {message.reason}"), *stopped.effects, *check)
    )


def _results_ended(state: AgentState, round_id: RoundId) -> AgentDecision:
    """Report that no worker counts a step any more. The coordinator answers once that holds for all nodes."""
    if round_id != state.round or state.phase is not AgentPhase.STOPPING:
        return AgentDecision(state)
    if isinstance(state.after_stop, Finish):  # the job goes on without these workers, or has ended
        return AgentDecision(state, (_KILL,))
    return AgentDecision(replace(state, results_ended=True), (Send(NodeResultsEnded(round_id)),))


def _break_round(state: AgentState, message: BreakRound) -> AgentDecision:
    if message.round != state.round or not state.results_ended:
        return AgentDecision(state)
    state = replace(state, results_ended=False)
    if not message.discard:
        return AgentDecision(state, (LeaveCollectives(),))
    log = Log(
        f"round {message.round} has ended without this node, and its last steps may have used broken collectives:"
        " its processes end, and the training state on this node is not used"
    )
    return AgentDecision(state, (log, replace(_KILL, discard_state=True)))


def _end_at_step(state: AgentState, message: EndRound, step: int) -> AgentDecision:
    """Let running workers stop at the last step. Workers that have all exited before it count as succeeded."""
    if state.phase is not AgentPhase.RUNNING or state.last_step is not None:
        return AgentDecision(state)
    log = Log(f"round {message.round} ends after step {step}: {message.reason}")
    state = replace(state, last_step=step, last_step_seconds=message.grace_seconds)
    timer = (_leave_timer(state),) if state.leaving else ()
    return AgentDecision(state, (log, *timer, StopWorkersAt(message.round, step)))


def _stop(state: AgentState, grace: float, *, graceful: bool = False, dump_stacks: bool = False) -> AgentDecision:
    """Stop the workers; during a graceful stop, only shorten its grace period: other nodes may train already."""
    if state.phase is AgentPhase.STOPPING and (graceful or not state.stopping_gracefully):
        return AgentDecision(state)
    # Frozen workers get SIGKILL only: neither a SIGTERM handler nor the end of a function must write anything.
    for_good = bool(state.leaving) or isinstance(state.after_stop, Finish)
    usual = StopWorkers(grace, for_good=for_good, dump_stacks=dump_stacks)
    stop = _KILL if state.frozen else usual
    return AgentDecision(replace(state, phase=AgentPhase.STOPPING, stopping_gracefully=graceful), (stop,))


def _progress_timed_out(state: AgentState, round_id: RoundId) -> AgentDecision:
    """Dump the workers' stacks, which `_stack_report` sends; then stop the workers if a hang ends the round."""
    if round_id != state.round or state.phase is not AgentPhase.RUNNING or state.frozen:
        return AgentDecision(state)
    log = Log("no progress within the timeout: dumping the stacks of all workers")
    if not _hang_ends_round(state):
        return AgentDecision(state, (log, DumpStacks(round_id)))
    grace = min(state.stop_grace, HANG_GRACE)
    stopped = _stop(replace(state, member=MemberState.FAILED), grace, dump_stacks=True)
    return AgentDecision(stopped.state, (log, *stopped.effects))


def _hang_ends_round(state: AgentState) -> bool:
    return state.assignment is None or state.assignment.hang_ends_round


def _stack_report(state: AgentState, round_id: RoundId, failure: Failure) -> AgentDecision:
    if _hang_ends_round(state):
        return _failed_before_stop(state, round_id, failure)
    if round_id != state.round or state.phase is not AgentPhase.RUNNING:
        return AgentDecision(state)
    report = (Send(WorkersStalled(round_id, failure)), Log(f"{describe_failure(failure)}; nothing is restarted"))
    return AgentDecision(replace(state, stall=failure), report)


def _all_stopped(state: AgentState, event: AllWorkersStopped) -> AgentDecision:
    if state.phase is not AgentPhase.STOPPING:
        return AgentDecision(state)
    if event.unhealthy is not None and not state.leaving:
        # `Leaving` is sent before `WorkersStopped`: the coordinator must not take this node into the next round.
        leaving = _leave_unhealthy(state, event.unhealthy)
        stopped = _all_stopped(replace(leaving.state, leave_acknowledged=True), event)
        return AgentDecision(stopped.state, leaving.effects + stopped.effects)
    after_stop, store_port = state.after_stop, event.store_port
    state = replace(
        state,
        phase=AgentPhase.IDLE,
        member=MemberState.STOPPED,
        announcement=replace(state.announcement, store_port=store_port),
        results_ended=False,
        parked=event.parked,
        has_state=event.has_state,
        new_processes=event.new_processes,
        running_ranks=frozenset(),
        after_stop=None,
        frozen=False,
    )
    if isinstance(after_stop, Finish):
        return _exit(state, after_stop)
    if isinstance(after_stop, StartRound) and state.unhealthy is None:
        return _start(state, after_stop)
    report = (Send(_workers_stopped(state, state.round)),) if state.round else ()
    if not state.leaving:
        return AgentDecision(state, report)
    if not state.leave_acknowledged:
        left = _exit(state, Finish(Outcome.LEFT, state.leaving, "the coordinator did not answer"))
        return AgentDecision(left.state, report + left.effects)
    return AgentDecision(state, (*report, StartLeaveTimer(LEAVE_TIMEOUT)))


def _state_lost(state: AgentState) -> AgentDecision:
    """Correct what this node has reported, while it waits for the next round."""
    round_id = state.round
    if state.phase is not AgentPhase.IDLE or round_id is None or not (state.parked and state.has_state):
        return AgentDecision(state)
    state = replace(state, has_state=False)
    log = Log("the training state of this node ended with its process")
    return AgentDecision(state, (Send(_workers_stopped(state, round_id)), log))


def _workers_stopped(state: AgentState, round_id: RoundId) -> WorkersStopped:
    port, new = state.announcement.store_port, state.new_processes
    return WorkersStopped(round_id, port, has_state=state.has_state, new_processes=new)


def _signal_received(state: AgentState, name: str) -> AgentDecision:
    if state.signalled:
        ended = replace(state, phase=AgentPhase.STOPPING, after_stop=Finish(Outcome.LEFT, name))
        return AgentDecision(ended, (Log(f"{name} again: killing the workers"), _KILL))
    state = replace(state, signalled=True)
    if state.leaving:  # an unhealthy node, whose pod the operator deletes
        return AgentDecision(state)
    leaving = (Log(f"leaving: {name}"), Send(Leaving(name)), _leave_timer(state))
    return AgentDecision(replace(state, leaving=name), leaving)


def _leave_timer(state: AgentState) -> StartLeaveTimer:
    """Return the timer for the next message that a leaving node needs from the coordinator, or for its last step."""
    if state.last_step is not None:
        has_done_it = state.phase is AgentPhase.IDLE
        return StartLeaveTimer(LEAVE_TIMEOUT if has_done_it else state.last_step_seconds)
    return StartLeaveTimer(LAST_STEP_TIMEOUT if state.step_reported else max(1.0, state.stop_grace))


def _leave_timed_out(state: AgentState) -> AgentDecision:
    if state.phase is AgentPhase.IDLE:
        return _exit(state, Finish(Outcome.LEFT, state.leaving))
    if state.phase is AgentPhase.STOPPING or (state.leave_acknowledged and not _is_overdue(state)):
        return AgentDecision(state)
    if state.last_step is not None:
        log = Log(f"the workers have not stopped at step {state.last_step} in time: stopping them now")
        stopped = _stop(state, state.stop_grace)
    else:
        log = Log("the coordinator does not answer: stopping the workers")
        stopped = _stop(state, max(state.stop_grace, state.graceful_shutdown), graceful=True)
    return AgentDecision(stopped.state, (log, *stopped.effects))


def _is_overdue(state: AgentState) -> bool:
    """Return whether a planned end that the coordinator began has not continued in time."""
    started = state.phase in (AgentPhase.STARTING, AgentPhase.RUNNING)
    return started and (state.step_reported or state.last_step is not None)


def _finish(state: AgentState, finish: Finish) -> AgentDecision:
    if state.phase in (AgentPhase.IDLE, AgentPhase.SUCCEEDED):
        return _exit(state, finish)
    if state.results_ended:  # the coordinator does not answer any more
        return AgentDecision(replace(state, results_ended=False, after_stop=finish), (_KILL,))
    return _stop(replace(state, after_stop=finish), state.stop_grace)


def _exit(state: AgentState, finish: Finish) -> AgentDecision:
    """Write the termination message and exit, once processes that wait for a next round have ended.

    If the job goes on without this node, or may, they run no clean-up: it is the user's code, and must write no more.
    """
    if state.parked:
        job_goes_on = finish.outcome not in (Outcome.SUCCEEDED, Outcome.FAILED)
        stop = StopWorkers(state.stop_grace, for_good=True, job_goes_on=job_goes_on)
        ending = replace(state, phase=AgentPhase.STOPPING, parked=False, after_stop=finish, stopping_gracefully=False)
        return AgentDecision(ending, (stop,))
    failure = (state.unhealthy or state.failure) if finish.outcome is not Outcome.SUCCEEDED else None
    termination = Termination(finish.outcome, finish.reason, state.round, finish.message, failure)
    reason = f" ({finish.reason})" if finish.reason != finish.outcome.value else ""
    log = Log(f"done: {finish.outcome.value}{reason}{': ' + finish.message if finish.message else ''}")
    return AgentDecision(replace(state, phase=AgentPhase.FINISHED), (log, Exit(exit_code(finish), termination)))

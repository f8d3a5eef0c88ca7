"""A round ends: its workers stop, and the agent reports itself for the next one.

EndRound ──► StopWorkers ──► AllWorkersStopped ──► WorkersStopped is sent: Idle
    AllResultsEnded ──► NodeResultsEnded is sent ──► BreakRound ──► BreakCollectivesOfWorkers (functions that can be
        called again wait until no agent counts a step, before they break their collectives)
"""

from __future__ import annotations

from dataclasses import replace

from elasticjob._runtime.agent.state_machine.decision import AgentDecision
from elasticjob._runtime.agent.state_machine.effects import (
    BreakCollectivesOfWorkers,
    CheckHealth,
    Log,
    Send,
    StartLeaveTimer,
)
from elasticjob._runtime.agent.state_machine.endings.finish import exit_agent
from elasticjob._runtime.agent.state_machine.endings.leaving import FINISH_TIMEOUT, leave_unhealthy
from elasticjob._runtime.agent.state_machine.endings.worker_stop import KILL, begin_stop
from elasticjob._runtime.agent.state_machine.events import AllWorkersStopped
from elasticjob._runtime.agent.state_machine.greeting import workers_stopped
from elasticjob._runtime.agent.state_machine.round.planned_end import end_at_step
from elasticjob._runtime.agent.state_machine.round.round_start import start_round
from elasticjob._runtime.agent.state_machine.state import AgentState, Idle, Stopping
from elasticjob._runtime.contract.messages import (
    BreakRound,
    EndRound,
    Finish,
    MemberState,
    NodeResultsEnded,
    Outcome,
    StartRound,
)
from elasticjob._runtime.contract.names import RoundId


def end_round(state: AgentState, message: EndRound) -> AgentDecision:
    """Stop the workers of the round: now, or at the last step of a planned end."""
    stopping = state.stopping
    if isinstance(state.activity, Idle) or state.round is None or message.round > state.round:
        # No worker of that round was started here, and none is once the older ones have stopped.
        then = stopping.then if stopping is not None else None
        if stopping is not None and isinstance(then, StartRound) and then.round <= message.round:
            state = replace(state, activity=replace(stopping, then=None))
        return AgentDecision(state, (Send(workers_stopped(state, message.round)),))
    if message.round != state.round or (stopping and message.planned):
        return AgentDecision(state)
    if stopping:
        return begin_stop(state, message.grace_seconds)
    if message.last_step is not None:
        return end_at_step(state, message, message.last_step)
    stopped = begin_stop(state, message.grace_seconds, graceful=message.planned, dump_stacks=message.dump_stacks)
    check = () if message.planned else (CheckHealth(),)
    log = Log(f"round {message.round} ends: {message.reason}")
    return AgentDecision(stopped.state, (log, *stopped.effects, *check))


# ---- workers wait before they break their collectives ----------------------------------------------------------------


def results_ended(state: AgentState, round_id: RoundId) -> AgentDecision:
    """Report that no worker counts a step any more. The coordinator answers once that holds for all agents."""
    stopping = state.stopping
    if round_id != state.round or stopping is None:
        return AgentDecision(state)
    if isinstance(stopping.then, Finish):  # the job goes on without these workers, or has ended
        return AgentDecision(state, (KILL,))
    waiting = replace(state, activity=replace(stopping, results_ended=True))
    return AgentDecision(waiting, (Send(NodeResultsEnded(round_id)),))


def break_collectives(state: AgentState, message: BreakRound) -> AgentDecision:
    """Let the workers break their collectives, or kill them if other agents have broken theirs long ago."""
    stopping = state.stopping
    if message.round != state.round or stopping is None or not stopping.results_ended:
        return AgentDecision(state)
    state = replace(state, activity=replace(stopping, results_ended=False))
    if not message.discard:
        return AgentDecision(state, (BreakCollectivesOfWorkers(),))
    log = Log(
        f"round {message.round} has ended without this pod, and its last steps may have used broken collectives:"
        " its processes end, and the training state in this pod is not used"
    )
    return AgentDecision(state, (log, replace(KILL, discard_state=True)))


# ---- no worker is left -----------------------------------------------------------------------------------------------


def all_stopped(state: AgentState, event: AllWorkersStopped) -> AgentDecision:
    """Report that no worker is left; then exit, begin the round that waited for it, or wait for the next one."""
    if not isinstance(state.activity, Stopping):
        return AgentDecision(state)
    if event.unhealthy is not None and state.leave is None:
        # `Leaving` is sent before `WorkersStopped`: the coordinator must not take this agent into the next round.
        leaving = leave_unhealthy(state, event.unhealthy)
        return all_stopped(replace(leaving.state, end_announced=True), event).after(*leaving.effects)
    then = state.activity.then
    state = _idle(state, event)
    if isinstance(then, Finish):
        return exit_agent(state, then)
    if isinstance(then, StartRound) and (state.leave is None or state.leave.unhealthy is None):
        return start_round(state, then)
    report = (Send(workers_stopped(state, state.round)),) if state.round else ()
    if state.leave is None:
        return AgentDecision(state, report)
    if not state.end_announced:
        left = Finish(Outcome.LEFT, state.leaving, "the coordinator did not answer")
        return exit_agent(state, left).after(*report)
    return AgentDecision(state, (*report, StartLeaveTimer(FINISH_TIMEOUT)))


def _idle(state: AgentState, event: AllWorkersStopped) -> AgentState:
    round_ = state.last_round
    if round_ is not None:
        round_ = replace(round_, member=MemberState.STOPPED, running_ranks=frozenset(), frozen=False)
    return replace(
        state,
        activity=Idle(parked=event.parked),
        last_round=round_,
        announcement=replace(state.announcement, store_port=event.store_port),
        has_state=event.has_state,
        new_processes=event.new_processes,
    )


def state_lost(state: AgentState) -> AgentDecision:
    """Correct what this agent has reported, while it waits for the next round."""
    round_id, is_parked = state.round, isinstance(state.activity, Idle) and state.activity.parked
    if round_id is None or not is_parked or not state.has_state:
        return AgentDecision(state)
    state = replace(state, has_state=False)
    log = Log("the training state of this pod ended with its process")
    return AgentDecision(state, (Send(workers_stopped(state, round_id)), log))

"""An agent leaves the job while its workers run, or while it waits for a round.

SignalReceived, NodeUnhealthy ──► `leave` is set, `Leaving` is sent, the timer starts
    PlanEnd, EndRound ──► the round ends as the coordinator says; once no worker is left: WorkersStopped
        Finish ──► exit
        no Finish within FINISH_TIMEOUT ──► exit
    the timer is over before an answer ──► stop the workers, exit once none is left
    a second signal ──► kill the workers, exit
"""

from __future__ import annotations

from dataclasses import replace

from elasticjob._runtime.agent.state_machine.decision import AgentDecision
from elasticjob._runtime.agent.state_machine.effects import Log, Send, StartLeaveTimer
from elasticjob._runtime.agent.state_machine.endings.finish import exit_agent
from elasticjob._runtime.agent.state_machine.endings.outcomes import assert_never
from elasticjob._runtime.agent.state_machine.endings.worker_stop import KILL, begin_stop
from elasticjob._runtime.agent.state_machine.state import (
    AgentState,
    Idle,
    LastStep,
    Leave,
    Running,
    Starting,
    StepReported,
    Stopping,
)
from elasticjob._runtime.contract.messages import Failure, Finish, Leaving, Outcome

FINISH_TIMEOUT = 10.0
"""Seconds that a leaving agent whose workers have ended waits for the coordinator's `Finish`."""
LAST_STEP_TIMEOUT = 5.0
"""Seconds that a leaving agent which has reported its step waits for the last step. The coordinator answers within
`planned_end.STEP_REPORT_TIMEOUT`; when a job is deleted, its store may end in between."""


def leave_unhealthy(state: AgentState, failure: Failure) -> AgentDecision:
    """Leave, and ask for a replacement on another Node. An agent that is leaving already does nothing more."""
    if state.leave is not None:
        return AgentDecision(state)
    state = replace(state, leave=Leave(unhealthy=failure))
    log = Log(f"a health check failed, this pod leaves: {failure.message}")
    return AgentDecision(state, (log, Send(Leaving(state.leaving, failure)), leave_timer(state)))


def leave_on_signal(state: AgentState, name: str) -> AgentDecision:
    """Leave on the first signal; kill the workers on the second one."""
    if state.leave is not None and state.leave.signal:
        stopping = replace(state.stopping or Stopping(), then=Finish(Outcome.LEFT, name))
        return AgentDecision(replace(state, activity=stopping), (Log(f"{name} again: killing the workers"), KILL))
    if state.leave is not None:  # the Node is unhealthy: the operator deletes the pod
        return AgentDecision(replace(state, leave=replace(state.leave, signal=name)))
    state = replace(state, leave=Leave(signal=name))
    return AgentDecision(state, (Log(f"leaving: {name}"), Send(Leaving(name)), leave_timer(state)))


def leave_timer(state: AgentState) -> StartLeaveTimer:
    """Return the timer for the next message that a leaving agent needs from the coordinator, or for its last step."""
    match state.planned_end:
        case LastStep(seconds=seconds):
            step_is_done = isinstance(state.activity, Idle)
            return StartLeaveTimer(FINISH_TIMEOUT if step_is_done else seconds)
        case StepReported():
            return StartLeaveTimer(LAST_STEP_TIMEOUT)
        case None:
            return StartLeaveTimer(max(1.0, state.stop_grace))
        case _ as never:
            return assert_never(never)


def leave_timed_out(state: AgentState) -> AgentDecision:
    """Stop the workers without the coordinator, or exit if none is left."""
    match state.activity:
        case Idle():
            return exit_agent(state, Finish(Outcome.LEFT, state.leaving))
        case Stopping():
            return AgentDecision(state)
        case _ if state.end_announced and not _is_overdue(state):
            return AgentDecision(state)
        case _:
            return _leave_without_coordinator(state)


def _is_overdue(state: AgentState) -> bool:
    """Return whether a planned end that the coordinator began has not continued in time."""
    return state.planned_end is not None and isinstance(state.activity, (Starting, Running))


def _leave_without_coordinator(state: AgentState) -> AgentDecision:
    if isinstance(state.planned_end, LastStep):
        log = Log(f"the workers have not stopped at step {state.planned_end.step} in time: stopping them now")
        return begin_stop(state, state.stop_grace).after(log)
    grace = max(state.stop_grace, state.graceful_shutdown)
    return begin_stop(state, grace, graceful=True).after(Log("the coordinator does not answer: stopping the workers"))

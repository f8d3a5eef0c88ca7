"""A planned end of a round: all agents stop after the same step, so that no step is lost.

    PlanEnd ──► HoldWorkers ──► WorkersHeld ──► StepReport is sent: `StepReported`
        EndRound with a last step ──► `LastStep` ──► StopWorkersAt ──► all workers stop at it ──► StopWorkers
            LastStepMissed ──► StopWorkers

An agent whose workers do not run, or do not report their steps, answers `PlanEnd` at once, without a step.
"""

from __future__ import annotations

from dataclasses import replace

from elasticjob._runtime.agent.state_machine.decision import AgentDecision
from elasticjob._runtime.agent.state_machine.effects import HoldWorkers, Log, Send, StopWorkersAt
from elasticjob._runtime.agent.state_machine.endings.leaving import leave_timer
from elasticjob._runtime.agent.state_machine.endings.worker_stop import begin_stop
from elasticjob._runtime.agent.state_machine.greeting import workers_stopped
from elasticjob._runtime.agent.state_machine.state import AgentState, Idle, LastStep, Running, StepReported, Succeeded
from elasticjob._runtime.contract.messages import EndRound, PlanEnd, StepReport
from elasticjob._runtime.contract.names import RoundId


def plan_end(state: AgentState, message: PlanEnd) -> AgentDecision:
    """Hold the workers, to report their latest step. Workers that have exited still have one."""
    round_ = state.last_round
    match state.activity:
        case Running() | Succeeded() if round_ is not None and message.round == round_.id:
            return AgentDecision(state, () if round_.last_step else (HoldWorkers(message.round),))
        case Idle():
            return AgentDecision(state, (Send(workers_stopped(state, message.round)),))
        case _:
            return _report_step(state, message.round, None)


def workers_held(state: AgentState, round_id: RoundId, step: int | None) -> AgentDecision:
    """Report the latest step that a worker may have completed."""
    if round_id != state.round or not isinstance(state.activity, (Running, Succeeded)):
        return AgentDecision(state)
    return _report_step(state, round_id, step)


def _report_step(state: AgentState, round_id: RoundId, step: int | None) -> AgentDecision:
    round_ = state.last_round
    if round_ is not None and round_id == round_.id and round_.planned_end is None:
        state = replace(state, last_round=replace(round_, planned_end=StepReported()))
    timer = (leave_timer(state),) if state.leave else ()
    return AgentDecision(state, (Send(StepReport(round_id, step)), *timer))


def end_at_step(state: AgentState, message: EndRound, step: int) -> AgentDecision:
    """Let running workers stop at the last step. Workers that have all exited before it count as succeeded."""
    round_ = state.last_round
    if round_ is None or not isinstance(state.activity, Running) or round_.last_step:
        return AgentDecision(state)
    log = Log(f"round {message.round} ends after step {step}: {message.reason}")
    state = replace(state, last_round=replace(round_, planned_end=LastStep(step, message.grace_seconds)))
    timer = (leave_timer(state),) if state.leave else ()
    if state.waits_for_stage:  # no rank is left that could stop at it
        return begin_stop(state, state.stop_grace, graceful=True).after(log, *timer)
    return AgentDecision(state, (log, *timer, StopWorkersAt(message.round, step)))


def last_step_missed(state: AgentState, round_id: RoundId) -> AgentDecision:
    """Stop workers that may be past the last step."""
    round_ = state.last_round
    if round_ is None or round_id != round_.id or not isinstance(state.activity, Running):
        return AgentDecision(state)
    seconds = round_.last_step.seconds if round_.last_step else 0.0
    log = Log("workers may be past the last step: stopping them now")
    return begin_stop(state, max(state.stop_grace, seconds), graceful=True).after(log)

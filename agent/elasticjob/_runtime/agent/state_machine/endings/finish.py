"""The end of an agent: the job is over, or goes on without this agent."""

from __future__ import annotations

from dataclasses import replace

from elasticjob._runtime.agent.state_machine.decision import AgentDecision
from elasticjob._runtime.agent.state_machine.effects import Exit, Log, StopWorkers
from elasticjob._runtime.agent.state_machine.endings.outcomes import exit_code
from elasticjob._runtime.agent.state_machine.endings.worker_stop import KILL, begin_stop
from elasticjob._runtime.agent.state_machine.state import AgentState, Finished, Idle, Stopping, Succeeded
from elasticjob._runtime.contract.messages import Finish, Outcome, Termination


def finish_agent(state: AgentState, finish: Finish) -> AgentDecision:
    """Stop what runs in this pod, then exit with the outcome."""
    match state.activity:
        case Idle() | Succeeded():
            return exit_agent(state, finish)
        case Stopping(results_ended=True) as stopping:
            # These workers wait for an answer of the coordinator, and `Finish` is its last message.
            stopping = replace(stopping, results_ended=False, then=finish)
            return AgentDecision(replace(state, activity=stopping), (KILL,))
        case _:
            return begin_stop(state, state.stop_grace, then=finish)


def exit_agent(state: AgentState, finish: Finish) -> AgentDecision:
    """Write the termination message and exit, once processes that wait for a next round have ended.

    If the job goes on without this agent, or may, those processes run no clean-up: it is the user's code, and must not
    write any more.
    """
    if isinstance(state.activity, Idle) and state.activity.parked:
        job_goes_on = finish.outcome not in (Outcome.SUCCEEDED, Outcome.FAILED)
        stop = StopWorkers(state.stop_grace, for_good=True, job_goes_on=job_goes_on)
        return AgentDecision(replace(state, activity=Stopping(then=finish)), (stop,))
    cause = (state.leave.unhealthy if state.leave else None) or state.failure
    failure = cause if finish.outcome is not Outcome.SUCCEEDED else None
    termination = Termination(finish.outcome, finish.reason, state.round, finish.message, failure)
    reason = f" ({finish.reason})" if finish.reason != finish.outcome.value else ""
    log = Log(f"done: {finish.outcome.value}{reason}{': ' + finish.message if finish.message else ''}")
    return AgentDecision(replace(state, activity=Finished()), (log, Exit(exit_code(finish), termination)))

"""The agent's decisions: `decide(state, event)` returns the next state and the effects to carry out. Pure.

             start_round        workers_launched         worker_ended: all exit 0
    Idle ──────────────► Starting ─────────────► Running ─────────────► Succeeded
     ▲                       │                      │                       │
     │                       └──────────┬───────────┴───────────────────────┘
     │  all_stopped                     │ begin_stop: a failure here or elsewhere, a planned end, a newer round,
     └───────────────── Stopping ◄──────┘             a hang, the agent leaves, the job is over
                            │
                            └── all_stopped after `Finish` ──► Finished (from Idle and Succeeded at once)

In `Idle` no worker of a round runs. Processes whose function can be called again may wait there for the next round. A
agent that waits for a round of such a job prestarts the ones that are missing (`wait_for_round`), and reports itself
ready once they wait too.

Three things run beside this. A planned end (`planned_end`) goes from nothing to `StepReported` to `LastStep` while the
workers run. A departure (`leaving`) is a `Leave` in the state: it never goes back. Where the command has launchers that
follow each other, `Running` lasts over all of them (`stages`): `ended_stage` says which of them wait to end.

The link may be lost at any time. On every new link an agent sends `greeting(state)` first: no message is lost.
"""

from __future__ import annotations

from dataclasses import replace

from elasticjob._runtime.agent.state_machine.decision import AgentDecision
from elasticjob._runtime.agent.state_machine.effects import Log, SetNodeEnd
from elasticjob._runtime.agent.state_machine.endings.finish import finish_agent
from elasticjob._runtime.agent.state_machine.endings.leaving import leave_on_signal, leave_timed_out, leave_unhealthy
from elasticjob._runtime.agent.state_machine.endings.outcomes import assert_never
from elasticjob._runtime.agent.state_machine.endings.worker_ends import (
    cut_off,
    log_condition_met,
    progress_timed_out,
    stacks_dumped,
    worker_ended,
)
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
    StageOver,
    StageStarted,
    StateLost,
    StoreUnreachable,
    WorkerEnded,
    WorkersHeld,
    WorkersLaunched,
    WorkersPrestarted,
)
from elasticjob._runtime.agent.state_machine.greeting import greeting
from elasticjob._runtime.agent.state_machine.round.planned_end import last_step_missed, plan_end, workers_held
from elasticjob._runtime.agent.state_machine.round.round_end import (
    all_stopped,
    break_collectives,
    end_round,
    results_ended,
    state_lost,
)
from elasticjob._runtime.agent.state_machine.round.round_start import (
    continue_frozen,
    function_called,
    hang_guarded,
    launcher_is_ready,
    prestarted,
    start_round,
    wait_for_round,
    workers_launched,
)
from elasticjob._runtime.agent.state_machine.round.stages import stage_finished, stage_over, stage_started
from elasticjob._runtime.agent.state_machine.state import AgentState, Finished
from elasticjob._runtime.contract.messages import (
    BreakRound,
    Closed,
    CoordinatorToAgent,
    EndRound,
    Finish,
    MachineEnd,
    Outcome,
    PlanEnd,
    StageFinished,
    Standby,
    StartRound,
)

__all__ = ["AgentDecision", "decide", "greeting"]


def decide(state: AgentState, event: AgentEvent) -> AgentDecision:
    """Return the decision on one event. In `Finished` every event is ignored."""
    if isinstance(state.activity, Finished):
        return AgentDecision(state)
    match event:
        case Received(message):
            return _coordinator_message(state, message)
        case LauncherReady(fork_disabled_reason):
            return launcher_is_ready(state, fork_disabled_reason)
        case WorkersPrestarted():
            return prestarted(state)
        case FunctionCalled():
            return function_called(state)
        case HangGuardKnown(status):
            return hang_guarded(state, status)
        case WorkersLaunched(round_id):
            return workers_launched(state, round_id)
        case WorkerEnded():
            return worker_ended(state, event)
        case StageStarted(round_id, stage, launcher):
            return stage_started(state, round_id, stage, launcher)
        case StageOver(round_id, stage):
            return stage_over(state, round_id, stage)
        case WorkersHeld(round_id, step):
            return workers_held(state, round_id, step)
        case LastStepMissed(round_id):
            return last_step_missed(state, round_id)
        case AllResultsEnded(round_id):
            return results_ended(state, round_id)
        case StateLost():
            return state_lost(state)
        case AllWorkersStopped():
            return all_stopped(state, event)
        case ProgressTimedOut(round_id):
            return progress_timed_out(state, round_id)
        case StackReport(round_id, failure):
            return stacks_dumped(state, round_id, failure)
        case LogConditionMet(round_id, failure, ends_round):
            return log_condition_met(state, round_id, failure, ends_round=ends_round)
        case NodeUnhealthy(failure):
            return leave_unhealthy(state, failure)
        case CutOff():
            return cut_off(state)
        case SignalReceived(name):
            return leave_on_signal(state, name)
        case LeaveTimedOut():
            return leave_timed_out(state)
        case StoreUnreachable(reason):
            return finish_agent(state, Finish(Outcome.ERROR, "StoreUnreachable", reason))
        case _ as never:
            return assert_never(never)


def _coordinator_message(state: AgentState, message: CoordinatorToAgent) -> AgentDecision:
    if isinstance(message, (PlanEnd, EndRound, Finish)):
        state = replace(state, end_announced=True)
    match message:
        case StartRound():
            return start_round(state, message)
        case Standby():
            return wait_for_round(state, message)
        case Closed(reason):
            return AgentDecision(state, (Log(f"no further round will form: {reason}"),))
        case StageFinished():
            return stage_finished(state, message)
        case PlanEnd():
            # The round runs until its last step. Frozen workers could not reach it.
            continued = continue_frozen(state, message.round)
            return plan_end(continued.state, message).after(*continued.effects)
        case EndRound(last_step=int()):
            continued = continue_frozen(state, message.round)
            return end_round(continued.state, message).after(*continued.effects)
        case EndRound():
            return end_round(state, message)
        case BreakRound():
            return break_collectives(state, message)
        case Finish():
            return finish_agent(state, message)
        case MachineEnd(seconds):
            return _node_end(state, seconds)
        case _ as never:
            return assert_never(never)


def _node_end(state: AgentState, seconds: float | None) -> AgentDecision:
    known = "is announced no longer" if seconds is None else f"is announced, in {seconds:.0f} s"
    announcement = replace(state.announcement, knows_machine_end=seconds is not None)
    log = Log(f"the end of this Node {known}")
    return AgentDecision(replace(state, announcement=announcement), (log, SetNodeEnd(seconds)))

"""A worker ends, or all workers stop making progress."""

from __future__ import annotations

from dataclasses import replace

from elasticjob._runtime.agent.state_machine.decision import AgentDecision
from elasticjob._runtime.agent.state_machine.effects import CheckHealth, DumpStacks, FreezeWorkers, Log, Send
from elasticjob._runtime.agent.state_machine.endings.leaving import leave_unhealthy
from elasticjob._runtime.agent.state_machine.endings.outcomes import describe_failure
from elasticjob._runtime.agent.state_machine.endings.worker_stop import begin_stop
from elasticjob._runtime.agent.state_machine.events import WorkerEnded
from elasticjob._runtime.agent.state_machine.state import AgentRound, AgentState, Running, Starting, Stopping, Succeeded
from elasticjob._runtime.contract.messages import (
    Failure,
    FailureClass,
    MemberState,
    WorkersFailed,
    WorkersStalled,
    WorkersSucceeded,
)
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.diagnosis import HANG_GRACE


def worker_ended(state: AgentState, event: WorkerEnded) -> AgentDecision:
    """Handle the end of one worker: a failure, a stop at the last step, or a success."""
    round_ = state.last_round
    if round_ is None or event.round != round_.id:
        return AgentDecision(state)
    if isinstance(state.activity, Stopping) and event.failure:
        return _report_failure_while_stopping(state, event.round, event.failure)
    if not isinstance(state.activity, (Starting, Running)):
        return AgentDecision(state)
    round_ = replace(
        round_,
        running_ranks=round_.running_ranks - {event.local_rank},
        stopped_as_planned=round_.stopped_as_planned or event.as_planned,
    )
    state = replace(state, last_round=round_)
    if event.failure:
        return _worker_failed(state, round_, event.failure)
    if round_.running_ranks:
        return AgentDecision(state)
    if round_.stopped_as_planned:
        return begin_stop(state, state.stop_grace)
    state = replace(state, activity=Succeeded(), last_round=replace(round_, member=MemberState.SUCCEEDED))
    log = Log("all workers of this pod succeeded; waiting for those of the other pods")
    return AgentDecision(state, (Send(WorkersSucceeded(round_.id)), log))


def _worker_failed(state: AgentState, round_: AgentRound, failure: Failure) -> AgentDecision:
    """Report the failure, stop the other workers, check the Node; leave if the failure is one of the device."""
    state = replace(state, last_round=replace(round_, member=MemberState.FAILED, failure=failure))
    stopped = begin_stop(state, state.stop_grace)
    report = (Send(WorkersFailed(round_.id, failure)), Log(describe_failure(failure)))
    decision = AgentDecision(stopped.state, (*report, *stopped.effects, CheckHealth()))
    if failure.kind is not FailureClass.DEVICE_UNHEALTHY:
        return decision
    return leave_unhealthy(decision.state, failure).after(*decision.effects)


def _report_failure_while_stopping(state: AgentState, round_id: RoundId, failure: Failure) -> AgentDecision:
    """Report a worker that failed before the stop and ended after it: it may be the root cause of other failures."""
    round_ = state.last_round
    if round_ is None or round_id != round_.id or not isinstance(state.activity, Stopping):
        return AgentDecision(state)
    if failure.kind is FailureClass.COLLECTIVE_FAILED:
        return AgentDecision(state)
    if round_.failure is None or round_.failure.kind is FailureClass.COLLECTIVE_FAILED:
        state = replace(state, last_round=replace(round_, failure=failure))
    return AgentDecision(state, (Send(WorkersFailed(round_id, failure)), Log(describe_failure(failure))))


# ---- hangs -----------------------------------------------------------------------------------------------------------


def progress_timed_out(state: AgentState, round_id: RoundId) -> AgentDecision:
    """Dump the workers' stacks, which `stacks_dumped` sends; then stop the workers if a hang ends the round."""
    round_ = state.last_round
    if round_ is None or round_id != round_.id or not isinstance(state.activity, Running) or round_.frozen:
        return AgentDecision(state)
    log = Log("no progress within the timeout: dumping the stacks of all workers")
    if not round_.start.hang_ends_round:
        return AgentDecision(state, (log, DumpStacks(round_id)))
    state = replace(state, last_round=replace(round_, member=MemberState.FAILED))
    return begin_stop(state, min(state.stop_grace, HANG_GRACE), dump_stacks=True).after(log)


def stacks_dumped(state: AgentState, round_id: RoundId, failure: Failure) -> AgentDecision:
    """Report the worker that is farthest behind: as a failure if a hang ends the round, else only as a stall."""
    round_ = state.last_round
    if round_ is None or round_id != round_.id:
        return AgentDecision(state)
    if round_.start.hang_ends_round:
        return _report_failure_while_stopping(state, round_id, failure)
    if not isinstance(state.activity, Running):
        return AgentDecision(state)
    report = (Send(WorkersStalled(round_id, failure)), Log(f"{describe_failure(failure)}; nothing is restarted"))
    return AgentDecision(replace(state, last_round=replace(round_, stall=failure)), report)


def log_condition_met(state: AgentState, round_id: RoundId, failure: Failure, *, ends_round: bool) -> AgentDecision:
    """Report a worker whose output has met a condition: as its failure if that ends the round, else as a stall."""
    round_ = state.last_round
    if round_ is None or round_id != round_.id or round_.frozen or not isinstance(state.activity, (Starting, Running)):
        return AgentDecision(state)
    if ends_round:
        return _worker_failed(state, round_, failure)
    report = (Send(WorkersStalled(round_id, failure)), Log(f"{describe_failure(failure)}; nothing is restarted"))
    return AgentDecision(replace(state, last_round=replace(round_, stall=failure)), report)


# ---- no permission to write ------------------------------------------------------------------------------------------


def cut_off(state: AgentState) -> AgentDecision:
    """Freeze the workers: the other agents may train without this one, whose workers must not overwrite a checkpoint.

    Workers that already stop gracefully are killed. Not if this agent leaves: when a job is deleted, its store and its
    other agents may end first, which looks the same.
    """
    reason = "cut off from the store and from half or more of the round's pods"
    round_ = state.last_round
    match state.activity:
        case Stopping(graceful=True) if state.leave is None:
            return begin_stop(state, 0.0).after(Log(f"{reason}: killing the workers"))
        case Starting() | Running() if round_ is not None and not round_.frozen:
            frozen = replace(state, last_round=replace(round_, frozen=True))
            return AgentDecision(frozen, (FreezeWorkers(True), Log(f"{reason}: the workers are frozen")))
        case _:
            return AgentDecision(state)

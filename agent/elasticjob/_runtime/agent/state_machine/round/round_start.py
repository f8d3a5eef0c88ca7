"""A round forms with this agent: its workers start, at once or as soon as the agent is ready."""

from __future__ import annotations

from dataclasses import replace

from elasticjob._runtime.agent.state_machine.decision import AgentDecision
from elasticjob._runtime.agent.state_machine.effects import (
    AdmitWorkers,
    FreezeWorkers,
    LaunchWorkers,
    Log,
    PrestartWorkers,
    Send,
)
from elasticjob._runtime.agent.state_machine.endings.worker_stop import begin_stop
from elasticjob._runtime.agent.state_machine.round.stages import learn_stages
from elasticjob._runtime.agent.state_machine.state import AgentRound, AgentState, Idle, Running, Starting
from elasticjob._runtime.contract.messages import Finish, MemberState, Ready, Standby, StartRound, WorkersStarted
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.contract.text import with_noun

# ---- the round -------------------------------------------------------------------------------------------------------


def start_round(state: AgentState, start: StartRound) -> AgentDecision:
    """Begin a new round. Workers of an older one are stopped first."""
    if state.round is not None and start.round <= state.round:
        return continue_frozen(state, start.round)  # the coordinator repeats it to an agent that announces itself again
    if state.stopping is not None and isinstance(state.stopping.then, Finish):
        return AgentDecision(state, (Log(f"round {start.round} is not started: this agent is about to exit"),))
    if not isinstance(state.activity, Idle):
        log = Log(f"round {start.round} replaces {state.round}")
        return begin_stop(state, state.stop_grace, then=start).after(log)
    state = learn_stages(state, start.finished_stages, start.launchers)
    workers = range(state.processes or state.announcement.local_world_size)
    round_ = AgentRound(start, frozenset(workers), launched=state.ready)
    state = replace(
        state,
        activity=Starting(),
        last_round=round_,
        end_announced=state.end_announced and state.leave is not None,
        new_processes=replace(state.new_processes, count=0),
    )
    formed = Log(
        f"round {start.round} formed: {with_noun(start.group_world_size, 'pod')},"
        f" ranks {start.rank}-{start.rank + state.announcement.local_world_size - 1} of {start.world_size} here"
    )
    # The workers of other pods may connect before this agent is ready.
    admitted = (AdmitWorkers(start),) if start.group_rank == 0 else ()
    if state.ready:
        return AgentDecision(state, (formed, *admitted, LaunchWorkers(start)))
    what = "their script has reached its function" if state.prestarting else "the agent is ready"
    return AgentDecision(state, (formed, *admitted, Log(f"workers start once {what}")))


def workers_launched(state: AgentState, round_id: RoundId) -> AgentDecision:
    """Report that all workers of the round have started."""
    round_ = state.last_round
    if round_ is None or round_id != round_.id or not isinstance(state.activity, Starting):
        return AgentDecision(state)
    running = replace(state, activity=Running(), last_round=replace(round_, member=MemberState.RUNNING))
    freeze = (FreezeWorkers(True),) if round_.frozen else ()
    return AgentDecision(running, (Send(WorkersStarted(round_id)), *freeze))


def continue_frozen(state: AgentState, round_id: RoundId) -> AgentDecision:
    """Continue frozen workers: the coordinator has reported that their round still runs."""
    round_ = state.last_round
    if round_ is None or round_id != round_.id or not round_.frozen:
        return AgentDecision(state)
    log = Log(f"round {round_id} still runs: continuing the frozen workers")
    return AgentDecision(replace(state, last_round=replace(round_, frozen=False)), (log, FreezeWorkers(False)))


# ---- ready for a round -----------------------------------------------------------------------------------------------


def wait_for_round(state: AgentState, message: Standby) -> AgentDecision:
    """Wait for the next round. Workers whose function can be called again run their script up to it meanwhile."""
    waiting = Log(message.reason if message.reason.startswith("waiting") else f"waiting: {message.reason}")
    if state.last_round is not None and not state.new_processes.count:  # its processes are parked
        return AgentDecision(state, (waiting,))
    state = replace(state, provisional=message.provisional)
    if not state.ready or not _may_prestart(state):
        return AgentDecision(state, (waiting,))
    return _prestart(state).after(waiting)


def launcher_is_ready(state: AgentState, fork_disabled_reason: str) -> AgentDecision:
    """Start what the agent needs for a round, or report that it is ready."""
    announcement = replace(state.announcement, fork_disabled_reason=fork_disabled_reason)
    is_first = not state.launcher_ready
    state = replace(state, launcher_ready=True, announcement=announcement)
    return _prestart(state) if is_first and _may_prestart(state) else _report_ready(state)


def prestarted(state: AgentState) -> AgentDecision:
    """Report ready, unless a round took this agent in the meantime and ended together with what was started."""
    state = replace(state, prestarting=False)
    return _prestart(state) if _may_prestart(state) else _report_ready(state)


def _may_prestart(state: AgentState) -> bool:
    """Return whether there are processes to start: all before the first round, later those that could not stay."""
    if state.provisional is None or state.leave is not None or not isinstance(state.activity, Idle):
        return False
    return state.new_processes.count > 0 if state.last_round is not None else not state.activity.parked


def _prestart(state: AgentState) -> AgentDecision:
    assert state.provisional is not None  # noqa: S101
    begun = replace(state.new_processes, count=0)
    prestarting = replace(state, activity=Idle(parked=True), provisional=None, prestarting=True, new_processes=begun)
    log = Log("the function of this job can be called again: running the script up to it, ahead of the next round")
    return AgentDecision(prestarting, (log, PrestartWorkers(state.provisional)))


# ---- what the agent reports with `Ready` -----------------------------------------------------------------------------


def _report_ready(state: AgentState) -> AgentDecision:
    """Report that workers can start at once, and start those of a round that waits for it."""
    if not state.ready:
        return AgentDecision(state)
    me, round_ = state.announcement, state.last_round
    ready = Send(Ready(me.fork_disabled_reason, me.restartable, me.hang_guard))
    if isinstance(state.activity, Starting) and round_ is not None and not round_.launched:
        launched = replace(state, last_round=replace(round_, launched=True))
        return AgentDecision(launched, (ready, LaunchWorkers(round_.start)))
    return AgentDecision(state, (ready,))


def function_called(state: AgentState) -> AgentDecision:
    """Report once, from the agent of group rank 0, that the function of this job can be called again."""
    has_group_rank_0 = state.last_round is not None and state.last_round.start.group_rank == 0
    if state.announcement.restartable or not has_group_rank_0:
        return AgentDecision(state)
    return _report_ready(replace(state, announcement=replace(state.announcement, restartable=True)))


def hang_guarded(state: AgentState, status: str) -> AgentDecision:
    """Report what guards the workers, from the agent of group rank 0: all agents run the same script.

    An agent that had this rank earlier keeps its report up to date.
    """
    before = state.announcement.hang_guard
    reports = state.last_round is not None and (state.last_round.start.group_rank == 0 or before)
    if before == status or not reports:
        return AgentDecision(state)
    decision = _report_ready(replace(state, announcement=replace(state.announcement, hang_guard=status)))
    return decision.after(Log(f"hang guard: {status}")) if status else decision

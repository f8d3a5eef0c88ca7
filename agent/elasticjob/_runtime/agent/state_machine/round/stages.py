"""A launcher of the command ends once the coordinator has finished its stage (`rendezvous.rounds.stages`).

StageOver ──► StageEnded is sent, the launcher waits ──► StageFinished ──► EndLaunchers
    the round ends before ──► StopWorkers; the launcher goes on waiting, and the next round starts its ranks again
"""

from __future__ import annotations

from dataclasses import replace

from elasticjob._runtime.agent.state_machine.decision import AgentDecision
from elasticjob._runtime.agent.state_machine.effects import EndLaunchers, Log, Send
from elasticjob._runtime.agent.state_machine.endings.worker_stop import begin_stop
from elasticjob._runtime.agent.state_machine.state import AgentState, Running, Starting
from elasticjob._runtime.contract.messages import StageBegan, StageEnded, StageFinished
from elasticjob._runtime.contract.names import MAX_LAUNCHERS, RoundId


def stage_started(state: AgentState, round_id: RoundId, stage: int, launcher: str) -> AgentDecision:
    """Report what a launcher runs, and keep it for other coordinators."""
    known = state.announcement.launchers
    if stage == len(known) + 1 <= MAX_LAUNCHERS:
        state = replace(state, announcement=replace(state.announcement, launchers=(*known, launcher)))
    return AgentDecision(state, (Send(StageBegan(round_id, stage, launcher)),))


def stage_over(state: AgentState, round_id: RoundId, stage: int) -> AgentDecision:
    """Report that all ranks of a launcher have ended, unless its stage is finished already."""
    round_ = state.last_round
    if round_ is None or round_id != round_.id or not isinstance(state.activity, (Starting, Running)):
        return AgentDecision(state)
    if stage <= state.announcement.finished_stages:
        return AgentDecision(state, (EndLaunchers(stage),))
    state = replace(state, last_round=replace(round_, ended_stage=max(stage, round_.ended_stage)))
    report = (
        Send(StageEnded(round_id, stage)),
        Log(f"all ranks of launcher {stage} of the command have ended here; it waits for those of the other pods"),
    )
    if round_.last_step:  # no rank is left that could stop at it
        return begin_stop(state, state.stop_grace, graceful=True).after(*report)
    return AgentDecision(state, report)


def stage_finished(state: AgentState, message: StageFinished) -> AgentDecision:
    """Keep what is finished, and let the launcher of this round end."""
    state = learn_stages(state, message.stage)
    if message.round != state.round or not isinstance(state.activity, (Starting, Running)):
        return AgentDecision(state)
    return AgentDecision(state, (EndLaunchers(message.stage),))


def learn_stages(state: AgentState, finished: int, launchers: tuple[str, ...] = ()) -> AgentState:
    """Return the state with the stages that the coordinator has named; what is known of them only grows."""
    me = state.announcement
    known = launchers if len(launchers) > len(me.launchers) else me.launchers
    finished = max(finished, me.finished_stages)
    return replace(state, announcement=replace(me, finished_stages=finished, launchers=known))

"""Stages: the launchers that follow each other in the command of a pod. Pure.

`torchrun prepare.py && torchrun train.py` has two stages. Every agent counts the launchers of its pod's command from 1.

    agent                                                coordinator
    all ranks of launcher k have ended: StageEnded(k)  ──►
      (the launcher waits, and with it the command)         every member of the round has reported k
                                                       ◄──  StageFinished(k)
    launcher k ends, the command goes on to launcher k+1

**Who decides.** Only the coordinator: a stage is finished once every member of one round has reported that all its
ranks have ended in that round, with success or by a signal of the command's own. (A failed rank ends the round
instead.) A member whose whole command has succeeded has passed all stages. With successPolicy Any one member is enough.
`CoordinatorState.finished_stages` only grows. What was reported stays true if the member is lost, or the round ends,
before the others report.

**A round begins in one stage.** `StartRound.finished_stages` is n. Each agent then is at launcher n+1: one that waits
there starts its ranks again, and any other runs the command again, in which the first n launchers return 0 at once.
So does a pod that is new, and an agent that has missed `StageFinished`, or is ahead for any other reason. No agent
starts ranks of another stage, so there are never two worlds, and none waits for ranks that do not come.

A command may skip finished launchers by itself (`[ -e done ] || torchrun prepare.py`), so a number is not enough.
`StageBegan` names what each launcher runs, and `StartRound.launchers` has the names so far: by these the agent finds
out at which launcher its command is (`pod_command.stage.stage_of`).

**No fact is lost with a store.** Each agent keeps the highest n that it was sent, and announces it together with the
stage that it has reported in its round. A new store takes the highest n that any agent announces, or the operator has
read from `status.stages`, and decides again with the members of the round that it restores. While no store runs,
launchers wait.

**What may run again.** If a member is lost, or the round ends, after some ranks have ended and before all members have
reported it, the stage is not finished, and all its ranks run again in the next round; the agents log that. If the store
and every agent end at the same time, status knows what was finished a few seconds before.
"""

from __future__ import annotations

from dataclasses import replace

from elasticjob._runtime.contract.messages import (
    MemberState,
    StageBegan,
    StageEnded,
    StageFinished,
    SuccessPolicy,
)
from elasticjob._runtime.contract.names import MAX_LAUNCHERS
from elasticjob._runtime.rendezvous.decision import RoundDecision
from elasticjob._runtime.rendezvous.state import CoordinatorState, KnownAgent, Round, SendToAgent, set_agent, set_member


def record_stage(state: CoordinatorState, agent: KnownAgent, message: StageEnded) -> CoordinatorState:
    """Return the state with a stage that has ended on a member; during recovery it is part of what was announced."""
    if state.recovering_until is not None:
        last = agent.membership
        if last is None or last.assignment.round != message.round:
            return state
        announced = replace(last, ended_stage=max(last.ended_stage, message.stage))
        return set_agent(state, replace(agent, membership=announced))
    round_ = state.round
    member = round_.members.get(agent.agent_id) if round_ is not None and round_.id == message.round else None
    if round_ is None or member is None or member.lost or message.stage <= member.ended_stage:
        return state
    return replace(state, round=set_member(round_, agent.agent_id, replace(member, ended_stage=message.stage)))


def record_launcher(state: CoordinatorState, message: StageBegan) -> CoordinatorState:
    """Return the state with the name of a launcher that the first agent has reached."""
    if message.stage != len(state.launchers) + 1 or message.stage > MAX_LAUNCHERS:
        return state
    return replace(state, launchers=(*state.launchers, message.launcher))


def with_known_stages(state: CoordinatorState, finished: int, launchers: tuple[str, ...]) -> CoordinatorState:
    """Return the state with the finished stages, and the names of launchers, that an agent or the operator knows."""
    if finished > state.finished_stages:
        state = replace(state, finished_stages=finished)
    return replace(state, launchers=launchers) if len(launchers) > len(state.launchers) else state


def finish_stage(state: CoordinatorState, now: float) -> RoundDecision | None:
    """Finish the stage of the round that its members have ended, and let their launchers end."""
    round_ = state.round
    if round_ is None or state.recovering_until is not None or state.outcome is not None:
        return None
    stage = ended_stage(state, round_)
    if stage <= state.finished_stages:
        return None
    finished = replace(state, finished_stages=stage)
    effects = tuple(
        SendToAgent(agent_id, StageFinished(round_.id, stage))
        for agent_id in round_.members
        if (agent := state.agents.get(agent_id)) is not None and agent.disconnected_at is None
    )
    return RoundDecision(finished, effects, f"stage {stage} is finished")


def finished_again(state: CoordinatorState, agent_id: str, round_: Round) -> tuple[SendToAgent, ...]:
    """Return what a member that has connected again may have missed: the stages that are finished since it started."""
    if state.finished_stages <= round_.members[agent_id].assignment.finished_stages:
        return ()
    return (SendToAgent(agent_id, StageFinished(round_.id, state.finished_stages)),)


def ended_stage(state: CoordinatorState, round_: Round) -> int:
    """Return the last stage that is over; 0 if none is known to be."""
    ended = [m.ended_stage for m in round_.members.values() if m.state is not MemberState.SUCCEEDED]
    if state.settings.success_policy is SuccessPolicy.ANY:
        return max(ended, default=0)
    return min(ended, default=0) if len(round_.members) == round_.size else 0

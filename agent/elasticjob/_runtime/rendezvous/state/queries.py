"""Queries that several rules share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from elasticjob._runtime.contract.messages import (
    ExpectedPod,
    LastMembership,
    MemberState,
    PodState,
)
from elasticjob._runtime.rendezvous.persistent_map import with_item
from elasticjob._runtime.rendezvous.state.agents import KnownAgent
from elasticjob._runtime.rendezvous.state.coordinator_state import CoordinatorState
from elasticjob._runtime.rendezvous.state.round import Member


def expected_pod(state: CoordinatorState, index: int) -> ExpectedPod | None:
    """Return the live pod of an index as the operator sees it; None if it has none."""
    return state.pods.get(index)


def topology_of(state: CoordinatorState, agent: KnownAgent) -> tuple[str, ...]:
    """Return where the agent's Node is (`ExpectedPod.topology`); empty if the operator has not sent it."""
    pod = expected_pod(state, agent.index)
    return pod.topology if pod is not None and pod.incarnation == agent.incarnation else ()


def agent_with_same_index(state: CoordinatorState, agent: KnownAgent) -> KnownAgent | None:
    """Return the other agent that has this agent's index, if any: the newest one.

    Until the job has ended there is at most one, besides those whose pods were replaced while their workers still ran.
    """
    other = state.agents.get(state.agent_ids.get(agent.index, ""))
    return other if other is not None and other.index == agent.index and other.agent_id != agent.agent_id else None


def superseded(state: CoordinatorState, agent: KnownAgent) -> bool:
    """Return whether a newer pod has this agent's index: the operator lists it, or it has announced itself."""
    pod, other = expected_pod(state, agent.index), agent_with_same_index(state, agent)
    announced = other is not None and other.incarnation > agent.incarnation
    return announced or (pod is not None and pod.incarnation > agent.incarnation)


def departure_reason(state: CoordinatorState, agent: KnownAgent) -> str:
    """Return why this agent is leaving, as it reported itself or as the operator sees its pod; empty while it stays."""
    if agent.leaving_reason:
        return agent.leaving_reason
    if agent.pod in state.replaced:
        return state.replaced[agent.pod]
    if superseded(state, agent):
        return "a newer pod has its index"
    pod = expected_pod(state, agent.index)
    draining = pod is not None and pod.incarnation == agent.incarnation and pod.state is PodState.DRAINING
    return "its pod is being deleted" if draining else ""


def is_restartable(state: CoordinatorState) -> bool:
    """Return whether the function of this job can be called again in the same process: all agents run one script."""
    return any(n.restartable for n in state.agents.values())


def has_ended_results(state: CoordinatorState, agent_id: str) -> bool:
    """Return whether a member of the round has reported that its workers count no step of it any more (`round_break`
    says why)."""
    agent = state.agents.get(agent_id)
    return agent is not None and state.round is not None and agent.results_ended == state.round.id


def waits_to_break(state: CoordinatorState) -> bool:
    """Return whether a member of the round waits until no other one counts steps."""
    return state.round is not None and any(has_ended_results(state, agent_id) for agent_id in state.round.members)


def may_run_workers(state: CoordinatorState, agent: KnownAgent) -> bool:
    """Return whether workers of the current round may run there, because its member has not stopped or been lost."""
    member = state.round.members.get(agent.agent_id) if state.round else None
    return member is not None and not member.accounted_for


def announces_unknown_round(state: CoordinatorState, last: LastMembership | None) -> bool:
    """Return whether an agent announces a round that this successor missed in its recovery, and has not stopped there.

    The round is newer than all that this store has restored or started. So a later round of its own ends this.
    """
    if not state.successor or state.recovering_until is not None or state.outcome is not None:
        return False
    if last is None or last.state is MemberState.STOPPED:
        return False
    return state.latest_round is None or last.assignment.round > state.latest_round


def candidates(state: CoordinatorState) -> list[KnownAgent]:
    """Return the agents that may be in a round that starts now."""
    return [n for n in state.agents.values() if _eligible(state, n)]


def _eligible(state: CoordinatorState, agent: KnownAgent) -> bool:
    if agent.disconnected_at is not None or agent.stale_round is not None or departure_reason(state, agent):
        return False
    return not state.operator_seen or expected_pod(state, agent.index) is not None


def missing_pods(state: CoordinatorState, *, ready: bool) -> Iterator[ExpectedPod]:
    """Yield the expected pods that are not connected; with `ready`, also those whose agent is not ready."""
    present = {
        (n.index, n.incarnation) for n in state.agents.values() if n.disconnected_at is None and (n.ready or not ready)
    }
    for pod in state.operator_view.pods:
        expected = pod.state in (PodState.STARTING, PodState.RUNNING)
        if expected and pod.index < state.settings.desired_pods and (pod.index, pod.incarnation) not in present:
            yield pod


def set_agent(state: CoordinatorState, agent: KnownAgent) -> CoordinatorState:
    """Return the state with this agent added or replaced. If a newer agent has its index, that one keeps the index."""
    other = agent_with_same_index(state, agent)
    known = state.agent_ids.get(agent.index) == agent.agent_id or (other and other.incarnation > agent.incarnation)
    agent_ids = state.agent_ids if known else with_item(state.agent_ids, agent.index, agent.agent_id)
    return replace(state, agents=with_item(state.agents, agent.agent_id, agent), agent_ids=agent_ids)


def running_stage(state: CoordinatorState) -> int:
    """Return the number of the stage whose ranks run, or wait for the others, if it is not the first; 0 otherwise.

    Between two launchers of the command no stage runs.
    """
    stage = state.finished_stages + 1
    return stage if 1 < stage <= len(state.launchers) else 0


def is_in_stage(state: CoordinatorState, member: Member) -> bool:
    """Return whether the present stage goes on for a member: its ranks may run, or wait for those of the others."""
    return member.state is not MemberState.SUCCEEDED and member.ended_stage <= state.finished_stages

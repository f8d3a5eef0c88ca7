"""What a successor store makes of the round it finds. Pure.

Nodes train on while their store is away, and say what they run when they announce themselves again. The newest round
that anybody still runs is restored if all its ranks are there, and ended if one is missing or has ended. Where all who
are here have succeeded, nobody runs again before the operator has spoken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from elasticjob.contract.messages import (
    MemberState,
    PodState,
    WorkersFailed,
    WorkersStarted,
    WorkersStopped,
    WorkersSucceeded,
)
from elasticjob.contract.names import RoundId
from elasticjob.rendezvous.state import LOST_TIMEOUT, RECOVERY_TIMEOUT, CoordinatorState, LastRound, Member, Node, Round

_GOING_ON = (MemberState.STARTING, MemberState.RUNNING, MemberState.SUCCEEDED)


@dataclass(frozen=True)
class RecoveryDecision:
    """`whole`: the round goes on; otherwise it must end. Without a round there is nothing to restore."""

    round: Round | None
    whole: bool
    reason: str


def record_message(
    node: Node, message: WorkersStarted | WorkersFailed | WorkersSucceeded | WorkersStopped, reached: MemberState
) -> Node:
    """What a node says while the store recovers is kept with what it announced."""
    if node.membership is None or node.membership.assignment.round != message.round:
        return node
    failure = message.failure if isinstance(message, WorkersFailed) else node.failure
    return replace(node, membership=replace(node.membership, state=reached), failure=failure)


def evaluate_recovery(state: CoordinatorState, now: float) -> RecoveryDecision | None:
    """The verdict, or None while somebody may still come whose word matters."""
    if state.recovering_until is None:
        return None
    newest = max((_round_of(n) for n in state.nodes.values() if _running(n)), default=None)
    found = {} if newest is None else _members(state, newest)
    size = max((m.assignment.group_world_size for m in found.values()), default=0)
    if newest is not None and len(found) == size:
        whole = all(m.state in _GOING_ON for m in found.values())
        return RecoveryDecision(
            _restored(state, newest, found, state.epoch + now), whole, f"round {newest} found whole"
        )
    if (now < state.recovering_until or not state.nodes) and not _all_here(state, now):
        return None
    if found and not state.operator_seen and all(m.state is MemberState.SUCCEEDED for m in found.values()):
        # The missing ones may have been told that all have succeeded. The operator knows; nobody loses by waiting.
        return None
    if newest is None:
        return RecoveryDecision(None, whole=True, reason="no round to restore")
    return RecoveryDecision(
        _restored(state, newest, found, 0.0), whole=False, reason=f"{size - len(found)} of {size} nodes are missing"
    )


def with_last_round(state: CoordinatorState) -> CoordinatorState:
    """With the newest round that a node here was in, where nobody runs any; without one the past stays unknown."""
    rounds = [_round_of(n) for n in state.nodes.values() if n.disconnected_at is None and n.membership is not None]
    if not rounds:
        return state
    members = _members(state, max(rounds))
    size = max(m.assignment.group_world_size for m in members.values())
    return replace(state, last_round=LastRound(max(rounds), size, frozenset(members)), last_members=tuple(members))


def _running(node: Node) -> bool:
    return (
        node.disconnected_at is None
        and node.membership is not None
        and node.membership.state is not MemberState.STOPPED
    )


def _round_of(node: Node) -> RoundId:
    assert node.membership is not None  # noqa: S101  # callers ask _running first
    return node.membership.assignment.round


def _members(state: CoordinatorState, newest: RoundId) -> dict[str, Member]:
    """Members of the round that are here, by agent id in order of group rank, also those that have stopped."""
    here = [n for n in state.nodes.values() if n.disconnected_at is None and n.membership and _round_of(n) == newest]
    ordered = sorted(here, key=lambda n: n.membership.assignment.group_rank if n.membership else 0)
    return {
        n.agent_id: Member(n.membership.assignment, n.pod, n.local_world_size, n.membership.state)
        for n in ordered
        if n.membership
    }


def _restored(state: CoordinatorState, round_id: RoundId, members: dict[str, Member], now: float) -> Round:
    started = all(m.state is not MemberState.STARTING for m in members.values())
    failures = tuple(f for agent_id in members if (f := state.nodes[agent_id].failure) is not None)
    return Round(round_id, members, formed_at=now if started else 0.0, failures=failures)


def lost_node_deadline(state: CoordinatorState) -> float | None:
    """When nobody waits any more for pods whose node is lost."""
    if state.recovering_until is None or not any(p.state is PodState.LOST for p in state.pods.values()):
        return None
    return state.recovering_until - RECOVERY_TIMEOUT + LOST_TIMEOUT


def _all_here(state: CoordinatorState, now: float) -> bool:
    """Every pod that Kubernetes calls running has announced itself, but for those whose node is lost."""
    if not state.operator_seen:
        return False
    until = lost_node_deadline(state)
    patient = until is not None and (now < until or not state.nodes)
    awaited = (PodState.RUNNING, PodState.LOST) if patient else (PodState.RUNNING,)
    here = {(n.index, n.incarnation) for n in state.nodes.values() if n.disconnected_at is None}
    return all((p.index, p.incarnation) in here for p in state.pods.values() if p.state in awaited)

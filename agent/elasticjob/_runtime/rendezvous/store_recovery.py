"""What a successor store does with the round that it finds. Pure.

Agents go on training while no store runs, and announce what they run when they connect to the successor. The newest
round that any agent still runs is restored if all its members are connected and run or have succeeded. It ends if one
is missing, failed or stopped. A round in which an agent reported a failure ends here too, even if all its workers have
stopped by then, because the failure must be charged.

If all connected members have succeeded and others are missing, the store waits for the operator: the missing agents may
have learned already that the job succeeded. With successPolicy Any they may have if any member is missing.

Recovery may miss the newest round: no member of it connects in time. A member that connects later resumes recovery,
until the store has started a round of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from elasticjob._runtime.contract.messages import (
    EndReason,
    MemberState,
    PodState,
    SuccessPolicy,
    WorkersFailed,
    WorkersStarted,
    WorkersStopped,
    WorkersSucceeded,
)
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.rendezvous.decision import count_missing
from elasticjob._runtime.rendezvous.persistent_map import with_item
from elasticjob._runtime.rendezvous.state import (
    LOST_TIMEOUT,
    RECONNECT_GRACE,
    RECOVERY_TIMEOUT,
    TAKEOVER_TIMEOUT,
    CoordinatorState,
    KnownAgent,
    LastRound,
    Member,
    Round,
    set_agent,
)

_CAN_CONTINUE = (MemberState.STARTING, MemberState.RUNNING, MemberState.SUCCEEDED)


@dataclass(frozen=True)
class RecoveryDecision:
    """How recovery ends."""

    round: Round | None
    """The round that was found; None if no agent runs one and none failed."""
    end: EndReason | None
    """Why the round must end; None if it goes on."""
    reason: str


def record_message(
    state: CoordinatorState,
    agent: KnownAgent,
    message: WorkersStarted | WorkersFailed | WorkersSucceeded | WorkersStopped,
    reached: MemberState,
) -> CoordinatorState:
    """Return the state with what an agent reported about the round that it announced, while the store recovers."""
    if agent.membership is None or agent.membership.assignment.round != message.round:
        return state
    state = set_agent(state, replace(agent, membership=replace(agent.membership, state=reached)))
    if not isinstance(message, WorkersFailed):
        return state
    failures = (*state.recovery_failures.get(message.round, ()), message.failure)
    return replace(state, recovery_failures=with_item(state.recovery_failures, message.round, failures))


def resume_recovery(state: CoordinatorState, now: float) -> CoordinatorState:
    """Return the state in recovery, as if it began now: an agent announces a round that the store missed.

    All agents have stopped except those in an older round (`stale_round`). A confirmation does not count any more: the
    operator gave it without knowing the missed round.
    """
    agents = {agent_id: _stopped(agent) for agent_id, agent in state.agents.items()}
    return replace(
        state,
        agents=agents,
        round=None,
        recovering_until=now + RECOVERY_TIMEOUT,
        last_call_at=None,
        confirmation_requested_at=None,
        confirmed_until=None,
    )


def _stopped(agent: KnownAgent) -> KnownAgent:
    last = agent.membership
    if last is None or agent.stale_round is not None:
        return agent
    return replace(agent, membership=replace(last, state=MemberState.STOPPED))


def evaluate_recovery(state: CoordinatorState, now: float) -> RecoveryDecision | None:
    """Return how recovery ends; None if it is over, or while the store waits for more agents or for the operator."""
    if state.recovering_until is None:
        return None
    newest = _newest_unsettled_round(state)
    found = {} if newest is None else _members(state, newest)
    size = max((m.assignment.group_world_size for m in found.values()), default=0)
    if newest is not None and len(found) == size:
        return _recover_all(state, newest, found, now)
    if not (_waited_long_enough(state, now) or _all_expected_connected(state, now)):
        return None
    one = state.settings.success_policy is SuccessPolicy.ANY
    if found and not state.operator_seen and all(one or m.state is MemberState.SUCCEEDED for m in found.values()):
        # The missing agents may have learned that the job succeeded; the operator knows. Workers that run go on.
        return None
    if newest is None:
        return RecoveryDecision(None, None, "no round to restore")
    reason = count_missing(size - len(found), size)
    return RecoveryDecision(_restored_round(state, newest, found, 0.0), EndReason.AGENT_LOST, reason)


def _newest_unsettled_round(state: CoordinatorState) -> RoundId | None:
    """Return the newest round that a connected agent runs, or in which one has reported a failure: it goes on or ends.

    A round that this store restored earlier, before recovery was resumed, is over: its end is known.
    """
    connected = [n for n in state.agents.values() if n.disconnected_at is None and n.membership is not None]
    failed = state.recovery_failures
    unsettled = (r for n in connected if (r := _last_round_id(n)) in failed or _runs_workers(n))
    newest = max(unsettled, default=None)
    over = newest is not None and state.latest_round is not None and newest <= state.latest_round
    return None if over else newest


def _recover_all(state: CoordinatorState, round_id: RoundId, found: dict[str, Member], now: float) -> RecoveryDecision:
    """Return how recovery ends if all members of the round are connected."""
    round_ = _restored_round(state, round_id, found, state.epoch + now)
    reason = f"all members of round {round_id} reconnected"
    if round_.failures or any(m.state is MemberState.FAILED for m in found.values()):
        return RecoveryDecision(round_, EndReason.WORKER_FAILED, f"{reason}, workers have failed")
    ended = any(state.agents[agent_id].results_ended == round_id for agent_id in found)
    if not ended and all(m.state in _CAN_CONTINUE for m in found.values()):
        return RecoveryDecision(round_, None, reason)
    return RecoveryDecision(round_, EndReason.AGENT_LOST, f"{reason}, workers have stopped")


def with_last_round(state: CoordinatorState) -> CoordinatorState:
    """Return the state with the newest round of the connected agents as the last one; no agent runs workers of any.

    Without such a round the history stays unknown. What the store knows of a newer round, it keeps.
    """
    round_ids = [
        _last_round_id(n) for n in state.agents.values() if n.disconnected_at is None and n.membership is not None
    ]
    if not round_ids:
        return state
    newest = max(round_ids)
    if state.latest_round is not None or (state.last_round.id is not None and newest < state.last_round.id):
        return state
    members = _members(state, newest)
    size = max(m.assignment.group_world_size for m in members.values())
    pods = {agent_id: m.pod for agent_id, m in members.items()}
    last = LastRound(id=newest, size=size, stopped=frozenset(members), pods=pods)
    return replace(state, last_round=last, last_members=tuple(members))


def _runs_workers(agent: KnownAgent) -> bool:
    return (
        agent.disconnected_at is None
        and agent.membership is not None
        and agent.membership.state is not MemberState.STOPPED
    )


def _last_round_id(agent: KnownAgent) -> RoundId:
    assert agent.membership is not None  # noqa: S101  # callers check it first
    return agent.membership.assignment.round


def _members(state: CoordinatorState, round_id: RoundId) -> dict[str, Member]:
    """Return the connected members of the round by agent id, in order of group rank; also those that have stopped."""
    connected = [
        n for n in state.agents.values() if n.disconnected_at is None and n.membership and _last_round_id(n) == round_id
    ]
    ordered = sorted(connected, key=lambda n: n.membership.assignment.group_rank if n.membership else 0)
    return {
        n.agent_id: Member(
            n.membership.assignment,
            n.pod,
            n.local_world_size,
            n.membership.state,
            ended_stage=n.membership.ended_stage,
        )
        for n in ordered
        if n.membership
    }


def _restored_round(state: CoordinatorState, round_id: RoundId, members: dict[str, Member], formed_at: float) -> Round:
    started = all(m.state is not MemberState.STARTING for m in members.values())
    failures = state.recovery_failures.get(round_id, ())
    return Round(round_id, members, formed_at=formed_at if started else 0.0, failures=failures)


def count_newest_round(state: CoordinatorState) -> tuple[int, int]:
    """Return how many members of the newest announced round are connected, and its size; (0, 0) without a round.

    A round older than the newest one that the operator knows does not count: the present store may have started a later
    one, with a confirmation, without the agents that are connected here.
    """
    connected = (n.membership for n in state.agents.values() if n.disconnected_at is None)
    memberships = [m.assignment for m in connected if m is not None]
    newest = max((m.round for m in memberships), default=None)
    if newest is None or state.is_outdated(newest):
        return 0, 0
    members = [m for m in memberships if m.round == newest]
    return len(members), max(m.group_world_size for m in members)


def _waited_long_enough(state: CoordinatorState, now: float) -> bool:
    if state.recovering_until is None or not state.agents:
        return False
    takeover = takeover_deadline(state)
    return now >= state.recovering_until or (takeover is not None and now >= takeover)


def takeover_deadline(state: CoordinatorState) -> float | None:
    """Return until when a standby store that has taken over waits for more agents; None: as any other store.

    It needs more than half of the newest round. The missing agents lost the old store when the others did. Those on its
    Node may be lost with it, and are lost if the Node has vanished. All others connect soon.
    """
    if state.recovering_until is None or not state.took_over:
        return None
    members, size = count_newest_round(state)
    if 2 * members <= size:
        return None
    connected = {(n.index, n.incarnation) for n in state.agents.values() if n.disconnected_at is None}
    awaited = [p for p in state.pods.values() if p.state is PodState.RUNNING]
    missing = {p.pod for p in awaited if (p.index, p.incarnation) not in connected}
    if not missing <= set(state.operator_view.beside_store):
        return state.announced_at + TAKEOVER_TIMEOUT
    vanished = any(n.store_vanished for n in state.agents.values())
    return state.announced_at + (0.0 if vanished else RECONNECT_GRACE)


def lost_node_deadline(state: CoordinatorState) -> float | None:
    """Return until when the store waits for pods on lost Nodes; None if there are none."""
    if state.recovering_until is None or not any(p.state is PodState.LOST for p in state.pods.values()):
        return None
    if state.took_over:
        return state.announced_at + RECONNECT_GRACE
    return state.recovering_until - RECOVERY_TIMEOUT + LOST_TIMEOUT


def _all_expected_connected(state: CoordinatorState, now: float) -> bool:
    """Return whether every running pod is connected. Pods on a lost Node count until `lost_node_deadline`."""
    if not state.operator_seen:
        return False
    deadline = lost_node_deadline(state)
    wait_for_lost = deadline is not None and (now < deadline or not state.agents)
    awaited = (PodState.RUNNING, PodState.LOST) if wait_for_lost else (PodState.RUNNING,)
    connected = {(n.index, n.incarnation) for n in state.agents.values() if n.disconnected_at is None}
    return all((p.index, p.incarnation) in connected for p in state.pods.values() if p.state in awaited)

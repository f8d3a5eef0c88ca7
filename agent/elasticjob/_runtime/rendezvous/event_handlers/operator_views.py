"""What the operator's view changes. Pure."""

from __future__ import annotations

from dataclasses import replace

from elasticjob._runtime.contract.messages import (
    NO_STANDBY_STORE,
    OperatorView,
)
from elasticjob._runtime.rendezvous import node_ends
from elasticjob._runtime.rendezvous.rounds.stages import with_known_stages
from elasticjob._runtime.rendezvous.rounds.starts import confirmation
from elasticjob._runtime.rendezvous.state import (
    CoordinatorState,
    KnownAgent,
    SendToAgent,
    expected_pod,
    may_run_workers,
)


def changed_standby_store(before: CoordinatorState, after: CoordinatorState) -> tuple[SendToAgent, ...]:
    """Return the messages to all connected agents after the standby store has changed."""
    standby = after.operator_view.standby_store or NO_STANDBY_STORE
    if standby == (before.operator_view.standby_store or NO_STANDBY_STORE):
        return ()
    return tuple(SendToAgent(n.agent_id, standby) for n in after.agents.values() if n.disconnected_at is None)


def apply_operator_view(state: CoordinatorState, view: OperatorView, now: float) -> CoordinatorState:
    """Apply the operator's view, unless it is older than the last one: two operators may be connected at once."""
    if (view.lease, view.sequence) <= (state.operator_view.lease, state.operator_view.sequence):
        return state
    seen = view.charged_round
    pods = {p.index: p for p in view.pods}
    ended = tuple(e for e in state.ended_rounds if seen is None or e.round > seen)
    names = {p.pod for p in view.pods}
    unhealthy = {pod: failure for pod, failure in state.unhealthy.items() if pod in names}
    state = replace(state, operator_view=view, operator_seen=True, pods=pods, ended_rounds=ended, unhealthy=unhealthy)
    state = replace(state, replaced={pod: why for pod, why in state.replaced.items() if pod in names})
    if view.newest_round is not None and (state.known_round is None or view.newest_round > state.known_round):
        state = replace(state, known_round=view.newest_round)
    state = with_known_stages(state, view.finished_stages, view.launchers)
    state = node_ends.receive_ends(confirmation.receive_confirmation(state, view), view, now)
    return replace(state, agents={a: n for a, n in state.agents.items() if not _is_obsolete(state, n)})


def _is_obsolete(state: CoordinatorState, agent: KnownAgent) -> bool:
    """Return whether a disconnected agent has neither a pod nor a part in the current round."""
    pod = expected_pod(state, agent.index)
    has_no_pod = pod is None or pod.incarnation > agent.incarnation
    return has_no_pod and agent.disconnected_at is not None and not may_run_workers(state, agent)

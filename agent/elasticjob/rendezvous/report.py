"""The coordinator's view as the operator gets it. Pure."""

from __future__ import annotations

from elasticjob.contract.messages import NodeReport, PodState, RecoverySeconds, Report, RoundPhase, Straggler
from elasticjob.rendezvous import confirmation
from elasticjob.rendezvous.state import CoordinatorState, Node, candidates, expected_pod


def build_report(
    state: CoordinatorState, now: float, recovery: RecoverySeconds | None = None, straggler: Straggler | None = None
) -> Report:
    """Everything the operator needs to write status; equal states give equal reports."""
    round_ = state.round
    warm_off = _warm_off(state)
    return Report(
        incarnation=state.store_incarnation,
        phase=round_phase(state),
        reason=_reason(state),
        round=round_.id if round_ else None,
        rounds=state.rounds,
        world_size=round_.world_size if round_ else 0,
        formed_at=round_.formed_at if round_ else 0.0,
        nodes=tuple(_node(state, n) for n in state.nodes.values() if n.disconnected_at is None),
        ended_rounds=state.ended_rounds,
        outcome=state.outcome,
        failure=state.failure,
        lost_pods=tuple(n.pod for n in state.nodes.values() if n.expired(now) and _called_running(state, n)),
        unhealthy=tuple(state.unhealthy.values()),
        active=len(round_.members) if round_ else 0,
        recovery=recovery,
        confirmation_request=confirmation.open_request(state),
        half_missing_round=confirmation.half_missing_round(state),
        fork_disabled_reason=next(iter(warm_off), ""),
        fork_disabled_nodes=len(warm_off),
        stall=round_.stall if round_ else None,
        straggler=straggler,
    )


def _warm_off(state: CoordinatorState) -> list[str]:
    """Of the members whose workers start by exec, why, in order of group rank."""
    members = (state.nodes.get(agent_id) for agent_id in state.round.members) if state.round else ()
    return [node.fork_disabled_reason for node in members if node and node.fork_disabled_reason]


def round_phase(state: CoordinatorState) -> RoundPhase:
    if state.outcome is not None:
        return RoundPhase.FINISHED
    if state.recovering_until is not None:
        return RoundPhase.RECOVERING
    if state.round is None:
        return RoundPhase.GATHERING
    return RoundPhase.ENDING if state.round.ending else RoundPhase.RUNNING


def _reason(state: CoordinatorState) -> str:
    if state.outcome is not None:
        return state.outcome_reason
    if state.closed_reason and state.round is None:
        return f"closed: {state.closed_reason}"
    if state.recovering_until is not None:
        return "a new store waits for the nodes of the round that runs"
    if state.round is None and state.confirmation_requested_at is not None:
        return f"{confirmation.describe_missing(state)}: is there another store?"
    if state.round is None:
        return f"{len(candidates(state))} of at least {state.settings.min_nodes} nodes are here"
    if state.round.ending is not None:
        return state.round.ending.message
    return f"{len(state.round.members)} nodes train"


def _node(state: CoordinatorState, node: Node) -> NodeReport:
    member = state.round is not None and node.agent_id in state.round.members
    return NodeReport(node.index, node.incarnation, node.pod, node.ready, member)


def _called_running(state: CoordinatorState, node: Node) -> bool:
    fact = expected_pod(state, node.index)
    return fact is not None and fact.incarnation == node.incarnation and fact.state in (PodState.RUNNING, PodState.LOST)

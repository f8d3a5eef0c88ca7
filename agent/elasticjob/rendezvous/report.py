"""The coordinator's view as the operator gets it. Pure."""

from __future__ import annotations

from elasticjob.contract.messages import NodeReport, PodState, Recovery, Report, RoundPhase, Straggler
from elasticjob.rendezvous import confirmation
from elasticjob.rendezvous.state import Node, State, candidates, fact_of


def build_report(
    state: State, now: float, recovery: Recovery | None = None, straggler: Straggler | None = None
) -> Report:
    """Everything the operator needs to write status; equal states give equal reports."""
    round_ = state.round
    warm_off = _warm_off(state)
    return Report(
        incarnation=state.store,
        phase=round_phase(state),
        reason=_reason(state),
        round=round_.id if round_ else None,
        rounds=state.rounds,
        world_size=round_.world_size if round_ else 0,
        formed_at=round_.formed_at if round_ else 0.0,
        nodes=tuple(_node(state, n) for n in state.nodes.values() if n.gone_at is None),
        ended=state.ended,
        outcome=state.outcome,
        failure=state.failure,
        lost_nodes=tuple(n.pod for n in state.nodes.values() if n.lost(now) and _called_running(state, n)),
        unfit=tuple(state.unfit.values()),
        active=len(round_.members) if round_ else 0,
        recovery=recovery,
        asks=confirmation.asks(state),
        half=confirmation.half(state),
        warm_off=next(iter(warm_off), ""),
        warm_off_nodes=len(warm_off),
        standstill=round_.standstill if round_ else None,
        straggler=straggler,
    )


def _warm_off(state: State) -> list[str]:
    """Of the members whose workers start by exec, why, in order of group rank."""
    members = (state.nodes.get(boot) for boot in state.round.members) if state.round else ()
    return [node.warm_off for node in members if node and node.warm_off]


def round_phase(state: State) -> RoundPhase:
    if state.outcome is not None:
        return RoundPhase.FINISHED
    if state.recovering_until is not None:
        return RoundPhase.RECOVERING
    if state.round is None:
        return RoundPhase.GATHERING
    return RoundPhase.ENDING if state.round.ending else RoundPhase.RUNNING


def _reason(state: State) -> str:
    if state.outcome is not None:
        return state.outcome_reason
    if state.closed and state.round is None:
        return f"closed: {state.closed}"
    if state.recovering_until is not None:
        return "a new store waits for the nodes of the round that runs"
    if state.round is None and state.asked_at is not None:
        return f"{confirmation.words(state)}: is there another store?"
    if state.round is None:
        return f"{len(candidates(state))} of at least {state.settings.min_nodes} nodes are here"
    if state.round.ending is not None:
        return state.round.ending.message
    return f"{len(state.round.members)} nodes train"


def _node(state: State, node: Node) -> NodeReport:
    member = state.round is not None and node.boot in state.round.members
    return NodeReport(node.slot, node.incarnation, node.pod, node.ready, member)


def _called_running(state: State, node: Node) -> bool:
    fact = fact_of(state, node.slot)
    return fact is not None and fact.incarnation == node.incarnation and fact.state in (PodState.RUNNING, PodState.LOST)

"""The coordinator's report to the operator. Pure."""

from __future__ import annotations

from elasticjob._runtime.contract.failures.failure_text import in_stage
from elasticjob._runtime.contract.messages import (
    AgentReport,
    LostTime,
    PodState,
    RecoverySeconds,
    Report,
    RoundPhase,
    StateTransfer,
    Straggler,
    TrainingProgress,
)
from elasticjob._runtime.contract.text import with_noun
from elasticjob._runtime.rendezvous.rounds.starts import confirmation, restart_delay
from elasticjob._runtime.rendezvous.state import CoordinatorState, KnownAgent, candidates, expected_pod, running_stage


def build_report(
    state: CoordinatorState,
    now: float,
    recovery: RecoverySeconds | None = None,
    straggler: Straggler | None = None,
    progress: TrainingProgress | None = None,
    lost: tuple[LostTime, ...] = (),
    state_transfer: StateTransfer | None = None,
) -> Report:
    """Return everything that the operator needs to write status. Equal states give equal reports."""
    round_ = state.round
    fork_disabled_reasons = _fork_disabled_reasons(state)
    return Report(
        incarnation=state.store_incarnation,
        phase=round_phase(state),
        reason=_reason(state),
        round=round_.id if round_ else None,
        rounds=state.rounds,
        world_size=round_.world_size if round_ else 0,
        formed_at=round_.formed_at if round_ else 0.0,
        nodes=tuple(_agent_report(state, n) for n in state.agents.values() if n.disconnected_at is None),
        ended_rounds=state.ended_rounds,
        outcome=state.outcome,
        failure=state.failure,
        lost_pods=_lost_pods(state, now),
        unhealthy=tuple(state.unhealthy.values()),
        active=len(round_.members) if round_ else 0,
        recovery=recovery,
        confirmation_request=confirmation.open_request(state),
        half_missing_round=confirmation.exactly_half_missing_round(state),
        pods_that_may_write=confirmation.pods_that_may_write(state),
        fork_disabled_reason=next(iter(fork_disabled_reasons), ""),
        fork_disabled_nodes=len(fork_disabled_reasons),
        hang_guard=next((agent.hang_guard for agent in _members(state) if agent.hang_guard), ""),
        stall=round_.stall if round_ else None,
        straggler=straggler,
        progress=progress,
        lost=lost,
        state_transfer=state_transfer,
        retired=state.retired,
        stage=running_stage(state),
        finished_stages=state.finished_stages,
        launchers=state.launchers,
        view_lease=state.operator_view.lease,
    )


def _fork_disabled_reasons(state: CoordinatorState) -> list[str]:
    """Return why workers start by exec, for each member where they do, in order of group rank."""
    return [agent.fork_disabled_reason for agent in _members(state) if agent.fork_disabled_reason]


def _members(state: CoordinatorState) -> list[KnownAgent]:
    """Return the known agents of the round in order of group rank."""
    members = (state.agents.get(agent_id) for agent_id in state.round.members) if state.round else ()
    return [agent for agent in members if agent]


def round_phase(state: CoordinatorState) -> RoundPhase:
    """Return the phase that the report carries."""
    if state.passive:
        return RoundPhase.STANDBY
    if state.outcome is not None:
        return RoundPhase.FINISHED
    if state.recovering_until is not None:
        return RoundPhase.RECOVERING
    if state.round is None:
        return RoundPhase.GATHERING
    return RoundPhase.ENDING if state.round.ending else RoundPhase.RUNNING


def _reason(state: CoordinatorState) -> str:
    if state.passive:
        return "the store is retired" if state.retired else "the store is a standby store"
    if state.outcome is not None:
        return state.outcome_reason
    if state.closed_reason and state.round is None:
        return f"rendezvous closed: {state.closed_reason}"
    if state.recovering_until is not None:
        return "the new store waits for the agents of the running round"
    if state.round is None and state.restart_delay is not None:
        seconds = restart_delay.delay_seconds(state)
        return f"the next round starts {seconds:g} s after the failure (failurePolicy.backoffSeconds)"
    if state.round is None and state.confirmation_requested_at is not None:
        return f"{confirmation.describe_missing(state)}; the operator must confirm that this is the only store"
    if state.round is None:
        return f"{len(candidates(state))} of at least {with_noun(state.settings.min_nodes, 'worker pod')} available"
    if state.round.ending is not None:
        return state.round.ending.message
    members = with_noun(len(state.round.members), "pod")
    if state.round.formed_at:
        return f"the workers of {members} run{in_stage(running_stage(state))}"
    if all(agent.ready for agent in _members(state)):
        return f"the workers of {members} start"
    return f"{members} {'imports' if len(state.round.members) == 1 else 'import'} the modules of spec.preload"


def _agent_report(state: CoordinatorState, agent: KnownAgent) -> AgentReport:
    is_member = state.round is not None and agent.agent_id in state.round.members
    return AgentReport(agent.index, agent.incarnation, agent.pod, agent.ready, is_member)


def _lost_pods(state: CoordinatorState, now: float) -> tuple[str, ...]:
    """Return the pods whose agents are lost; none once the job has ended, because then all agents end."""
    if state.outcome is not None:
        return ()
    return tuple(n.pod for n in state.agents.values() if _is_lost(n, now) and _expected_to_run(state, n))


def _is_lost(agent: KnownAgent, now: float) -> bool:
    return agent.expired(now) or agent.unresponsive


def _expected_to_run(state: CoordinatorState, agent: KnownAgent) -> bool:
    pod = expected_pod(state, agent.index)
    return pod is not None and pod.incarnation == agent.incarnation and pod.state in (PodState.RUNNING, PodState.LOST)

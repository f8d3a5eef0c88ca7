"""The outcome of the job. It is final: agents that announce themselves later are sent it too. Pure."""

from __future__ import annotations

from dataclasses import replace

from elasticjob._runtime.contract.messages import (
    Failure,
    Finish,
    Outcome,
)
from elasticjob._runtime.rendezvous.decision import RoundDecision
from elasticjob._runtime.rendezvous.state import (
    CoordinatorState,
    SendToAgent,
)


def declare_outcome(
    state: CoordinatorState, outcome: Outcome, reason: str, failure: Failure | None, message: str = ""
) -> RoundDecision:
    """Declare the outcome of the job. It is final; agents that announce themselves later get it too."""
    finish = Finish(outcome, reason, message)
    return _finish_job(replace(state, failure=failure), finish, f"the job has ended: {outcome.value} ({reason})")


def adopt_outcome(state: CoordinatorState, now: float) -> RoundDecision | None:
    """Adopt an outcome that another store declared: the operator found it in an agent's termination message."""
    finish = state.operator_view.finish
    if finish is None or state.outcome is not None:
        return None
    state = replace(state, round=None, recovering_until=None)
    log_reason = f"the job has ended, as the operator reports: {finish.outcome.value} ({finish.reason})"
    return _finish_job(state, finish, log_reason)


def _finish_job(state: CoordinatorState, finish: Finish, log_reason: str) -> RoundDecision:
    state = replace(state, outcome=finish.outcome, outcome_reason=finish.reason)
    return RoundDecision(state, tuple(SendToAgent(agent_id, finish) for agent_id in state.agents), log_reason)

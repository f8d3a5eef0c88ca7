"""Hangs that end nothing (`hangPolicy.action: Event`): which worker the report names for a stall. Pure.

Every agent detects a stall and reports it. The worker to blame is known when all agents have reported their workers'
steps, or at the latest STALL_REPORT_SECONDS after the first report.
"""

from __future__ import annotations

from dataclasses import replace

from elasticjob._runtime.contract.messages import WorkersStalled
from elasticjob._runtime.diagnosis import root_cause
from elasticjob._runtime.rendezvous.decision import RoundDecision
from elasticjob._runtime.rendezvous.state import CoordinatorState, KnownAgent, running_stage

STALL_REPORT_SECONDS = 3.0
"""Seconds that all agents have to report a stall after the first: their workers' last steps may be this far apart."""


def record_stall(state: CoordinatorState, agent: KnownAgent, message: WorkersStalled, now: float) -> CoordinatorState:
    """Return the state with an agent's report. The same report again, after a reconnect, changes nothing."""
    round_ = state.round
    if round_ is None or message.round != round_.id or agent.agent_id not in round_.members:
        return state
    if round_.stall_reports.get(agent.agent_id) == message.failure:
        return state
    round_ = replace(
        round_,
        stall_reports={**round_.stall_reports, agent.agent_id: message.failure},
        stall_pending=(*round_.stall_pending, agent.agent_id),
        stall_since=round_.stall_since if round_.stall_pending else now,
    )
    return replace(state, round=round_)


def stall_deadline(state: CoordinatorState) -> float | None:
    """Return when the reported stall is attributed to a worker at the latest; None if none is pending."""
    round_ = state.round
    return round_.stall_since + STALL_REPORT_SECONDS if round_ is not None and round_.stall_pending else None


def name_stalled_worker(state: CoordinatorState, now: float) -> RoundDecision | None:
    """Name the worker to blame for the pending stall, once for all agents."""
    round_, deadline = state.round, stall_deadline(state)
    if round_ is None or deadline is None:
        return None
    if now < deadline and not round_.members.keys() <= set(round_.stall_pending):
        return None
    cause = root_cause(round_.stall_reports[agent_id] for agent_id in round_.stall_pending)
    cause = replace(cause, stage=running_stage(state)) if cause is not None else None
    return RoundDecision(
        replace(state, round=replace(round_, stall_pending=(), stall=cause)),
        reason=f"round {round_.id} makes no progress" + (f": rank {cause.rank} in {cause.pod}" if cause else ""),
    )

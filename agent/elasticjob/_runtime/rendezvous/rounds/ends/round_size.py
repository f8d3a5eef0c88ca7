"""When a running round ends because the job shall be larger or smaller. Pure."""

from __future__ import annotations

from dataclasses import replace

from elasticjob._runtime.contract.messages import EndReason
from elasticjob._runtime.contract.text import with_noun
from elasticjob._runtime.rendezvous.decision import RoundDecision, pod_names
from elasticjob._runtime.rendezvous.rounds.ends.round_end import (
    begin_end,
    begin_scale_down,
)
from elasticjob._runtime.rendezvous.state import (
    CoordinatorState,
    KnownAgent,
    candidates,
    is_in_stage,
    missing_pods,
)


def resize_round(state: CoordinatorState, now: float) -> RoundDecision | None:
    """End a running round for a lower target, or for joining agents; never once a member has succeeded.

    Nor between the first member that reports the end of a stage and the last one: its ranks would run again.

    A round with free places waits for the stabilization window, so that agents which come one after the other join
    together. It does not wait if it becomes full, or if no further pod is expected.
    """
    round_ = state.round
    if round_ is None or round_.ending is not None or not round_.formed_at or state.closed_reason:
        return None
    if any(not is_in_stage(state, m) for m in round_.members.values()):
        return None
    free = state.settings.target - len(round_.members)
    if free < 0:
        return begin_scale_down(state, round_, now)
    joining = [n for n in _wanted_ready_agents(state) if n.agent_id not in round_.members]
    places = state.settings.round_size(len(round_.members) + len(joining)) - len(round_.members)
    if places <= 0:
        return None if state.joiners_since is None else RoundDecision(replace(state, joiners_since=None))
    since = now if state.joiners_since is None else state.joiners_since
    may_wait = now < since + state.settings.scale_up_stabilization and len(joining) < free
    if may_wait and (not state.operator_seen or any(missing_pods(state, ready=True))):
        return RoundDecision(replace(state, joiners_since=since)) if state.joiners_since is None else None
    message = f"{with_noun(places, 'worker pod')} can join: {pod_names(n.pod for n in joining[:places])}"
    return begin_end(state, round_, EndReason.SCALING_UP, message, now, on_plan=True)


def _wanted_ready_agents(state: CoordinatorState) -> list[KnownAgent]:
    """Return the ready candidates, without those beyond the target and the spares: the operator deletes their pods."""
    return [n for n in candidates(state) if n.ready and n.index < state.settings.desired_pods]

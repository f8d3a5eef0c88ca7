"""How a round ends: what ends it, and what its members are sent until their workers have stopped. Pure.

`begin_end` is the only way in. This module calls it for broken rounds and for members that leave, `round_size` for a
change of size, and `recovered_round` for a round that a recovering store cannot restore.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from elasticjob._runtime.contract.messages import (
    EndReason,
    EndRound,
    FailureClass,
    MemberState,
    PlanEnd,
)
from elasticjob._runtime.contract.text import with_noun
from elasticjob._runtime.diagnosis import HANG_GRACE
from elasticjob._runtime.rendezvous.decision import RoundDecision, pod_names
from elasticjob._runtime.rendezvous.rounds.ends import planned_end
from elasticjob._runtime.rendezvous.state import (
    BREAK_TIMEOUT,
    STOP_TIMEOUT,
    CoordinatorState,
    KnownAgent,
    PlannedStop,
    Round,
    RoundEnding,
    SendToAgent,
    departure_reason,
    has_ended_results,
    waits_to_break,
)


def end_broken_round(state: CoordinatorState, now: float) -> RoundDecision | None:
    """Begin the end of a running round for the first of these reasons that holds.

    A member is lost; a member failed; a member leaves (a scale-down if only surplus pods leave) or has stopped; no
    member has the training state any more with which the round was to start.
    """
    round_ = state.round
    if round_ is None or round_.ending is not None:
        return None
    lost = [m.pod for m in round_.members.values() if m.lost]
    if lost:
        return begin_end(state, round_, EndReason.AGENT_LOST, f"{pod_names(lost)} lost", now)
    # A failure and the stop after it may arrive together, and leave the member STOPPED: the reports count as well.
    reported = {f.pod for f in round_.failures}
    failed = [m.pod for m in round_.members.values() if m.state is MemberState.FAILED or m.pod in reported]
    if failed:
        problem = "no progress" if _has_hang(round_) else "worker failure"
        return begin_end(state, round_, EndReason.WORKER_FAILED, f"{problem} on {pod_names(failed)}", now)
    departing = {agent_id for agent_id, n in state.agents.items() if departure_reason(state, n)}
    leaving = [state.agents[a] for a in round_.members if a in departing]
    stopped = [
        m.pod for a, m in round_.members.items() if m.state is MemberState.STOPPED or has_ended_results(state, a)
    ]
    if leaving and not stopped and _are_surplus(state, round_, leaving):
        return begin_scale_down(state, round_, now)
    if leaving or stopped:
        names = pod_names([n.pod for n in leaving] or stopped)
        return begin_end(state, round_, EndReason.NODE_LEFT, f"{names} left", now, on_plan=True)
    if _has_lost_state(state, round_):
        message = "the last process with the training state ended as the round began"
        return begin_end(state, round_, EndReason.AGENT_LOST, message, now)
    return None


def _are_surplus(state: CoordinatorState, round_: Round, leaving: Collection[KnownAgent]) -> bool:
    """Return whether these members leave because the job needs fewer worker pods, or other ones.

    The operator may remove any index: a pod that must leave its Node anyway goes before one with a higher index.
    """
    unwanted = all(n.index >= state.settings.desired_pods for n in leaving)
    return unwanted or len(round_.members) - len(leaving) >= state.settings.target


def _has_lost_state(state: CoordinatorState, round_: Round) -> bool:
    """Return whether the members were to start from a training state, and none of them has it any more.

    Their scripts may have read an outdated checkpoint before the round. The assignments of the next round tell them
    (`state_known`).
    """
    if round_.formed_at or state.rounds < 2 or not next(iter(round_.members.values())).assignment.state_known:
        return False
    return not any(a in state.agents and state.agents[a].has_state for a in round_.members)


def begin_scale_down(state: CoordinatorState, round_: Round, now: float) -> RoundDecision:
    """Begin a planned end because the job needs fewer worker pods, or other ones."""
    target = state.settings.target
    message = f"{with_noun(len(round_.members), 'worker pod')} in the round, the target is {target}"
    if len(round_.members) <= target:
        surplus = [m.pod for a, m in round_.members.items() if state.agents[a].index >= state.settings.desired_pods]
        message = f"no longer needed: {pod_names(surplus)}"
    return begin_end(state, round_, EndReason.SCALING_DOWN, message, now, on_plan=True)


def advance_planned_end(state: CoordinatorState, now: float) -> RoundDecision | None:
    """Send the last step of a planned end to all members; if the plan fails, stop them all at once."""
    round_ = state.round
    if round_ is None or round_.ending is None or all(m.accounted_for for m in round_.members.values()):
        return None
    decision = planned_end.evaluate_planned_end(round_, state.settings.graceful_shutdown, now)
    if decision is None:
        return None
    if decision.last_step is not None:
        plan = replace(round_.ending.planned_stop or PlannedStop(), last_step=decision.last_step)
        ending = replace(round_.ending, planned_stop=plan)
    else:
        # A plan that fails leaves its members the rest of the graceful time; a failure ends that time.
        at_least = now + state.settings.stop_grace
        kill_at = at_least if decision.failed else max(at_least, round_.ending.kill_at)
        ending = replace(round_.ending, planned_stop=None, since=now, kill_at=kill_at)
    return _send_end(state, replace(round_, ending=ending), ending, decision.reason, now)


def begin_end(
    state: CoordinatorState, round_: Round, reason: EndReason, message: str, now: float, *, on_plan: bool = False
) -> RoundDecision:
    """Begin the end of a round: its members stop at once or, with `on_plan`, report their steps first if they can."""
    planned_stop = PlannedStop() if on_plan and planned_end.can_plan(round_) else None
    ending = RoundEnding(reason, message, now, on_plan, planned_stop, now + _grace(state, on_plan))
    log_reason = f"round {round_.id} ends ({reason.value}): {message}"
    return _send_end(state, replace(round_, ending=ending), ending, log_reason, now)


def _grace(state: CoordinatorState, on_plan: bool) -> float:
    """Return the seconds that workers have to end: `stop_grace` for the peers of a failure; a planned end leaves time
    to save, `graceful_shutdown`."""
    settings = state.settings
    return max(settings.stop_grace, settings.graceful_shutdown) if on_plan else settings.stop_grace


def _send_end(
    state: CoordinatorState, round_: Round, ending: RoundEnding, log_reason: str, now: float
) -> RoundDecision:
    message = end_message(state, round_, ending, now)
    effects = tuple(SendToAgent(a, message) for a, m in round_.members.items() if not m.accounted_for)
    return RoundDecision(replace(state, round=round_), effects, log_reason)


def end_message(state: CoordinatorState, round_: Round, ending: RoundEnding, now: float) -> PlanEnd | EndRound:
    """Return the message that members get in the present phase of a round's end."""
    last_step = ending.planned_stop.last_step if ending.planned_stop else None
    if ending.planned_stop is not None and last_step is None:
        return PlanEnd(round_.id, ending.message)
    hang, grace = _has_hang(round_), max(state.settings.stop_grace, round(ending.kill_at - now, 3))
    grace = min(grace, HANG_GRACE) if hang else grace
    return EndRound(round_.id, grace, ending.message, ending.planned, last_step, dump_stacks=hang)


def _has_hang(round_: Round) -> bool:
    return any(f.kind is FailureClass.HANG for f in round_.failures)


def stop_deadline(state: CoordinatorState, ending: RoundEnding) -> float:
    """Return when members count as lost that have reported neither `WorkersStopped` nor `NodeResultsEnded`."""
    return ending.kill_at + (BREAK_TIMEOUT if waits_to_break(state) else STOP_TIMEOUT)

"""How rounds end: what breaks them, what is told to their members, what was the cause, who is charged. Pure."""

from __future__ import annotations

from dataclasses import replace

from elasticjob.contract.messages import (
    EndReason,
    EndRound,
    Failure,
    FailureClass,
    Finish,
    HangAction,
    MemberState,
    Outcome,
    PlanEnd,
    RoundEnded,
)
from elasticjob.diagnosis import HANG_GRACE, root_cause
from elasticjob.rendezvous import confirmation, planned_end
from elasticjob.rendezvous.decision import RoundDecision, pod_names
from elasticjob.rendezvous.state import (
    STOP_TIMEOUT,
    CoordinatorState,
    PlannedStop,
    Round,
    RoundEnding,
    SendToNode,
    departure_reason,
    set_node,
)


def expire_lost_nodes(state: CoordinatorState, now: float) -> RoundDecision | None:
    """Members whose node is dead, or does not stop, are given up."""
    round_ = state.round
    if round_ is None:
        return None
    stopping = round_.ending is not None and round_.ending.planned_stop is None
    late = stopping and round_.ending is not None and now >= stop_deadline(state, round_.ending)
    linked = {b for b, n in state.nodes.items() if n.disconnected_at is None}
    suspects = round_.members if late else [b for b in round_.members if b not in linked]
    lost = {b: None for b in suspects if not round_.members[b].accounted_for and (late or _dead(state, b, now))}
    if not lost:
        return None
    members = {b: replace(m, lost=True) if b in lost else m for b, m in round_.members.items()}
    state = replace(state, round=replace(round_, members=members))
    for agent_id in lost:
        if agent_id in state.nodes:
            state = set_node(state, replace(state.nodes[agent_id], stale_round=round_.id))
    return RoundDecision(state, reason=f"{pod_names(members[b].pod for b in lost)} lost")


def _dead(state: CoordinatorState, agent_id: str, now: float) -> bool:
    node = state.nodes.get(agent_id)
    if node is None or node.expired(now):
        return True
    # A closed link of a pod that Kubernetes calls gone needs no grace.
    return node.disconnected_at is not None and bool(state.operator_seen and departure_reason(state, node))


def declare_success(state: CoordinatorState, now: float) -> RoundDecision | None:
    """Success is declared once every member has reported it."""
    round_ = state.round
    if round_ is None or (round_.ending is not None and round_.ending.planned_stop is None):
        return None
    if not all(m.state is MemberState.SUCCEEDED and not m.lost for m in round_.members.values()):
        return None
    ended = _ended(state, round_, EndReason.SUCCEEDED, "all workers succeeded", now)
    state = replace(state, round=None, ended_rounds=(*state.ended_rounds, ended))
    return _declare(state, Outcome.SUCCEEDED, "AllAgentsSucceeded", None)


def end_broken_round(state: CoordinatorState, now: float) -> RoundDecision | None:
    """A round that cannot go on as it is ends."""
    round_ = state.round
    if round_ is None or round_.ending is not None:
        return None
    lost = [m.pod for m in round_.members.values() if m.lost]
    if lost:
        return begin_end(state, round_, EndReason.AGENT_LOST, f"{pod_names(lost)} lost", now)
    # Told and stopped may arrive together: what was told counts, not only the state it left behind.
    told = {f.pod for f in round_.failures}
    failed = [m.pod for m in round_.members.values() if m.state is MemberState.FAILED or m.pod in told]
    if failed:
        what = "makes no progress" if _hangs(round_) else "failed"
        return begin_end(state, round_, EndReason.WORKER_FAILED, f"a worker of {pod_names(failed)} {what}", now)
    about_to_go = {b for b, n in state.nodes.items() if departure_reason(state, n)}
    going = [state.nodes[b] for b in round_.members if b in about_to_go]
    stopped = [m.pod for m in round_.members.values() if m.state is MemberState.STOPPED]
    if going and not stopped and all(n.index >= state.settings.desired_pods for n in going):
        return begin_scale_down(state, round_, now)
    if going or stopped:
        who = pod_names([n.pod for n in going] or stopped)
        return begin_end(state, round_, EndReason.NODE_LEFT, f"{who} left", now, on_plan=True)
    return None


def begin_scale_down(state: CoordinatorState, round_: Round, now: float) -> RoundDecision:
    message = f"from {len(round_.members)} nodes to at most {state.settings.target}"
    if len(round_.members) <= state.settings.target:
        unwanted = [m.pod for b, m in round_.members.items() if state.nodes[b].index >= state.settings.desired_pods]
        message = f"{pod_names(unwanted)} is not wanted any more"
    return begin_end(state, round_, EndReason.SCALING_DOWN, message, now, on_plan=True)


def advance_planned_end(state: CoordinatorState, now: float) -> RoundDecision | None:
    """A planned end comes to its last step, or does not come about: then everybody stops at once."""
    round_ = state.round
    if round_ is None or round_.ending is None or all(m.accounted_for for m in round_.members.values()):
        return None
    verdict = planned_end.evaluate_planned_end(round_, state.settings.graceful_shutdown, now)
    if verdict is None:
        return None
    plan = round_.ending.planned_stop if verdict.last_step is not None else None
    plan = plan and replace(plan, last_step=verdict.last_step)
    ending = replace(round_.ending, planned_stop=plan, since=round_.ending.since if plan else now)
    return _tell_end(state, replace(round_, ending=ending), ending, verdict.reason)


def conclude_round(state: CoordinatorState, now: float) -> RoundDecision | None:
    """Once nothing of a round runs any more its cause is known: charge it, and go on or give up."""
    round_ = state.round
    if round_ is None or round_.ending is None or not all(m.accounted_for for m in round_.members.values()):
        return None
    ended = _cause(state, round_, round_.ending, now)
    hang = ended.failure is not None and ended.failure.kind is FailureClass.HANG
    fatal = hang and ended.charged and state.settings.hang_action is HangAction.FAIL_JOB
    spent = fatal or (ended.charged and state.charged >= state.settings.max_restarts)
    ended = replace(ended, charged=ended.charged and not spent)
    state = confirmation.record_ended_round(state, round_)
    state = replace(state, round=None, joiners_since=None, ended_rounds=(*state.ended_rounds, ended))
    if spent:
        return _declare(state, Outcome.FAILED, "HangDetected" if fatal else "MaxRestartsExceeded", ended.failure)
    return RoundDecision(state, reason=f"round {round_.id} ended: {ended.message}")


def _cause(state: CoordinatorState, round_: Round, ending: RoundEnding, now: float) -> RoundEnded:
    """The root cause. A broken collective is never one while a member is lost or leaving, or the end was planned;
    nor is what happened on a node that went."""
    lost = tuple(m.pod for m in round_.members.values() if m.lost)
    gone = {*lost}
    left = tuple(
        n.pod for b in round_.members if (n := state.nodes.get(b)) and n.pod not in gone and departure_reason(state, n)
    )
    gone |= {*left}
    root = root_cause(f for f in round_.failures if f.pod not in gone)
    echo = root is not None and root.kind is FailureClass.COLLECTIVE_FAILED
    if root is not None and not (echo and (lost or left or ending.reason is not EndReason.WORKER_FAILED)):
        return _ended(state, round_, EndReason.WORKER_FAILED, _tell(root), now, failure=root)
    if lost or ending.reason is EndReason.AGENT_LOST:
        message = f"{pod_names(lost)} lost" if lost else ending.message
        return _ended(state, round_, EndReason.AGENT_LOST, message, now, lost=lost)
    if left and ending.reason is not EndReason.SCALING_DOWN:
        unfit = next((state.unhealthy[pod] for pod in left if pod in state.unhealthy), None)
        message = f"{unfit.pod} is not fit: {unfit.message}" if unfit else f"{pod_names(left)} left"
        return _ended(state, round_, EndReason.NODE_LEFT, message, now, failure=unfit, lost=left)
    return _ended(state, round_, ending.reason, ending.message, now)


def _tell(failure: Failure) -> str:
    if failure.kind is FailureClass.HANG:
        return f"rank {failure.rank} in {failure.pod}: {failure.message.partition(chr(10))[0]}"
    what = failure.exception or failure.signal or f"exit code {failure.exit_code}"
    where = failure.pod if failure.rank is None else f"rank {failure.rank} in {failure.pod}"
    return f"{where} failed: {what}"


def _ended(
    state: CoordinatorState,
    round_: Round,
    reason: EndReason,
    message: str,
    now: float,
    *,
    failure: Failure | None = None,
    lost: tuple[str, ...] = (),
) -> RoundEnded:
    charged = reason is EndReason.WORKER_FAILED
    return RoundEnded(round_.id, reason, message, charged, state.epoch + now, round_.world_size, failure, lost)


def begin_end(
    state: CoordinatorState, round_: Round, reason: EndReason, message: str, now: float, *, on_plan: bool = False
) -> RoundDecision:
    """Begin a round's end: everybody in it is told at once. On plan they are asked for their steps first."""
    ending = RoundEnding(
        reason, message, now, on_plan, PlannedStop() if on_plan and planned_end.can_plan(round_) else None
    )
    return _tell_end(
        state, replace(round_, ending=ending), ending, f"round {round_.id} ends ({reason.value}): {message}"
    )


def _tell_end(state: CoordinatorState, round_: Round, ending: RoundEnding, why: str) -> RoundDecision:
    word = end_message(state, round_, ending)
    effects = tuple(SendToNode(b, word) for b, m in round_.members.items() if not m.accounted_for)
    return RoundDecision(replace(state, round=round_), effects, why)


def end_message(state: CoordinatorState, round_: Round, ending: RoundEnding) -> PlanEnd | EndRound:
    """What a member has to be told now."""
    last_step = ending.planned_stop.last_step if ending.planned_stop else None
    if ending.planned_stop is not None and last_step is None:
        return PlanEnd(round_.id, ending.message)
    hang, grace = _hangs(round_), state.settings.stop_grace
    grace = min(grace, HANG_GRACE) if hang else grace
    return EndRound(round_.id, grace, ending.message, ending.planned, last_step, dump_stacks=hang)


def _hangs(round_: Round) -> bool:
    return any(f.kind is FailureClass.HANG for f in round_.failures)


def stop_deadline(state: CoordinatorState, ending: RoundEnding) -> float:
    return ending.since + state.settings.stop_grace + STOP_TIMEOUT


def _declare(state: CoordinatorState, outcome: Outcome, reason: str, failure: Failure | None) -> RoundDecision:
    """The job's end, told to everybody now and to whoever asks later; never undone."""
    finish = Finish(outcome, reason, _tell(failure) if failure else "")
    return _finish(replace(state, failure=failure), finish, f"{outcome.value}: {reason}")


def adopt_outcome(state: CoordinatorState, now: float) -> RoundDecision | None:
    """An end that the operator knows of: another store declared it, as the termination message of a node tells."""
    finish = state.operator_view.finish
    if finish is None or state.outcome is not None:
        return None
    state = replace(state, round=None, recovering_until=None)
    return _finish(state, finish, f"{finish.outcome.value}, by the operator's word: {finish.reason}")


def _finish(state: CoordinatorState, finish: Finish, why: str) -> RoundDecision:
    state = replace(state, outcome=finish.outcome, outcome_reason=finish.reason)
    return RoundDecision(state, tuple(SendToNode(agent_id, finish) for agent_id in state.nodes), why)

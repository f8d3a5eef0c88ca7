"""How a round ends: what ends it, what its members are sent, its root cause and whether a restart is charged. Pure.

`begin_end` is the only way in: this module calls it for broken rounds and for nodes that leave, `rounds` calls it for a
change of size and for a round that a recovering store cannot restore.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from elasticjob._runtime.contract.failures.failure_rules import (
    REPLACING_ACTIONS,
    UNCOUNTED_ACTIONS,
    FailureAction,
    first_match,
    shell_exit_code,
)
from elasticjob._runtime.contract.failures.failure_text import describe_worker_failure, with_ended_ranks
from elasticjob._runtime.contract.messages import (
    EndReason,
    EndRound,
    Failure,
    FailureClass,
    Finish,
    HangAction,
    MemberState,
    Outcome,
    PlanEnd,
    RestartStrategy,
    RoundEnded,
    SuccessPolicy,
)
from elasticjob._runtime.contract.names import FINAL_EXCEPTIONS
from elasticjob._runtime.contract.text import with_noun
from elasticjob._runtime.diagnosis import HANG_GRACE, root_cause
from elasticjob._runtime.rendezvous.decision import RoundDecision, pod_names
from elasticjob._runtime.rendezvous.rounds import confirmation, planned_end, restart_delay
from elasticjob._runtime.rendezvous.state import (
    BREAK_TIMEOUT,
    STOP_TIMEOUT,
    CoordinatorState,
    Member,
    Node,
    PlannedStop,
    Round,
    RoundEnding,
    SendToNode,
    add_ended_round,
    departure_reason,
    has_ended_results,
    set_node,
    waits_to_break,
)


def expire_lost_nodes(state: CoordinatorState, now: float) -> RoundDecision | None:
    """Mark members lost whose node does not reconnect, or does not stop its workers in time."""
    round_ = state.round
    if round_ is None:
        return None
    stopping = round_.ending is not None and round_.ending.planned_stop is None
    overdue = stopping and round_.ending is not None and now >= stop_deadline(state, round_.ending)
    connected = {agent_id for agent_id, n in state.nodes.items() if n.disconnected_at is None}
    late = {a for a in round_.members if overdue and not has_ended_results(state, a)}
    suspects = [a for a in round_.members if a in late or a not in connected]
    lost = {
        a: None
        for a in suspects
        if not (member := round_.members[a]).accounted_for and (a in late or _is_lost(state, a, member, now))
    }
    if not lost:
        return None
    members = {
        a: replace(m, lost=True, unresponsive=a in connected) if a in lost else m for a, m in round_.members.items()
    }
    state = replace(state, round=replace(round_, members=members))
    for agent_id in lost:
        if agent_id in state.nodes:
            node = replace(state.nodes[agent_id], stale_round=round_.id, unresponsive=agent_id in connected)
            state = set_node(state, node)
    return RoundDecision(state, reason=f"{pod_names(members[a].pod for a in lost)} lost")


def mark_finished_as_stopped(state: CoordinatorState, now: float) -> RoundDecision | None:
    """Mark members as stopped that have succeeded and left a closed rendezvous, now that their round ends.

    No further round forms, so their agents do not report that their workers have stopped.
    """
    round_ = state.round
    if round_ is None or round_.ending is None or not state.closed_reason:
        return None
    gone = {a for a, m in round_.members.items() if _has_finished(state, m) and _is_gone(state, a, now)}
    if not gone:
        return None
    members = {a: replace(m, state=MemberState.STOPPED) if a in gone else m for a, m in round_.members.items()}
    return RoundDecision(replace(state, round=replace(round_, members=members)))


def _has_finished(state: CoordinatorState, member: Member) -> bool:
    """Return whether no round needs the node any more: its workers succeeded, and no further round will form."""
    return bool(state.closed_reason) and member.state is MemberState.SUCCEEDED and not member.lost


def _is_lost(state: CoordinatorState, agent_id: str, member: Member, now: float) -> bool:
    return not _has_finished(state, member) and _is_gone(state, agent_id, now)


def _is_gone(state: CoordinatorState, agent_id: str, now: float) -> bool:
    node = state.nodes.get(agent_id)
    if node is None or node.expired(now):
        return True
    # A disconnected node that is leaving does not come back: it gets no grace.
    return node.disconnected_at is not None and bool(state.operator_seen and departure_reason(state, node))


def declare_success(state: CoordinatorState, now: float) -> RoundDecision | None:
    """Declare success once every member has reported that its workers succeeded, or one if the policy is Any."""
    round_ = state.round
    if round_ is None:
        return None
    if state.settings.success_policy is SuccessPolicy.ANY:
        return _declare_success_of_one(state, round_, now)
    if round_.ending is not None and round_.ending.planned_stop is None:
        return None
    if not all(m.state is MemberState.SUCCEEDED and not m.lost for m in round_.members.values()):
        return None
    ended = _round_ended(state, round_, EndReason.SUCCEEDED, "all workers succeeded", now)
    state = add_ended_round(replace(state, round=None), ended)
    return _declare_outcome(state, Outcome.SUCCEEDED, "AllAgentsSucceeded", None)


def _declare_success_of_one(state: CoordinatorState, round_: Round, now: float) -> RoundDecision | None:
    """Declare success of the first member whose workers have all succeeded, even if the round is ending: its work is
    done. `Finish` makes the agents of the others stop their workers."""
    pod = next((m.pod for m in round_.members.values() if m.state is MemberState.SUCCEEDED), None)
    if pod is None:
        return None
    ended = _round_ended(state, round_, EndReason.SUCCEEDED, f"all workers of {pod} succeeded", now)
    state = add_ended_round(replace(state, round=None), ended)
    return _declare_outcome(state, Outcome.SUCCEEDED, "SuccessPolicy", None)


def end_broken_round(state: CoordinatorState, now: float) -> RoundDecision | None:
    """End a running round with a lost, failed, leaving or stopped member."""
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
    departing = {agent_id for agent_id, n in state.nodes.items() if departure_reason(state, n)}
    leaving = [state.nodes[a] for a in round_.members if a in departing]
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


def _are_surplus(state: CoordinatorState, round_: Round, leaving: Collection[Node]) -> bool:
    """Return whether these members leave because the job needs fewer nodes, or other ones.

    The operator may choose any index to go: one that must leave its machine anyway goes before a higher one.
    """
    unwanted = all(n.index >= state.settings.desired_pods for n in leaving)
    return unwanted or len(round_.members) - len(leaving) >= state.settings.target


def _has_lost_state(state: CoordinatorState, round_: Round) -> bool:
    """Return whether a round that has not formed was promised a state which no member has any more.

    What its scripts have read ahead may be outdated. The assignments of the next round say so.
    """
    if round_.formed_at or state.rounds < 2 or not next(iter(round_.members.values())).assignment.state_known:
        return False
    return not any(a in state.nodes and state.nodes[a].has_state for a in round_.members)


def begin_scale_down(state: CoordinatorState, round_: Round, now: float) -> RoundDecision:
    """Begin a planned end because the job needs fewer nodes, or other ones."""
    target = state.settings.target
    message = f"{with_noun(len(round_.members), 'node')} in the round, the target is {target}"
    if len(round_.members) <= target:
        surplus = [m.pod for a, m in round_.members.items() if state.nodes[a].index >= state.settings.desired_pods]
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


def conclude_round(state: CoordinatorState, now: float) -> RoundDecision | None:
    """Conclude a round whose workers have all stopped: find the root cause, charge it, and fail the job if it must."""
    round_ = state.round
    if round_ is None or round_.ending is None or not all(m.accounted_for for m in round_.members.values()):
        return None
    ended = _find_cause(state, round_, round_.ending, now)
    hang = ended.failure is not None and ended.failure.kind is FailureClass.HANG
    fatal_hang = hang and ended.charged and state.settings.hang_action is HangAction.FAIL_JOB
    ended = ended if fatal_hang else _apply_failure_rules(state, ended)
    failed_by_rule = ended.action is FailureAction.FAIL_JOB
    final = FINAL_EXCEPTIONS.get(ended.failure.exception, "") if ended.failure is not None else ""
    at_once = fatal_hang or failed_by_rule or bool(final)
    job_failed = at_once or (ended.charged and state.charged_at(ended.time) >= state.settings.max_restarts)
    ended = replace(ended, charged=ended.charged and not job_failed)
    stop = now - round_.ending.since
    stop = stop if state.shortest_stop is None else min(stop, state.shortest_stop)
    state = replace(confirmation.record_ended_round(state, round_), shortest_stop=stop)
    state = add_ended_round(replace(state, round=None, joiners_since=None), ended)
    if job_failed:
        by_rule = "FailurePolicyRule" if failed_by_rule else ""
        reason = "HangDetected" if fatal_hang else by_rule or final or "MaxRestartsExceeded"
        return _declare_outcome(
            state, Outcome.FAILED, reason, ended.failure, _describe_job_failure(state, ended, reason)
        )
    if ended.reason is EndReason.WORKER_FAILED:
        state = restart_delay.delay_next_round(state, ended.time, now)
    state = replace(state, replaced={**state.replaced, **_replaced_pods(state, round_, ended)})
    return RoundDecision(state, reason=f"round {round_.id} ended: {ended.message}")


def _recreates(state: CoordinatorState, ended: RoundEnded) -> bool:
    """Return whether the pods of the round are replaced: a fault ended it, and restartStrategy is Recreate."""
    fault = ended.reason in (EndReason.WORKER_FAILED, EndReason.AGENT_LOST)
    return fault and state.settings.restart_strategy is RestartStrategy.RECREATE


def _replaced_pods(state: CoordinatorState, round_: Round, ended: RoundEnded) -> dict[str, str]:
    """Return the pods that are replaced, and why: those of the whole round, or the one whose worker has failed."""
    if _recreates(state, ended):
        why = f"restartStrategy is Recreate, and round {round_.id} has failed"
        return dict.fromkeys((m.pod for m in round_.members.values()), why)
    if ended.failure is None or ended.action not in REPLACING_ACTIONS:
        return {}
    return {ended.failure.pod: f"failurePolicy rule {ended.rule} replaces its pod"}


def _apply_failure_rules(state: CoordinatorState, ended: RoundEnded) -> RoundEnded:
    """Return the ended round with the first rule that matches its root cause; unchanged if no rule matches.

    Only a round that a worker ended has a failure of the program. The rule applies even if the round is counted
    already: another failure of the same round may have matched no rule.
    """
    failure = ended.failure
    if failure is None or ended.reason is not EndReason.WORKER_FAILED:
        return ended
    code = shell_exit_code(failure.exit_code, failure.signal)
    rule = first_match(state.settings.failure_rules, code, [failure.kind.value])
    if rule is None:
        return ended
    counts = rule.action not in UNCOUNTED_ACTIONS
    return replace(ended, rule=rule.name, action=rule.action, charged=ended.charged and counts)


def _find_cause(state: CoordinatorState, round_: Round, ending: RoundEnding, now: float) -> RoundEnded:
    """Return the ended round with its root cause.

    Failures on nodes that were lost or left are never the cause. A broken collective is not the cause if a member was
    lost or left, or if the round ended for another reason than a failed worker.
    """
    lost = tuple(m.pod for m in round_.members.values() if m.lost)
    excused = {*lost}
    left = tuple(
        n.pod
        for a in round_.members
        if (n := state.nodes.get(a)) and n.pod not in excused and departure_reason(state, n)
    )
    excused |= {*left}
    cause = root_cause(f for f in round_.failures if f.pod not in excused)
    broken_collective = cause is not None and cause.kind is FailureClass.COLLECTIVE_FAILED
    if cause and not (broken_collective and (excused or ending.reason is not EndReason.WORKER_FAILED)):
        ended_ranks = {rank for ranks in round_.ended_ranks for rank in ranks}
        cause = with_ended_ranks(cause, ended_ranks) if broken_collective else cause
        return _round_ended(state, round_, EndReason.WORKER_FAILED, describe_worker_failure(cause), now, failure=cause)
    if lost or ending.reason is EndReason.AGENT_LOST:
        message = f"{pod_names(lost)} lost" if lost else ending.message
        return _round_ended(state, round_, EndReason.AGENT_LOST, message, now, lost=lost)
    if left and ending.reason is not EndReason.SCALING_DOWN:
        unhealthy = next((state.unhealthy[pod] for pod in left if pod in state.unhealthy), None)
        message = f"{unhealthy.pod} is unhealthy: {unhealthy.message}" if unhealthy else f"{pod_names(left)} left"
        return _round_ended(state, round_, EndReason.NODE_LEFT, message, now, failure=unhealthy, lost=left)
    return _round_ended(state, round_, ending.reason, ending.message, now)


def _round_ended(
    state: CoordinatorState,
    round_: Round,
    reason: EndReason,
    message: str,
    now: float,
    *,
    failure: Failure | None = None,
    lost: tuple[str, ...] = (),
) -> RoundEnded:
    # A store that was lost may have concluded the same round before, or a pod of the round has ended: status then
    # contains the charge.
    charged = reason is EndReason.WORKER_FAILED and not state.is_counted(round_.id)
    return RoundEnded(round_.id, reason, message, charged, state.epoch + now, round_.world_size, failure, lost)


def begin_end(
    state: CoordinatorState, round_: Round, reason: EndReason, message: str, now: float, *, on_plan: bool = False
) -> RoundDecision:
    """Begin the end of a round: its members stop at once or, with `on_plan`, report their steps first if they can."""
    planned_stop = PlannedStop() if on_plan and planned_end.can_plan(round_) else None
    ending = RoundEnding(reason, message, now, on_plan, planned_stop, now + _grace(state, on_plan))
    log_reason = f"round {round_.id} ends ({reason.value}): {message}"
    return _send_end(state, replace(round_, ending=ending), ending, log_reason, now)


def _grace(state: CoordinatorState, on_plan: bool) -> float:
    """Return the seconds that workers have to end; `stop_grace` is for the peers of a failure only."""
    settings = state.settings
    return max(settings.stop_grace, settings.graceful_shutdown) if on_plan else settings.stop_grace


def _send_end(
    state: CoordinatorState, round_: Round, ending: RoundEnding, log_reason: str, now: float
) -> RoundDecision:
    message = end_message(state, round_, ending, now)
    effects = tuple(SendToNode(a, message) for a, m in round_.members.items() if not m.accounted_for)
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
    """Return when members that have not reported their workers stopped, nor their results ended, count as lost."""
    return ending.kill_at + (BREAK_TIMEOUT if waits_to_break(state) else STOP_TIMEOUT)


def _describe_job_failure(state: CoordinatorState, ended: RoundEnded, reason: str) -> str:
    """Return why the job has failed, in the words of the condition Failed."""
    if reason == "FailurePolicyRule":
        return f"failurePolicy rule {ended.rule} matched: {ended.message}"
    if reason == "HangDetected":
        return f"training hung and hangPolicy.action is FailJob; last failure: {ended.message}"
    if reason in FINAL_EXCEPTIONS.values():
        return f"no restart can mend this: {ended.message}"
    settings = state.settings
    within = f" within {settings.restart_window:g} s" if settings.restart_window else ""
    restarts = f"{state.charged_at(ended.time)} of {with_noun(settings.max_restarts, 'restart')}{within}"
    return f"workers failed after {restarts}; last failure: {ended.message}"


def _declare_outcome(
    state: CoordinatorState, outcome: Outcome, reason: str, failure: Failure | None, message: str = ""
) -> RoundDecision:
    """Declare the outcome of the job. It is final; nodes that announce themselves later get it too."""
    finish = Finish(outcome, reason, message)
    return _finish_job(replace(state, failure=failure), finish, f"the job has ended: {outcome.value} ({reason})")


def adopt_outcome(state: CoordinatorState, now: float) -> RoundDecision | None:
    """Adopt an outcome that another store declared: the operator found it in a node's termination message."""
    finish = state.operator_view.finish
    if finish is None or state.outcome is not None:
        return None
    state = replace(state, round=None, recovering_until=None)
    log_reason = f"the job has ended, as the operator reports: {finish.outcome.value} ({finish.reason})"
    return _finish_job(state, finish, log_reason)


def _finish_job(state: CoordinatorState, finish: Finish, log_reason: str) -> RoundDecision:
    state = replace(state, outcome=finish.outcome, outcome_reason=finish.reason)
    return RoundDecision(state, tuple(SendToNode(agent_id, finish) for agent_id in state.nodes), log_reason)

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
from elasticjob.rendezvous.decision import Decision, names
from elasticjob.rendezvous.state import (
    STOP_TIMEOUT,
    Ending,
    Plan,
    Round,
    Send,
    State,
    departing,
    set_node,
)


def lose(state: State, now: float) -> Decision | None:
    """Members whose node is dead, or does not stop, are given up."""
    round_ = state.round
    if round_ is None:
        return None
    stopping = round_.ending is not None and round_.ending.plan is None
    late = stopping and round_.ending is not None and now >= stop_deadline(state, round_.ending)
    linked = {b for b, n in state.nodes.items() if n.gone_at is None}
    suspects = round_.members if late else [b for b in round_.members if b not in linked]
    lost = {b: None for b in suspects if not round_.members[b].accounted and (late or _dead(state, b, now))}
    if not lost:
        return None
    members = {b: replace(m, lost=True) if b in lost else m for b, m in round_.members.items()}
    state = replace(state, round=replace(round_, members=members))
    for boot in lost:
        if boot in state.nodes:
            state = set_node(state, replace(state.nodes[boot], stale=round_.id))
    return Decision(state, reason=f"{names(members[b].pod for b in lost)} lost")


def _dead(state: State, boot: str, now: float) -> bool:
    node = state.nodes.get(boot)
    if node is None or node.lost(now):
        return True
    # A closed link of a pod that Kubernetes calls gone needs no grace.
    return node.gone_at is not None and bool(state.informed and departing(state, node))


def succeed(state: State, now: float) -> Decision | None:
    """Success is declared once every member has reported it."""
    round_ = state.round
    if round_ is None or (round_.ending is not None and round_.ending.plan is None):
        return None
    if not all(m.state is MemberState.SUCCEEDED and not m.lost for m in round_.members.values()):
        return None
    ended = _ended(state, round_, EndReason.SUCCEEDED, "all workers succeeded", now)
    state = replace(state, round=None, ended=(*state.ended, ended))
    return _declare(state, Outcome.SUCCEEDED, "AllAgentsSucceeded", None)


def end_broken(state: State, now: float) -> Decision | None:
    """A round that cannot go on as it is ends."""
    round_ = state.round
    if round_ is None or round_.ending is not None:
        return None
    lost = [m.pod for m in round_.members.values() if m.lost]
    if lost:
        return end(state, round_, EndReason.AGENT_LOST, f"{names(lost)} lost", now)
    # Told and stopped may arrive together: what was told counts, not only the state it left behind.
    told = {f.pod for f in round_.failures}
    failed = [m.pod for m in round_.members.values() if m.state is MemberState.FAILED or m.pod in told]
    if failed:
        what = "makes no progress" if _hangs(round_) else "failed"
        return end(state, round_, EndReason.WORKER_FAILED, f"a worker of {names(failed)} {what}", now)
    about_to_go = {b for b, n in state.nodes.items() if departing(state, n)}
    going = [state.nodes[b] for b in round_.members if b in about_to_go]
    stopped = [m.pod for m in round_.members.values() if m.state is MemberState.STOPPED]
    if going and not stopped and all(n.slot >= state.settings.slots for n in going):
        return scale_down(state, round_, now)
    if going or stopped:
        who = names([n.pod for n in going] or stopped)
        return end(state, round_, EndReason.NODE_LEFT, f"{who} left", now, on_plan=True)
    return None


def scale_down(state: State, round_: Round, now: float) -> Decision:
    message = f"from {len(round_.members)} nodes to at most {state.settings.target}"
    if len(round_.members) <= state.settings.target:
        unwanted = [m.pod for b, m in round_.members.items() if state.nodes[b].slot >= state.settings.slots]
        message = f"{names(unwanted)} is not wanted any more"
    return end(state, round_, EndReason.SCALING_DOWN, message, now, on_plan=True)


def agree(state: State, now: float) -> Decision | None:
    """A planned end comes to its last step, or does not come about: then everybody stops at once."""
    round_ = state.round
    if round_ is None or round_.ending is None or all(m.accounted for m in round_.members.values()):
        return None
    verdict = planned_end.judge(round_, state.settings.graceful_shutdown, now)
    if verdict is None:
        return None
    plan = round_.ending.plan if verdict.last_step is not None else None
    plan = plan and replace(plan, last_step=verdict.last_step)
    ending = replace(round_.ending, plan=plan, since=round_.ending.since if plan else now)
    return _tell_end(state, replace(round_, ending=ending), ending, verdict.reason)


def conclude(state: State, now: float) -> Decision | None:
    """Once nothing of a round runs any more its cause is known: charge it, and go on or give up."""
    round_ = state.round
    if round_ is None or round_.ending is None or not all(m.accounted for m in round_.members.values()):
        return None
    ended = _cause(state, round_, round_.ending, now)
    hang = ended.failure is not None and ended.failure.kind is FailureClass.HANG
    fatal = hang and ended.charged and state.settings.hang_action is HangAction.FAIL_JOB
    spent = fatal or (ended.charged and state.charged >= state.settings.max_restarts)
    ended = replace(ended, charged=ended.charged and not spent)
    state = confirmation.ended(state, round_)
    state = replace(state, round=None, joiners_since=None, ended=(*state.ended, ended))
    if spent:
        return _declare(state, Outcome.FAILED, "HangDetected" if fatal else "MaxRestartsExceeded", ended.failure)
    return Decision(state, reason=f"round {round_.id} ended: {ended.message}")


def _cause(state: State, round_: Round, ending: Ending, now: float) -> RoundEnded:
    """The root cause. A broken collective is never one while a member is lost or leaving, or the end was planned;
    nor is what happened on a node that went."""
    lost = tuple(m.pod for m in round_.members.values() if m.lost)
    gone = {*lost}
    left = tuple(
        n.pod for b in round_.members if (n := state.nodes.get(b)) and n.pod not in gone and departing(state, n)
    )
    gone |= {*left}
    root = root_cause(f for f in round_.failures if f.pod not in gone)
    echo = root is not None and root.kind is FailureClass.COLLECTIVE_FAILED
    if root is not None and not (echo and (lost or left or ending.reason is not EndReason.WORKER_FAILED)):
        return _ended(state, round_, EndReason.WORKER_FAILED, _tell(root), now, failure=root)
    if lost or ending.reason is EndReason.AGENT_LOST:
        message = f"{names(lost)} lost" if lost else ending.message
        return _ended(state, round_, EndReason.AGENT_LOST, message, now, lost=lost)
    if left and ending.reason is not EndReason.SCALING_DOWN:
        unfit = next((state.unfit[pod] for pod in left if pod in state.unfit), None)
        message = f"{unfit.pod} is not fit: {unfit.message}" if unfit else f"{names(left)} left"
        return _ended(state, round_, EndReason.NODE_LEFT, message, now, failure=unfit, lost=left)
    return _ended(state, round_, ending.reason, ending.message, now)


def _tell(failure: Failure) -> str:
    if failure.kind is FailureClass.HANG:
        return f"rank {failure.rank} in {failure.pod}: {failure.message.partition(chr(10))[0]}"
    what = failure.exception or failure.signal or f"exit code {failure.exit_code}"
    where = failure.pod if failure.rank is None else f"rank {failure.rank} in {failure.pod}"
    return f"{where} failed: {what}"


def _ended(
    state: State,
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


def end(state: State, round_: Round, reason: EndReason, message: str, now: float, *, on_plan: bool = False) -> Decision:
    """Begin a round's end: everybody in it is told at once. On plan they are asked for their steps first."""
    ending = Ending(reason, message, now, on_plan, Plan() if on_plan and planned_end.possible(round_) else None)
    return _tell_end(
        state, replace(round_, ending=ending), ending, f"round {round_.id} ends ({reason.value}): {message}"
    )


def _tell_end(state: State, round_: Round, ending: Ending, why: str) -> Decision:
    word = word_of_end(state, round_, ending)
    effects = tuple(Send(b, word) for b, m in round_.members.items() if not m.accounted)
    return Decision(replace(state, round=round_), effects, why)


def word_of_end(state: State, round_: Round, ending: Ending) -> PlanEnd | EndRound:
    """What a member has to be told now."""
    last_step = ending.plan.last_step if ending.plan else None
    if ending.plan is not None and last_step is None:
        return PlanEnd(round_.id, ending.message)
    hang, grace = _hangs(round_), state.settings.stop_grace
    grace = min(grace, HANG_GRACE) if hang else grace
    return EndRound(round_.id, grace, ending.message, ending.planned, last_step, stacks=hang)


def _hangs(round_: Round) -> bool:
    return any(f.kind is FailureClass.HANG for f in round_.failures)


def stop_deadline(state: State, ending: Ending) -> float:
    return ending.since + state.settings.stop_grace + STOP_TIMEOUT


def _declare(state: State, outcome: Outcome, reason: str, failure: Failure | None) -> Decision:
    """The job's end, told to everybody now and to whoever asks later; never undone."""
    finish = Finish(outcome, reason, _tell(failure) if failure else "")
    return _finish(replace(state, failure=failure), finish, f"{outcome.value}: {reason}")


def believe(state: State, now: float) -> Decision | None:
    """An end that the operator knows of: another store declared it, as the termination message of a node tells."""
    finish = state.facts.finish
    if finish is None or state.outcome is not None:
        return None
    state = replace(state, round=None, recovering_until=None)
    return _finish(state, finish, f"{finish.outcome.value}, by the operator's word: {finish.reason}")


def _finish(state: State, finish: Finish, why: str) -> Decision:
    state = replace(state, outcome=finish.outcome, outcome_reason=finish.reason)
    return Decision(state, tuple(Send(boot, finish) for boot in state.nodes), why)

"""Planned ends: all workers of a round stop after the same step, so that none is lost. Pure.

    PlanEnd to all ──► StepReport from all ──► EndRound(last step) to all ──► all stop there
          └──── a report missing after ASK_TIMEOUT, a node that cannot, a failure, a deadline ────► EndRound to all

A node answers at once, whatever its workers do: it lets none of them pass its next report, and tells the latest step
that this may be. The last step is the largest of these, so no worker can be past it, and each can still reach it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from elasticjob.contract.messages import MemberState, StepReport
from elasticjob.rendezvous.persistent_map import with_item
from elasticjob.rendezvous.state import Round

ASK_TIMEOUT = 1.0
"""Seconds for all nodes to answer: less than workers are held without an answer (agent.ranks.HOLD_TIMEOUT)."""


@dataclass(frozen=True)
class PlannedEndDecision:
    """What to tell the members now. Without a last step: stop at once."""

    last_step: int | None
    reason: str


def can_plan(round_: Round) -> bool:
    """Whether it is worth asking: every member's workers run, or are done."""
    going_on = (MemberState.RUNNING, MemberState.SUCCEEDED)
    return not round_.failures and all(m.state in going_on and not m.lost for m in round_.members.values())


def record_step(round_: Round, agent_id: str, report: StepReport) -> Round:
    """Take a member's answer in; answers to a question that is settled change nothing."""
    ending = round_.ending
    if ending is None or ending.planned_stop is None or ending.planned_stop.last_step is not None:
        return round_
    steps = with_item(ending.planned_stop.steps, agent_id, report.step)
    return replace(round_, ending=replace(ending, planned_stop=replace(ending.planned_stop, steps=steps)))


def planned_end_deadline(round_: Round, graceful_shutdown: float) -> float | None:
    """When a plan that has not come about is given up; None without one."""
    if round_.ending is None or round_.ending.planned_stop is None:
        return None
    patience = ASK_TIMEOUT if round_.ending.planned_stop.last_step is None else graceful_shutdown
    return round_.ending.since + patience


def evaluate_planned_end(round_: Round, graceful_shutdown: float, now: float) -> PlannedEndDecision | None:
    """The verdict on a round that is to end on plan; None while it is fine to wait."""
    due = planned_end_deadline(round_, graceful_shutdown)
    if round_.ending is None or round_.ending.planned_stop is None or due is None:
        return None
    plan, members = round_.ending.planned_stop, round_.members
    if round_.failures or any(m.lost or m.state is MemberState.FAILED for m in members.values()):
        return PlannedEndDecision(None, "a member failed before the last step")
    if plan.last_step is not None:
        done = all(m.accounted_for or m.state is MemberState.SUCCEEDED for m in members.values())
        return PlannedEndDecision(None, f"not all stopped at step {plan.last_step}") if done or now >= due else None
    if any(m.accounted_for for m in members.values()) or None in plan.steps.values():
        return PlannedEndDecision(None, "not all workers report their steps")
    steps = [step for agent_id in members if (step := plan.steps.get(agent_id)) is not None]
    if len(steps) == len(members):
        return PlannedEndDecision(max(steps), f"the last step is {max(steps)}")
    return PlannedEndDecision(None, "not all nodes answered") if now >= due else None

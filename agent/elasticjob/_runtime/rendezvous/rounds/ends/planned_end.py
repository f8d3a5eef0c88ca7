"""Planned ends: all workers of a round stop after the same step, so that no step is lost. Pure.

    PlanEnd to all ──► StepReport from all ──► EndRound(last step) to all ──► all workers stop after that step
          └── an agent that does not report in time or cannot, a failure, a deadline ──► EndRound to all, at once

An agent reports at once, whatever its workers do: it lets none of them pass its next step report, and sends the latest
step that any of them can complete until then. The last step is the maximum of these reports: no worker has passed it,
and every worker can still reach it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from elasticjob._runtime.contract.messages import MemberState, StepReport
from elasticjob._runtime.rendezvous.persistent_map import with_item
from elasticjob._runtime.rendezvous.state import Round

STEP_REPORT_TIMEOUT = 1.0
"""Seconds that all agents have to report. An agent holds its workers for longer: `worker_progress.HOLD_TIMEOUT`."""


@dataclass(frozen=True)
class PlannedEndDecision:
    """What to send to the members: the last step, or None to stop at once."""

    last_step: int | None
    reason: str
    failed: bool = False
    """Whether they stop because a member failed or was lost."""


def can_plan(round_: Round) -> bool:
    """Return whether the members can be asked for their steps: the workers of each run, or have succeeded."""
    plannable = (MemberState.RUNNING, MemberState.SUCCEEDED)
    return not round_.failures and all(m.state in plannable and not m.lost for m in round_.members.values())


def record_step(round_: Round, agent_id: str, report: StepReport) -> Round:
    """Return the round with a member's report. A report changes nothing once the last step is known."""
    ending = round_.ending
    if ending is None or ending.planned_stop is None or ending.planned_stop.last_step is not None:
        return round_
    steps = with_item(ending.planned_stop.steps, agent_id, report.step)
    return replace(round_, ending=replace(ending, planned_stop=replace(ending.planned_stop, steps=steps)))


def planned_end_deadline(round_: Round, graceful_shutdown: float) -> float | None:
    """Return when the present phase of a planned end times out; None without a planned end."""
    if round_.ending is None or round_.ending.planned_stop is None:
        return None
    timeout = STEP_REPORT_TIMEOUT if round_.ending.planned_stop.last_step is None else graceful_shutdown
    return round_.ending.since + timeout


def evaluate_planned_end(round_: Round, graceful_shutdown: float, now: float) -> PlannedEndDecision | None:
    """Return the next decision on a planned end; None while there is nothing to send."""
    deadline = planned_end_deadline(round_, graceful_shutdown)
    if round_.ending is None or round_.ending.planned_stop is None or deadline is None:
        return None
    plan, members = round_.ending.planned_stop, round_.members
    if round_.failures or any(m.lost or m.state is MemberState.FAILED for m in members.values()):
        return PlannedEndDecision(None, "a member failed before the last step", failed=True)
    if plan.last_step is not None:
        done = all(m.accounted_for or m.state is MemberState.SUCCEEDED for m in members.values())
        reason = f"not all members stopped at step {plan.last_step}"
        return PlannedEndDecision(None, reason) if done or now >= deadline else None
    if any(m.accounted_for for m in members.values()) or None in plan.steps.values():
        return PlannedEndDecision(None, "not all workers report their steps")
    steps = [step for agent_id in members if (step := plan.steps.get(agent_id)) is not None]
    if len(steps) == len(members):
        return PlannedEndDecision(max(steps), f"the last step is {max(steps)}")
    return PlannedEndDecision(None, "not all members reported their steps in time") if now >= deadline else None

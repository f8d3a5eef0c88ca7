"""When a running round ends because the job has other code now. Pure."""

from __future__ import annotations

from elasticjob._runtime.contract.messages import EndReason, MemberState
from elasticjob._runtime.rendezvous.decision import RoundDecision
from elasticjob._runtime.rendezvous.rounds.ends.round_end import begin_end
from elasticjob._runtime.rendezvous.state import CoordinatorState


def end_for_new_code(state: CoordinatorState, now: float) -> RoundDecision | None:
    """End a running round, by a plan, if the operator has sent the digest of other code; never once a member succeeded.

    The assignments of the next round name that digest. Each agent starts its workers only with that code, so no round
    has two versions, whichever pods join or come back meanwhile.
    """
    round_, code = state.round, state.settings.code
    if not state.operator_seen:  # the settings are of the time when the store's pod was created
        return None
    if round_ is None or round_.ending is not None or not round_.formed_at or state.closed_reason or not code:
        return None
    if any(m.state is MemberState.SUCCEEDED for m in round_.members.values()):
        return None
    if next(iter(round_.members.values())).assignment.code == code:
        return None
    return begin_end(state, round_, EndReason.CODE_UPDATED, f"new code {code[:12]}", now, on_plan=True)

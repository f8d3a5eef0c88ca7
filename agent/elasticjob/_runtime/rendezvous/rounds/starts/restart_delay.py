"""How long the next round waits after a failure (`failurePolicy.backoffSeconds`). Pure.

Every round that ends because of its workers delays the next one, also if a rule keeps it from counting: a program that
fails at its start would otherwise restart without a pause. A pod that fails together with its agent does so too, unless
the other agents are in the next round when the operator counts it. Lost members, drains and changes of the size delay
nothing.

The delay doubles with each restart that counts. Its end follows from the present settings, so that a user can shorten
it. It is not persisted: a successor store delays the next round only if it concludes the failed round itself.
"""

from __future__ import annotations

from dataclasses import replace

from elasticjob._runtime.rendezvous.decision import RoundDecision
from elasticjob._runtime.rendezvous.state import CoordinatorState, RestartDelay

_MAX_DOUBLINGS = 32
"""More than the fields of the spec allow to have an effect."""


def delay_next_round(state: CoordinatorState, failed_at: float, now: float) -> CoordinatorState:
    """Return the state in which the next round waits for a failure at this time, Unix seconds.

    The state counts the failure already, if it counts at all.
    """
    if not state.settings.backoff:
        return state
    return replace(state, restart_delay=RestartDelay(now, max(1, state.charged_at(failed_at))))


def delay_after_view(before: CoordinatorState, after: CoordinatorState, now: float) -> CoordinatorState:
    """Return the state after the operator's view, with a delay if the view counts a pod that has failed.

    If a round runs or ends, the pod must have failed in it: the other agents may be in the next one already.
    """
    if not (after.settings.backoff and before.operator_seen) or after.recovering_until is not None:
        return after
    time, round_ = after.epoch + now, after.round
    counts = after.charged_at(time) > before.charged_at(time)
    return delay_next_round(after, time, now) if counts and (round_ is None or after.is_counted(round_.id)) else after


def delay_seconds(state: CoordinatorState) -> float:
    """Return for how many seconds the next round waits in all; 0 without a delay."""
    if state.restart_delay is None:
        return 0.0
    settings, doublings = state.settings, min(state.restart_delay.restarts - 1, _MAX_DOUBLINGS)
    return min(settings.max_backoff, settings.backoff * 2.0**doublings)


def delay_deadline(state: CoordinatorState) -> float | None:
    """Return when the delay ends; None without one."""
    return None if state.restart_delay is None else state.restart_delay.since + delay_seconds(state)


def end_delay(state: CoordinatorState, now: float) -> RoundDecision | None:
    """Let the next round start once the delay is over."""
    deadline = delay_deadline(state)
    return None if deadline is None or now < deadline else RoundDecision(replace(state, restart_delay=None))

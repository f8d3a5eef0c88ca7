"""When a coordinator must ask the operator whether its store is the job's only one before it starts a round. Pure.

At most one round of a job may run, even while two store pods are alive (docs/contribute/store-loss.md, "When a store is
replaced"). To a store that is cut off, or that was replaced while it was alive, agents look lost although they train on
with its successor. So the coordinator needs the operator's confirmation to start a round while half or more of the last
round's members are missing. It asks at that moment, not in advance, and names the pods that may go on with the last
round (docs/contribute/design.md, "Which workers may write"). The confirmation expires CONFIRMATION_SECONDS after the
request, so that a delayed answer does not count. A successor that finds nothing of earlier rounds needs it too; a first
store to which no operator has ever connected needs none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from elasticjob._runtime.contract.messages import MemberState, OperatorView
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.rendezvous.decision import count_missing
from elasticjob._runtime.rendezvous.state import CoordinatorState, LastRound, Round

CONFIRMATION_SECONDS = 10.0
"""How long a confirmation holds, in seconds after the request. The operator treats a store that may hold one as ended
only after at least this long (`plan.store_pods.store_confirmation`)."""


def least_complete_round(state: CoordinatorState) -> LastRound:
    """Return the round that decides about the confirmation, of those that another store may know as the last one.

    That is one with half or more of its members missing, if there is any, else the one with the most missing members.
    """
    return max((state.last_round, *state.attempted_rounds), key=lambda r: (r.lacks_majority, r.missing))


def describe_missing(state: CoordinatorState) -> str:
    """Return what makes a confirmation necessary, for the log and the report."""
    last = least_complete_round(state)
    if _last_round_outdated(state):
        return f"no agent knows round {state.known_round}"
    return "earlier rounds are unknown" if last.id is None else count_missing(last.missing, last.size)


def needs_confirmation(state: CoordinatorState, now: float) -> bool:
    """Return whether no round may start until the operator has confirmed that this is the only store."""
    if not (state.operator_seen or state.successor) or not _lacks_majority(state):
        return False
    if state.confirmed_until is None or now >= state.confirmed_until:
        return True
    # By now more members may be missing, and a standby store may have taken over with them.
    return state.confirmed_half and not _exactly_half_missing(state)


def request_confirmation(state: CoordinatorState, now: float) -> CoordinatorState | None:
    """Return the state with a new request; None while the last one is recent enough to be answered."""
    if state.confirmation_requested_at is not None and now < state.confirmation_requested_at + CONFIRMATION_SECONDS:
        return None
    return replace(state, confirmation_requested_at=now)


def open_request(state: CoordinatorState) -> float:
    """Return the open request as reports carry it: Unix seconds, 0 for none."""
    return 0.0 if state.confirmation_requested_at is None else round(state.epoch + state.confirmation_requested_at, 6)


def exactly_half_missing_round(state: CoordinatorState) -> RoundId | None:
    """Return the last round if a request is open and exactly half of that round's members are missing; else None.

    In that case the missing members cannot form a round without a confirmation either.
    """
    requested = state.confirmation_requested_at is not None
    return state.last_round.id if requested and _exactly_half_missing(state) else None


def _exactly_half_missing(state: CoordinatorState) -> bool:
    """Return whether neither side has a majority: half of the last round is here, and the other half is missing."""
    exactly = not state.attempted_rounds and 2 * state.last_round.missing == state.last_round.size
    return exactly and not _last_round_outdated(state)


def _lacks_majority(state: CoordinatorState) -> bool:
    """Return whether another store may go on with a majority of an earlier round, or with exactly half of it."""
    return least_complete_round(state).lacks_majority or _last_round_outdated(state)


def _last_round_outdated(state: CoordinatorState) -> bool:
    """Return whether a round ran after the last one, and no connected agent knows it."""
    return state.last_round.id is not None and state.is_outdated(state.last_round.id)


def pods_that_may_write(state: CoordinatorState) -> tuple[str, ...] | None:
    """Return the pods that may go on with an earlier round while a request is open; None if not all are known.

    More than half of a round's members may write without the coordinator. Half of them freeze their workers, except for
    agents that hang. If no connected agent knows the latest round, its pods are unknown.
    """
    pods: dict[str, None] = {}
    if state.confirmation_requested_at is None:
        return ()
    if _last_round_outdated(state):
        return None
    for r in (state.last_round, *state.attempted_rounds):
        majority = 2 * r.missing > r.size
        if majority and len(r.pods) < r.size:
            return None
        missing = (a for a in r.pods if a not in r.stopped)
        pods |= {r.pods[a]: None for a in missing if majority or a in r.unresponsive}
    return tuple(pods)


def receive_confirmation(state: CoordinatorState, view: OperatorView) -> CoordinatorState:
    """Return the state with the confirmation, if the operator's view answers the open request."""
    if state.confirmation_requested_at is None or view.confirmed_request != open_request(state):
        return state
    confirmed_until = state.confirmation_requested_at + CONFIRMATION_SECONDS
    return replace(state, confirmed_until=confirmed_until, confirmed_half=view.confirmed_half)


def record_ended_round(state: CoordinatorState, round_: Round) -> CoordinatorState:
    """Record a round that has ended.

    If all its workers had started, or no earlier round is known, it replaces the last round. Otherwise an agent that
    did not receive its assignment may report the previous round to another store. Both rounds are kept then, and enough
    members of each must be present.
    """
    connected = {agent_id for agent_id, agent in state.agents.items() if agent.disconnected_at is None}
    # A member may have been lost, and its agent may have connected again without workers.
    idle = {agent_id for agent_id in connected if state.agents[agent_id].stale_round is None}
    stopped = frozenset(a for a, m in round_.members.items() if m.state is MemberState.STOPPED or a in idle)
    pods = {agent_id: m.pod for agent_id, m in round_.members.items()}
    unresponsive = frozenset(a for a, m in round_.members.items() if m.unresponsive)
    ended = LastRound(
        id=round_.id,
        size=round_.size,
        stopped=stopped & connected,
        stopped_disconnected=stopped - connected,
        pods=pods,
        unresponsive=unresponsive,
    )
    if round_.formed_at or state.last_round.id is None:
        return replace(state, last_round=ended, attempted_rounds=())
    lost = frozenset(agent_id for agent_id, m in round_.members.items() if m.lost) - idle
    last, *attempted = (
        replace(r, stopped=r.stopped - lost, stopped_disconnected=r.stopped_disconnected | r.stopped & lost)
        for r in (state.last_round, *state.attempted_rounds)
    )
    return replace(state, last_round=last, attempted_rounds=(*attempted, ended))


def record_stopped_agent(state: CoordinatorState, agent_id: str, round_id: RoundId | None) -> CoordinatorState:
    """Record that a connected agent runs no workers of an earlier round.

    `round_id`: the last one that it was in. An agent that was in none (None) says nothing about an unknown round.
    """
    return _update_rounds(
        state,
        lambda r: (
            (round_id is not None and r.id == round_id) or agent_id in r.pods or agent_id in r.stopped_disconnected
        ),
        agent_id,
        connected=True,
    )


def record_disconnected_agent(state: CoordinatorState, agent_id: str) -> CoordinatorState:
    """Record that an agent disconnected: another store may start workers there, so it counts as missing again.

    An agent that was released with `Finish` is removed from the state first, and still counts as stopped.
    """
    return _update_rounds(state, lambda r: agent_id in r.stopped, agent_id, connected=False)


def _update_rounds(
    state: CoordinatorState, applies: Callable[[LastRound], bool], agent_id: str, *, connected: bool
) -> CoordinatorState:
    rounds = (state.last_round, *state.attempted_rounds)
    updated = [_with_stopped_agent(r, agent_id, connected=connected) if applies(r) else r for r in rounds]
    if all(new is old for new, old in zip(updated, rounds, strict=True)):
        return state
    last, *attempted = updated
    return replace(state, last_round=last, attempted_rounds=tuple(attempted))


def _with_stopped_agent(r: LastRound, agent_id: str, *, connected: bool) -> LastRound:
    if (agent_id in r.stopped, agent_id in r.stopped_disconnected) == (connected, not connected):
        return r  # the usual case: to copy the sets takes long in a large round
    agent = frozenset((agent_id,))
    return replace(
        r,
        stopped=r.stopped | agent if connected else r.stopped - agent,
        stopped_disconnected=r.stopped_disconnected - agent if connected else r.stopped_disconnected | agent,
    )

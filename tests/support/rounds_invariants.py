"""What must hold of every world, by name; and whether a world gets to its end once nothing befalls it any more."""

from __future__ import annotations

from collections.abc import Callable

from elasticjob.contract.messages import MemberState, Outcome
from elasticjob.contract.names import RoundId
from elasticjob.rendezvous.state import candidates
from support.rounds_world import BUDGET, MIN, Move, World, calm, faults, step

Invariant = Callable[[World, Move, World], bool]


def never_two_running_worlds(_: World, __: Move, after: World) -> bool:
    """Of one round at most all ranks run at the same time: one that lacks a rank cannot take a step."""
    at_work: dict[RoundId, int] = {}
    sizes: dict[RoundId, int] = {}
    for a in after.agents:
        if a.ended is None and a.state is MemberState.RUNNING and a.start and not (a.frozen or a.stopping):
            at_work[a.start.round] = at_work.get(a.start.round, 0) + 1
            sizes[a.start.round] = a.start.group_world_size
    return sum(at_work[r] == sizes[r] for r in at_work) <= 1


def no_rank_twice(_: World, __: Move, after: World) -> bool:
    """No node is in a round twice, no two nodes have the same rank of a round."""
    ranks = [(a.start.round, a.start.rank) for a in after.agents if a.start and a.busy]
    members = [[m.pod for m in s.state.round.members.values()] for s in after.stores if s.state.round]
    return len(set(ranks)) == len(ranks) and all(len(set(pods)) == len(pods) for pods in members)


def old_words_have_no_effect(before: World, move: Move, after: World) -> bool:
    if move[0] != "late":
        return True
    return [(s.state.round, s.state.outcome, s.state.ended_rounds) for s in before.stores] == [
        (s.state.round, s.state.outcome, s.state.ended_rounds) for s in after.stores
    ]


def between_min_and_max(_: World, __: Move, after: World) -> bool:
    formed = [
        s.state.round for s in after.stores if s.state.round and s.state.round.id.store_incarnation == s.incarnation
    ]
    return all(MIN <= len(r.members) <= after.size - after.spares for r in formed)


def spares_take_the_places_of_the_lost(before: World, _: Move, after: World) -> bool:
    """No round forms with fewer nodes than it should have while somebody who is ready for it stands by."""
    known = {s.state.round.id for s in before.stores if s.state.round}
    for state in (s.state for s in after.stores if s.state.round and s.state.round.id not in known):
        assert state.round is not None
        free = [n for n in candidates(state) if n.ready and n.agent_id not in state.round.members]
        if (
            len(state.round.members) < state.settings.target
            and free
            and state.round.id.store_incarnation == state.store_incarnation
        ):
            return False
    return True


def closed_stays_closed(before: World, _: Move, after: World) -> bool:
    closed = {s.incarnation for s in before.stores if s.state.newer_store is not None}
    return all(
        s.state.newer_store is not None and all(a.store != s.incarnation for a in after.agents)
        for s in after.stores
        if s.incarnation in closed
    )


def an_outcome_is_never_undone(before: World, _: Move, after: World) -> bool:
    kept = before.declared is None or after.declared is before.declared
    stores = {s.incarnation: s.state.outcome for s in after.stores}
    held = all(s.state.outcome is None or stores.get(s.incarnation, s.state.outcome) is s.state.outcome
               for s in before.stores)  # fmt: skip
    return kept and held


def success_that_a_node_was_told_holds(before: World, _: Move, after: World) -> bool:
    """Its termination message is there for everybody to read: nobody runs again, and no store calls it a failure."""
    if all(a.ended is not Outcome.SUCCEEDED for a in before.agents):
        return True
    started = {a.agent_id: a.start for a in before.agents}
    failed = any(s.state.outcome is Outcome.FAILED for s in after.stores)
    return not failed and all(a.start == started.get(a.agent_id) for a in after.agents)


def a_charge_is_counted_once(before: World, _: Move, after: World) -> bool:
    return len(set(after.counted)) == len(after.counted) == after.charged and before.charged <= after.charged <= BUDGET


INVARIANTS: tuple[Invariant, ...] = (
    never_two_running_worlds,
    no_rank_twice,
    old_words_have_no_effect,
    between_min_and_max,
    spares_take_the_places_of_the_lost,
    closed_stays_closed,
    an_outcome_is_never_undone,
    success_that_a_node_was_told_holds,
    a_charge_is_counted_once,
)


def broken(before: World, move: Move, after: World) -> str:
    """Names of the invariants that a move broke."""
    return ", ".join(i.__name__ for i in INVARIANTS if not i(before, move, after))


def left_out_for_ever(world: World, limit: int = 500) -> str:
    """Nobody alive and willing is left out for ever: without faults the job ends, with everybody. Empty if so."""
    for turn in range(limit):
        moves = [m for m in calm(world) if m[0] != "tick"] or list(faults(world, ("succeed",))) or list(calm(world))
        if not moves:
            break
        move = moves[turn % len(moves)]
        after = step(world, move)
        if broken(world, move, after):
            return f"{move}: {broken(world, move, after)}"
        world = after
    waiting = [a.pod for a in world.agents if a.ended is None]
    if world.declared is None or waiting:
        return f"after {limit} fair moves: {world.declared}, {waiting} wait"
    return ""

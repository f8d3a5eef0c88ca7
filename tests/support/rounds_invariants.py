"""Invariants of the worlds of `rounds_world`, by name, and a check that a job ends once faults have stopped."""

from __future__ import annotations

from collections.abc import Callable

from elasticjob.contract.messages import MemberState, Outcome
from elasticjob.contract.names import RoundId
from elasticjob.rendezvous.state import Round, candidates
from support.rounds_world import BUDGET, MIN, Move, Store, World, calm, faults, step

Invariant = Callable[[World, Move, World], bool]


def never_two_running_worlds(_: World, __: Move, after: World) -> bool:
    """All ranks run in one round at most. A round in which a rank does not run cannot take a step."""
    running_nodes: dict[RoundId, int] = {}
    sizes: dict[RoundId, int] = {}
    for a in after.agents:
        if a.ended is None and a.state is MemberState.RUNNING and a.start and not (a.frozen or a.stopping):
            running_nodes[a.start.round] = running_nodes.get(a.start.round, 0) + 1
            sizes[a.start.round] = a.start.group_world_size
    return sum(running_nodes[r] == sizes[r] for r in running_nodes) <= 1


def no_rank_twice(_: World, __: Move, after: World) -> bool:
    """No node is in a round twice, and no two nodes have the same rank of a round."""
    ranks = [(a.start.round, a.start.rank) for a in after.agents if a.start and a.busy]
    members = [[m.pod for m in s.state.round.members.values()] for s in after.stores if s.state.round]
    return len(set(ranks)) == len(ranks) and all(len(set(pods)) == len(pods) for pods in members)


def old_messages_have_no_effect(before: World, move: Move, after: World) -> bool:
    if move[0] != "late":
        return True
    return [(s.state.round, s.state.outcome, s.state.ended_rounds) for s in before.stores] == [
        (s.state.round, s.state.outcome, s.state.ended_rounds) for s in after.stores
    ]


def _formed_round(store: Store) -> Round | None:
    """Return the store's round, unless it has found it: then some of its members may be missing."""
    round_ = store.state.round
    if round_ is None or round_.id.store_incarnation != store.incarnation or len(round_.members) < round_.size:
        return None
    return round_


def between_min_and_max(_: World, __: Move, after: World) -> bool:
    formed = [round_ for s in after.stores if (round_ := _formed_round(s))]
    return all(MIN <= len(r.members) <= after.size - after.spares for r in formed)


def spares_replace_lost_nodes(before: World, _: Move, after: World) -> bool:
    """No round starts with fewer nodes than the target while a ready node is left out."""
    earlier = {s.state.round.id for s in before.stores if s.state.round}
    earlier |= {a.start.round for a in before.agents if a.start}  # a store that restarted in place restores its own
    for state, round_ in ((s.state, _formed_round(s)) for s in after.stores):
        if round_ is None or round_.id in earlier:
            continue
        free = [n for n in candidates(state) if n.ready and n.agent_id not in round_.members]
        if len(round_.members) < state.settings.target and free:
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


def success_that_a_node_received_is_final(before: World, _: Move, after: World) -> bool:
    """After a node received the success, no node starts a round and no store declares a failure.

    The operator finds the success in the termination message of that node.
    """
    if all(a.ended is not Outcome.SUCCEEDED for a in before.agents):
        return True
    started = {a.agent_id: a.start for a in before.agents}
    failed = any(s.state.outcome is Outcome.FAILED for s in after.stores)
    return not failed and all(a.start == started.get(a.agent_id) for a in after.agents)


def a_charge_is_counted_once(before: World, _: Move, after: World) -> bool:
    return len(set(after.counted)) == len(after.counted) == after.charged and before.charged <= after.charged <= BUDGET


def a_standby_store_takes_over_with_a_majority(before: World, _: Move, after: World) -> bool:
    """A passive store becomes active only if status names it or most of the newest round is connected to it."""
    passive = {s.incarnation for s in before.stores if s.state.passive}
    for store in after.stores:
        if store.incarnation not in passive or store.state.passive or store.incarnation <= after.named:
            continue
        connected = [a for a in after.agents if a.store == store.incarnation and a.start]
        newest = max((a.start.round for a in connected if a.start), default=None)
        members = [a.start for a in connected if a.start and a.start.round == newest]
        if not members or 2 * len(members) <= members[0].group_world_size:
            return False
    return True


def only_a_store_that_was_active_closes_another(before: World, _: Move, after: World) -> bool:
    """No store is closed for a standby store that has always been passive."""
    open_before = {s.incarnation for s in before.stores if s.state.newer_store is None}
    always_passive = {s.incarnation for s in after.stores if s.state.passive and not s.state.restarted}
    return not any(s.state.newer_store in always_passive for s in after.stores if s.incarnation in open_before)


INVARIANTS: tuple[Invariant, ...] = (
    never_two_running_worlds,
    no_rank_twice,
    old_messages_have_no_effect,
    between_min_and_max,
    spares_replace_lost_nodes,
    closed_stays_closed,
    an_outcome_is_never_undone,
    success_that_a_node_received_is_final,
    a_charge_is_counted_once,
    a_standby_store_takes_over_with_a_majority,
    only_a_store_that_was_active_closes_another,
)


def broken_invariants(before: World, move: Move, after: World) -> str:
    """Return the names of the invariants that a move broke; empty if none."""
    return ", ".join(i.__name__ for i in INVARIANTS if not i(before, move, after))


def liveness_violation(world: World, limit: int = 500) -> str:
    """Return why the job, or one of its nodes, does not end when no more faults occur; empty if all end."""
    for number in range(limit):
        moves = [m for m in calm(world) if m[0] != "tick"] or list(faults(world, ("succeed",))) or list(calm(world))
        if not moves:
            break
        move = moves[number % len(moves)]
        after = step(world, move)
        if broken_invariants(world, move, after):
            return f"{move}: {broken_invariants(world, move, after)}"
        world = after
    waiting = [a.pod for a in world.agents if a.ended is None]
    if world.declared is None or waiting:
        return f"after {limit} moves without a fault: outcome {world.declared}, not ended: {waiting}"
    return ""

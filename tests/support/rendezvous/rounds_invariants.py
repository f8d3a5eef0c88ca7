"""Invariants of the worlds of `rounds_world`, by name, and a check that a job ends once faults have stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count, islice, pairwise

from elasticjob._runtime.agent.state_machine.state import AgentPhase
from elasticjob._runtime.contract.failures.failure_rules import UNCOUNTED_ACTIONS, FailureAction
from elasticjob._runtime.contract.messages import (
    Announce,
    EndReason,
    EndRound,
    FailureClass,
    Finish,
    MemberState,
    Outcome,
    PlanEnd,
    RoundEnded,
    StartRound,
)
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.rendezvous.decision import RoundDecision
from elasticjob._runtime.rendezvous.rounds import rounds
from elasticjob._runtime.rendezvous.rounds.starts.confirmation import CONFIRMATION_SECONDS, least_complete_round
from elasticjob._runtime.rendezvous.state import (
    CoordinatorEvent,
    CoordinatorState,
    Round,
    candidates,
    is_restartable,
    topology_of,
)
from elasticjob_operator.model.job.status import ConditionType
from support.rendezvous import rounds_partition
from support.rendezvous.rounds_agent import Agent
from support.rendezvous.rounds_operator import MIN
from support.rendezvous.rounds_world import (
    Move,
    Store,
    World,
    calm,
    ended_rounds_since,
    faults,
    kind_of_failure,
    status_outcome,
    step,
)

Invariant = Callable[[World, Move, World], bool]
MAX_STOP = 1.0
"""Seconds. Where a store has only seen rounds that needed longer to stop, it may expect as much of a join."""


# ---- worlds and ranks


def never_two_running_worlds(_: World, __: Move, after: World) -> bool:
    """All ranks run in one round at most. A round in which a rank does not run cannot take a step."""
    running_nodes: dict[RoundId, int] = {}
    sizes: dict[RoundId, int] = {}
    for a in after.agents:
        if a.ended is None and a.state is MemberState.RUNNING and a.start and not (a.frozen or a.stopping):
            running_nodes[a.start.round] = running_nodes.get(a.start.round, 0) + 1
            sizes[a.start.round] = a.start.group_world_size
    return sum(running_nodes[r] == sizes[r] for r in running_nodes) <= 1


def never_two_writers(_: World, __: Move, after: World) -> bool:
    """Of one round at most, group rank 0 may write: it is connected to a store in which the round runs, or is cut off
    from all stores and goes on. The time for which answers count is over."""
    current = {s.state.round.id for s in after.stores if s.state.round and s.state.round.ending is None}
    return len(rounds_partition.writers(after.agents, frozenset(current))) <= 1


def a_node_that_has_its_answer_is_not_frozen(_: World, __: Move, after: World) -> bool:
    """A store that is active continues the frozen workers of a node that has greeted it, or ends them."""
    idle = {s.incarnation for s in after.stores if not s.queue}
    active = {s.incarnation for s in after.serving if s.state.recovering_until is None} & idle
    connected = (a for a in after.agents if a.ended is None and a.store in active and not (a.passive or a.deaf))
    return not any(a.machine.frozen and not (a.killing or a.outbox or a.inbox) for a in connected)


def no_rank_twice(_: World, __: Move, after: World) -> bool:
    """No node is in a round twice, and no two nodes have the same rank of a round."""
    ranks = [(a.start.round, a.start.rank) for a in after.agents if a.start and a.busy]
    members = [[m.pod for m in s.state.round.members.values()] for s in after.stores if s.state.round]
    return len(set(ranks)) == len(ranks) and all(len(set(pods)) == len(pods) for pods in members)


def nodes_that_stay_keep_their_order(before: World, _: Move, after: World) -> bool:
    """The nodes of a store's last round that are in its next one have the same order of ranks there."""
    last = dict(before.history.ranks)
    for incarnation, members in after.history.ranks:
        stayed = [a for a in last.get(incarnation, ()) if a in members]
        if stayed != [a for a in members if a in stayed]:
            return False
    return True


def joining_nodes_of_one_block_have_neighbouring_ranks(before: World, _: Move, after: World) -> bool:
    """Between the nodes of one block that were in no round, a new round has no such node of another block."""
    for s, started in _new_rounds(before, after):
        known = before.store(s.incarnation)
        if known is None or _may_have_come_later(before, s):
            continue
        nodes = [s.state.agents[a] for a in started.members if a not in known.state.last_members]
        expected = [(s.state.pods.get(n.index), n) for n in nodes if n.membership is None]
        blocks = [p.topology for p, n in expected if p and p.incarnation == n.incarnation and p.topology]
        if sum(block != following for block, following in pairwise(blocks)) >= max(1, len(set(blocks))):
            return False
    return True


def joining_nodes_are_beside_their_block(before: World, _: Move, after: World) -> bool:
    """A node that joins a round follows a node of its block, if one of that block stays; one that stays has rank 0."""
    for s, started in _new_rounds(before, after):
        known = before.store(s.incarnation)
        nodes = [s.state.agents.get(agent_id) for agent_id in started.members]
        if known is None or _may_have_come_later(before, s) or None in nodes:
            continue
        members = [n for n in nodes if n is not None]
        stays = {n.agent_id for n in members if n.agent_id in known.state.last_members}
        if any(n.membership is not None and n.agent_id not in stays for n in members):
            continue  # a round of another store may have been the last one
        blocks = [topology_of(s.state, n) for n in members]
        old = {block for n, block in zip(members, blocks, strict=True) if n.agent_id in stays}
        for at, n in enumerate(members):
            joins = bool(stays) and n.agent_id not in stays
            if joins and (at == 0 or (blocks[at] and blocks[at] in old and blocks[at - 1] != blocks[at])):
                return False
    return True


def old_messages_have_no_effect(before: World, move: Move, after: World) -> bool:
    if move[0] != "late":
        return True
    return [(s.state.round, s.state.outcome, s.state.ended_rounds) for s in before.stores] == [
        (s.state.round, s.state.outcome, s.state.ended_rounds) for s in after.stores
    ]


def an_older_view_is_not_applied(before: World, _: Move, after: World) -> bool:
    """The view that a store goes by never becomes an older one."""
    known = {(s.incarnation, s.starts): s.state.operator_view for s in before.stores}
    for s in after.stores:
        old, new = known.get((s.incarnation, s.starts)), s.state.operator_view
        if old is not None and (new.lease, new.sequence) < (old.lease, old.sequence):
            return False
    return True


def no_node_gets_a_round_while_its_workers_run(before: World, move: Move, _: World) -> bool:
    """A store assigns a new round to a node only once the node has stopped the workers of its last one."""
    if move[0] != "down":
        return True
    a = before.agent(move[1])
    message = a.inbox[0]
    return not (isinstance(message, StartRound) and a.start and a.busy and message.round > a.start.round)


# ---- which nodes are in a round


def _new_rounds(before: World, after: World) -> Iterator[tuple[Store, Round]]:
    """Yield the rounds that stores have started by this move; not those that they restored."""
    earlier = {s.state.round.id for s in before.stores if s.state.round}
    for s in after.stores:
        found = s.state.round
        restored = found is not None and any(a.start and a.start.round == found.id for a in before.agents)
        if (
            found is not None
            and found.id not in earlier
            and found.id.store_incarnation == s.incarnation
            and not restored
        ):
            yield s, found


def _may_have_come_later(before: World, s: Store) -> bool:
    """Return whether more happened in the move in which a round started: nodes may have come or left since.

    A store decides on a batch in one move, and an agent whose time to leave is over sends all that it has left to say.
    """
    known = before.store(s.incarnation)
    if known is None:
        return False
    lost = {agent_id for agent_id, agent in s.state.agents.items() if agent.disconnected_at is not None}
    last_words = any(a.agent_id in lost and a.store == s.incarnation and len(a.outbox) > 1 for a in before.agents)
    return len(known.queue) > 1 or last_words


def between_min_and_max(_: World, __: Move, after: World) -> bool:
    formed = [
        s.state.round for s in after.stores if s.state.round and s.state.round.id.store_incarnation == s.incarnation
    ]
    return all(MIN <= r.size <= after.size - after.spares for r in formed)


def every_size_is_on_the_step(before: World, _: Move, after: World) -> bool:
    """A round has `minReplicas` nodes plus a multiple of `replicaIncrementStep`."""
    return not any((len(r.members) - MIN) % after.options.increment for _, r in _new_rounds(before, after))


def no_round_ends_for_too_few_joining_nodes(before: World, _: Move, after: World) -> bool:
    """A running round ends for joining nodes only if they are enough for the next size."""
    for s in after.stores:
        known, round_ = before.store(s.incarnation), s.state.round
        running = known.state.round if known is not None else None
        if running is None or round_ is None or running.id != round_.id or _may_have_come_later(before, s):
            continue
        if running.ending is None and round_.ending is not None and round_.ending.reason is EndReason.SCALING_UP:
            joining = [n for n in candidates(s.state) if n.ready and n.agent_id not in round_.members]
            if len(joining) < after.options.increment:
                return False
    return True


def survivors_do_not_wait_for_a_long_start(before: World, _: Move, after: World) -> bool:
    """No round starts with a node that has to start processes while the others are enough, and it is known to a store
    that this takes long. Nodes of the last round are among the others."""
    for s, started in _new_rounds(before, after):
        known, stop = before.store(s.incarnation), s.state.shortest_stop
        if known is None or _may_have_come_later(before, s) or stop is None or stop > MAX_STOP:
            continue
        nodes = s.state.agents
        if not is_restartable(s.state) or not any(n.new_processes.start_seconds for n in nodes.values()):
            continue
        waits = any(nodes[agent_id].new_processes.count for agent_id in started.members)
        others = [n for n in candidates(s.state) if n.ready and not n.new_processes.count]
        if waits and len(others) >= MIN and any(n.agent_id in known.state.last_members for n in others):
            return False
    return True


def no_round_ends_for_a_node_that_has_to_start_processes(before: World, _: Move, after: World) -> bool:
    """A round ends for nodes that were in one before once their processes wait at the function.

    A node that had none may be ready before the store lets it start its script.
    """
    for s in after.stores:
        known, round_ = before.store(s.incarnation), s.state.round
        running = known.state.round if known is not None else None
        if running is None or round_ is None or running.id != round_.id or _may_have_come_later(before, s):
            continue
        ends = running.ending is None and round_.ending is not None
        if not ends or round_.ending is None or round_.ending.reason is not EndReason.SCALING_UP:
            continue
        joining = [n.agent_id for n in candidates(s.state) if n.ready and n.agent_id not in round_.members]
        start = [a.machine for a in after.agents if a.agent_id in joining and a.start is not None]
        if is_restartable(s.state) and any(m.prestarting or m.new_processes.count for m in start):
            return False
    return True


def a_node_outside_starts_its_processes(_: World, __: Move, after: World) -> bool:
    """A node that has read all messages of a store, whose running round is without it, has begun to start its
    processes."""
    for s in after.stores:
        round_ = s.state.round
        if round_ is None or s.queue or s.state.newer_store is not None or not is_restartable(s.state):
            continue
        for a in after.agents:
            here = a.store == s.incarnation and not (a.deaf or a.passive or a.inbox or a.outbox or a.paused)
            waits = a.machine.phase is AgentPhase.IDLE and not a.leaving and a.ended is None
            known = a.agent_id in s.state.agents and a.agent_id not in round_.members
            if here and waits and known and a.machine.new_processes.count:
                return False
    return True


def no_node_keeps_a_broken_result(_: World, __: Move, after: World) -> bool:
    """A node that counted steps after another one had broken its collectives does not go on with its state."""
    return not any(a.late and a.start is not None and a.broke == a.start.round for a in after.agents)


def spares_replace_lost_nodes(before: World, _: Move, after: World) -> bool:
    """No round starts with fewer nodes than the target while enough ready nodes for the next size are left out."""
    step_size = after.options.increment
    for s, started in _new_rounds(before, after):
        if _may_have_come_later(before, s):
            continue
        free = [n for n in candidates(s.state) if n.ready and n.agent_id not in started.members]
        if len(started.members) + step_size <= s.state.settings.target and len(free) >= step_size:
            return False
    return True


def no_round_exceeds_the_target(before: World, _: Move, after: World) -> bool:
    return all(
        len(started.members) <= s.state.settings.target or _may_have_come_later(before, s)
        for s, started in _new_rounds(before, after)
    )


def scaling_down_drops_surplus_pods(before: World, _: Move, after: World) -> bool:
    """A node beyond the desired number of pods is in a new round only if no other one is left out; the operator
    deletes only pods of indices that the job does not have, and those that have a successor."""
    for s, started in _new_rounds(before, after):
        wanted = s.state.settings.desired_pods
        if _may_have_come_later(before, s):
            continue
        surplus = [agent_id for agent_id in started.members if s.state.agents[agent_id].index >= wanted]
        left_out = [n for n in candidates(s.state) if n.index < wanted and n.agent_id not in started.members]
        if surplus and any(n.ready for n in left_out):
            return False
    deleting = {a.number for a in before.agents if a.deleting}
    newest = {a.index: a.incarnation for a in sorted(after.agents, key=lambda a: a.incarnation)}
    ended = status_outcome(after) is not None
    free = (index for index in count() if index not in after.operator.parsed.vacant)
    indices = {*islice(free, after.wanted + after.spares)}
    return ended or not any(
        a.deleting and a.number not in deleting and a.leaving is False and a.index in indices
        and newest[a.index] == a.incarnation
        for a in after.agents
    )  # fmt: skip


def no_recreated_pod_joins_again(before: World, _: Move, after: World) -> bool:
    """With restartStrategy Recreate, no store starts a round with a pod of a round that it has seen fail."""
    return not any(
        (s.incarnation, s.starts, agent_id) in after.history.recreated
        for s, started in _new_rounds(before, after)
        for agent_id in started.members
    )


def no_leaving_node_joins(before: World, _: Move, after: World) -> bool:
    """No round starts with a node that has reported that it leaves."""
    return not any(
        s.state.agents[agent_id].leaving_reason
        for s, started in _new_rounds(before, after)
        if not _may_have_come_later(before, s)
        for agent_id in started.members
    )


def a_member_that_leaves_has_its_time(before: World, _: Move, after: World) -> bool:
    """While a round ends on plan, none of its members gets `Finish` before it has stopped, unless the job has ended.

    Events that are decided together may include its loss, so they are not checked.
    """
    if before.batched:
        return True
    known = {a.agent_id: a.inbox for a in before.agents}
    for a in after.agents:
        old, new = before.store(a.store or 0), after.store(a.store or 0)
        if not a.busy or old is None or new is None or old.state.round is None or new.state.outcome is not None:
            continue
        member, ending = old.state.round.members.get(a.agent_id), old.state.round.ending
        if member is None or member.accounted_for or ending is None or not ending.planned:
            continue
        if after.now >= ending.kill_at:
            continue  # it has had its time
        if any(isinstance(m, Finish) for m in a.inbox[len(known.get(a.agent_id, ())) :]):
            return False
    return True


def a_connected_node_knows_when_its_machine_ends(_: World, __: Move, after: World) -> bool:
    """A node that has read all messages of a store knows the end of its machine if the store knows it.

    Not one that has been sent `Finish`: that is its last message.
    """
    for a in after.agents:
        store = after.store(a.store) if a.store is not None else None
        waits = a.inbox or a.deaf or a.passive or any(isinstance(m, Announce) for m in a.outbox)
        over = a.ended is not None or (a.machine.stopping is not None and isinstance(a.machine.stopping.then, Finish))
        if store is None or waits or over or store.queue or store.state.newer_store is not None:
            continue
        if a.pod in store.state.node_ends and a.machine_end is None:
            return False
    return True


def a_confirmation_that_has_run_out_is_not_used(before: World, _: Move, after: World) -> bool:
    """A round that misses half of the last one or more starts only while the operator's confirmation holds."""
    confirmed = dict(after.history.confirmed)
    for s, _started in _new_rounds(before, after):
        needs = (s.state.operator_seen or s.state.successor) and least_complete_round(s.state).lacks_majority
        if (
            needs
            and not _may_have_come_later(before, s)
            and after.now >= confirmed.get(s.incarnation, 0.0) + CONFIRMATION_SECONDS
        ):
            return False
    return True


def a_connected_member_is_sent_the_end_of_its_round(_: World, __: Move, after: World) -> bool:
    """While a round ends, each connected member that still runs it has received the message, or has it in its inbox."""
    for s in after.stores:
        round_ = s.state.round
        if round_ is None or round_.ending is None or s.state.newer_store is not None or s.queue:
            continue
        for a in after.agents:
            member = round_.members.get(a.agent_id)
            if member is None or member.accounted_for or not _runs(a, s, round_.id):
                continue
            stops = a.stopping or a.holding or a.stops_at is not None or a.machine.planned_end is not None
            if not stops and not any(isinstance(m, (PlanEnd, EndRound, Finish)) for m in a.inbox):
                return False
    return True


def _runs(a: Agent, s: Store, round_id: RoundId) -> bool:
    """Return whether an agent runs workers of this round, and its announcement over the present link has arrived."""
    here = a.store == s.incarnation and not a.deaf and a.ended is None and a.start is not None
    announced = not any(isinstance(m, Announce) for m in a.outbox)
    phases = (AgentPhase.STARTING, AgentPhase.RUNNING)
    return here and announced and a.start is not None and a.start.round == round_id and a.machine.phase in phases


# ---- the standby store


def a_standby_store_takes_over_with_a_majority(before: World, _: Move, after: World) -> bool:
    """A passive store becomes active only if status names it, or if more than half of the newest round that it knows is
    connected to it. That round is not older than the newest one that the operator has sent it."""
    passive = {s.incarnation for s in before.stores if s.state.passive}
    for s in after.stores:
        if s.incarnation not in passive or s.state.passive or s.state.operator_view.serving == s.incarnation:
            continue
        connected = [a for a in after.agents if a.store == s.incarnation and a.start]
        newest = max((a.start.round for a in connected if a.start), default=None)
        members = [a.start for a in connected if a.start and a.start.round == newest]
        outdated = newest is not None and s.state.known_round is not None and newest < s.state.known_round
        if not members or outdated or 2 * len(members) <= members[0].group_world_size:
            return False
    return True


def only_a_store_that_was_active_closes_another(before: World, _: Move, after: World) -> bool:
    """No store is closed for a standby store that has always been passive."""
    open_before = {s.incarnation for s in before.stores if s.state.newer_store is None}
    always_passive = {s.incarnation for s in after.stores if s.state.passive and not s.state.restarted}
    return not any(s.state.newer_store in always_passive for s in after.stores if s.incarnation in open_before)


def a_retired_store_stays_passive(before: World, _: Move, after: World) -> bool:
    retired = {(s.incarnation, s.starts) for s in before.stores if s.state.retired}
    return all(s.state.passive for s in after.stores if (s.incarnation, s.starts) in retired)


# ---- the end of rounds and of the job


def closed_stays_closed(before: World, _: Move, after: World) -> bool:
    closed = {(s.incarnation, s.starts) for s in before.stores if s.state.newer_store is not None}
    return all(
        s.state.newer_store is not None and all(a.store != s.incarnation for a in after.agents)
        for s in after.stores
        if (s.incarnation, s.starts) in closed
    )


def an_outcome_is_never_undone(before: World, _: Move, after: World) -> bool:
    kept = before.declared is None or after.declared is before.declared
    stores = {(s.incarnation, s.starts): s.state.outcome for s in after.stores}
    held = all(
        s.state.outcome is None or stores.get((s.incarnation, s.starts), s.state.outcome) is s.state.outcome
        for s in before.stores
    )
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


def success_means_that_every_member_succeeded(before: World, _: Move, after: World) -> bool:
    """When a store declares success, all workers of all members of the round have ended with success; with
    successPolicy Any those of one member."""
    for s in after.stores:
        known = before.store(s.incarnation)
        old = known.state if known is not None and known.starts == s.starts else None
        if s.state.outcome is not Outcome.SUCCEEDED or s.state.operator_view.finish is not None:
            continue
        if old is not None and old.outcome is None and not _all_succeeded(after, s.state.ended_rounds[-1].round):
            return False
    return True


def _all_succeeded(world: World, round_id: RoundId) -> bool:
    members = {pod for r, pod in world.history.succeeded if r == round_id}
    if world.options.any_success:
        return bool(members)
    sizes = [a.start.group_world_size for a in world.agents if a.start and a.start.round == round_id]
    return bool(sizes) and len(members) == sizes[0]


def one_success_is_enough_with_any(_: World, __: Move, after: World) -> bool:
    """With successPolicy Any, a store that knows of a member whose workers succeeded has declared success."""
    if not after.options.any_success:
        return True
    open_stores = (s for s in after.stores if s.state.newer_store is None and not s.queue and s.state.round is not None)
    return not any(
        m.state is MemberState.SUCCEEDED for s in open_stores if s.state.round for m in s.state.round.members.values()
    )


def a_planned_end_loses_no_step(_: World, __: Move, after: World) -> bool:
    """Workers never stop at a step that one of them has passed, nor later than needed, and all at the same one."""
    steps: dict[RoundId, set[int]] = {}
    for a in after.agents:
        if a.missed_step:
            return False
        if a.stops_at is not None and a.start:
            steps.setdefault(a.start.round, set()).add(a.stops_at)
    return all(len(last) == 1 and max(last) <= _latest_step(after, r) for r, last in steps.items())


def _latest_step(world: World, round_id: RoundId) -> int:
    members = [a for a in world.agents if a.start and a.start.round == round_id]
    complete = members and len(members) == members[0].start.group_world_size if members[0].start else False
    return max(a.step for a in members) + 1 if complete else 2**30


def a_failure_ends_the_round_at_once(_: World, __: Move, after: World) -> bool:
    """Once a member has reported a failure the round ends, and no member waits for a last step."""
    reported = (s.state.round for s in after.stores if s.state.newer_store is None and s.state.outcome is None)
    return all(
        r is None or not r.failures or (r.ending is not None and r.ending.planned_stop is None) for r in reported
    )


# ---- charges


def each_failure_is_charged_once(before: World, _: Move, after: World) -> bool:
    """A round is charged if one of its workers failed by itself on a node that was neither lost nor left; only then.

    What status has charged already is not charged again.
    """
    return all(
        _is_charged_rightly(after, s, old.state, ended)
        for s in after.stores
        if (old := before.store(s.incarnation)) is not None and old.starts == s.starts
        for ended in ended_rounds_since(old.state, s.state)
    )


def _is_charged_rightly(world: World, s: Store, before: CoordinatorState, ended: RoundEnded) -> bool:
    failed = [pod for r, pod in world.history.failures if r == ended.round]
    lost = {m.pod for m in before.round.members.values() if m.lost} if before.round is not None else set()
    lost |= set(ended.lost_pods)
    if ended.charged:
        cause = ended.failure
        if cause is None or cause.pod in lost or _status_counts(s.state, ended.round) or _is_uncounted(world, ended):
            return False
        if cause.kind is FailureClass.COLLECTIVE_FAILED:
            return not lost and not any(_reports(a, s, ended.round) for a in _agents(world, failed))
        return cause.pod in failed
    if s.state.outcome is Outcome.FAILED or ended.reason is EndReason.SUCCEEDED or _is_uncounted(world, ended):
        return True
    owed = [a for a in _agents(world, failed) if _reports(a, s, ended.round) and a.pod not in lost]
    return not owed or _status_counts(s.state, ended.round)


def _is_uncounted(world: World, ended: RoundEnded) -> bool:
    """Return whether a rule of the job keeps the cause of this end from counting."""
    return world.options.action(kind_of_failure(world, ended)) in UNCOUNTED_ACTIONS


def rules_decide_what_follows(before: World, _: Move, after: World) -> bool:
    """The first rule that matches the cause of a round's end decides: FailJob ends the job, and nothing else does so
    without an exhausted budget. A pod that failed by itself has no successor if its rule is FailJob."""
    for s in after.stores:
        old = before.store(s.incarnation)
        for ended in ended_rounds_since(old.state, s.state) if old is not None and old.starts == s.starts else ():
            if ended.reason is not EndReason.WORKER_FAILED or ended.failure is None:
                continue
            expected = after.options.action(kind_of_failure(after, ended))
            failed = (s.state.outcome, s.state.outcome_reason) == (Outcome.FAILED, "FailurePolicyRule")
            adopted = s.state.operator_view.finish is not None
            if ended.action is not expected or (failed != (expected is FailureAction.FAIL_JOB) and not adopted):
                return False
    return after.options.action("crash") is not FailureAction.FAIL_JOB or not _crashed_with_successor(before, after)


def _crashed_with_successor(before: World, after: World) -> bool:
    crashed = {(a.index, a.incarnation) for a in before.agents if a.crashed and not a.deleting}
    known = {a.number for a in before.agents}
    return any((a.index, a.incarnation - 1) in crashed for a in after.agents if a.number not in known)


def _status_counts(state: CoordinatorState, round_id: RoundId) -> bool:
    """Return whether the operator has sent the store a view that counts the round."""
    view = state.operator_view
    return round_id in view.charged_rounds or (view.charged_round is not None and round_id <= view.charged_round)


def _agents(world: World, pods: Sequence[str]) -> list[Agent]:
    return [a for a in world.agents if a.pod in pods]


def _reports(a: Agent, s: Store, round_id: RoundId) -> bool:
    """Return whether the store has all that a node reported about its last round, and the node stays."""
    here = a.store == s.incarnation and not a.deaf and a.ended is None and not (a.leaving or a.deleting)
    return here and a.start is not None and a.start.round == round_id and not a.outbox


def no_round_starts_before_failures_are_charged(before: World, _: Move, after: World) -> bool:
    """No node starts a round while a failure of its workers in the last one is not charged, and never will be."""
    for _s, started in _new_rounds(before, after):
        for a in after.agents:
            if a.agent_id in started.members and (failed := a.last_failure) is not None and failed[0] < started.id:
                decided = [c for c in after.history.concluded if c[0] == failed[0]]
                counted = str(failed[0]) in after.operator.parsed.charged_outages  # for a pod of the round
                uncounted = any(after.options.action(kind) in UNCOUNTED_ACTIONS for *_, kind in decided)
                if not (counted or uncounted or any(charged or a.pod in lost for _, charged, lost, _ in decided)):
                    return False
    return True


def a_charge_is_counted_once(before: World, _: Move, after: World) -> bool:
    once = len(set(after.counted)) == len(after.counted)
    grows = before.charged <= after.charged or after.options.window > 0
    return once and grows and after.charged <= min(after.budget, sum(map(after.options.counts, _truth(after))))


def _truth(world: World) -> list[str]:
    """Return the kinds of all failures that happened."""
    failed = ["exit" if failed in world.history.exits else "fail" for failed in world.history.failures]
    return [*failed, *("crash" for _ in world.history.crashes), *("collective",) * world.history.collectives]


def restarts_are_those_that_happened(before: World, _: Move, after: World) -> bool:
    """`status.restarts` never decreases, includes all restarts that count, and none that a rule ignores."""
    old, new = before.operator.parsed, after.operator.parsed
    happened = [kind for kind in _truth(after) if after.options.action(kind) is not FailureAction.IGNORE]
    return max(old.restarts, new.restarts_counted) <= new.restarts <= len(happened)


def the_window_is_exact(_: World, __: Move, after: World) -> bool:
    """With restartWindowSeconds, status counts the charged rounds since the first one of the last window. Only for
    worlds in which no pod ends by itself, and no charge is withdrawn."""
    window = after.options.window
    return window == 0 or after.charged == min(_in_window(after.counted_at, window), after.budget)


def _in_window(times: Sequence[float], window: int, time: float = 0.0) -> int:
    """Return the restarts of the window that the last one of them is in; at `time`, if it is given."""
    count, start = 0, 0.0
    for at in times:
        if at >= start + window:
            count, start = 0, at
        count += 1
    return 0 if time >= start + window else count


def budgets_are_exact(before: World, move: Move, after: World) -> bool:
    """The budget bounds all charges, a job fails only when it is used up, and status counts each charged round."""
    for s in after.stores:
        spent = _spent(after, s.state)
        if spent > after.budget or (after.declared is None and s.state.charged != spent):
            return False
        old = before.store(s.incarnation)
        fails = old is not None and old.state.outcome is None and s.state.outcome is Outcome.FAILED
        exhausted = fails and s.state.operator_view.finish is None and s.state.outcome_reason != "FailurePolicyRule"
        if exhausted and _spent(after, s.state, s.state.ended_rounds[-1].time) != after.budget:
            return False
    return _status_counts_charges(before, after)


def _spent(world: World, state: CoordinatorState, time: float = 0.0) -> int:
    """Return the restarts that a store knows of: those in status, and those that wait for it. With a restart window,
    those of the window, at a time if it is given."""
    waiting = [e.time for e in state.ended_rounds if e.charged and not _status_counts(state, e.round)]
    if world.options.window == 0:
        return state.operator_view.charged + len(waiting) + state.forgotten_charges
    known = [at for r, at in zip(world.counted, world.counted_at, strict=True) if _status_counts(state, r)]
    return _in_window([*known, *waiting], world.options.window, time)


def _status_counts_charges(before: World, after: World) -> bool:
    new = [r for r in after.counted if r not in before.counted]
    crashed = [a for a in before.agents if a.crashed]
    excused = [r for r in new if _is_excused(before, r) or str(r) in before.operator.parsed.charged_outages]
    added = after.charged - before.charged
    at_least = min(len(new) - len(excused), after.budget - before.charged)
    fails = status_outcome(after) is Outcome.FAILED and before.declared is None
    if fails and not _fails_by_rule(after) and after.charged != after.budget:
        return False
    return after.options.window > 0 or at_least <= added <= len(new) + len(crashed)


def _fails_by_rule(world: World) -> bool:
    """Return whether status says that a rule failed the job, and in truth there was such a failure."""
    condition = world.operator.parsed.conditions[ConditionType.FAILURE_TARGET]
    happened = any(world.options.action(kind) is FailureAction.FAIL_JOB for kind in _truth(world))
    return condition.reason == "FailurePolicyRule" and happened


def _is_excused(world: World, round_id: RoundId) -> bool:
    """Return whether Kubernetes ended a pod of the round, or its agent is lost: the charge may be withdrawn."""
    pods = [pod for r, pod in world.history.failures if r == round_id]
    live = [a for a in _agents(world, pods) if not a.deleting and not a.cut and a.store is not None]
    return len(live) < len(pods) or not pods


# ---- batches


def one_by_one(state: CoordinatorState, batch: Sequence[CoordinatorEvent], now: float) -> RoundDecision:
    """Return what the coordinator decides on one event after the other."""
    decision = RoundDecision(state)
    for event in batch:
        decision = decision.then(rounds.decide(decision.state, event, now))
    return decision


def settled(before: CoordinatorState, after: CoordinatorState) -> object:
    """Return all that was decided about the rounds that existed before, and about the job."""

    def existed(round_id: RoundId) -> bool:
        return round_id.store_incarnation < before.store_incarnation or round_id.number <= before.round_number

    ended = [e for e in after.ended_rounds if existed(e.round)]
    open_round = after.round if after.round and existed(after.round.id) else None
    ending = open_round.ending if open_round else None
    if open_round and ending:
        # Which nodes can join is not decided together with what is charged.
        open_round = replace(open_round, ending=replace(ending, message=""))
    ended = [e if e.reason is not EndReason.SCALING_UP else replace(e, message="") for e in ended]
    return ended, open_round, after.charged, after.outcome, after.failure


def a_batch_is_decided_as_its_events_are(before: World, move: Move, after: World) -> bool:
    """What is charged, why a round ends, and the outcome do not depend on which events arrive together."""
    store = before.store(move[1]) if move[0] == "turn" else None
    if store is None:
        return True
    now = after.store(store.incarnation)
    apart = one_by_one(store.state, store.queue, before.now)
    return now is not None and settled(store.state, now.state) == settled(store.state, apart.state)


INVARIANTS: tuple[Invariant, ...] = (
    never_two_running_worlds,
    never_two_writers,
    a_node_that_has_its_answer_is_not_frozen,
    no_rank_twice,
    nodes_that_stay_keep_their_order,
    joining_nodes_of_one_block_have_neighbouring_ranks,
    joining_nodes_are_beside_their_block,
    old_messages_have_no_effect,
    no_node_gets_a_round_while_its_workers_run,
    an_older_view_is_not_applied,
    between_min_and_max,
    every_size_is_on_the_step,
    no_round_ends_for_too_few_joining_nodes,
    spares_replace_lost_nodes,
    survivors_do_not_wait_for_a_long_start,
    no_round_ends_for_a_node_that_has_to_start_processes,
    a_node_outside_starts_its_processes,
    no_node_keeps_a_broken_result,
    no_round_exceeds_the_target,
    scaling_down_drops_surplus_pods,
    no_leaving_node_joins,
    no_recreated_pod_joins_again,
    a_member_that_leaves_has_its_time,
    a_connected_member_is_sent_the_end_of_its_round,
    a_connected_node_knows_when_its_machine_ends,
    a_confirmation_that_has_run_out_is_not_used,
    a_standby_store_takes_over_with_a_majority,
    only_a_store_that_was_active_closes_another,
    a_retired_store_stays_passive,
    closed_stays_closed,
    an_outcome_is_never_undone,
    success_that_a_node_received_is_final,
    success_means_that_every_member_succeeded,
    one_success_is_enough_with_any,
    a_planned_end_loses_no_step,
    a_failure_ends_the_round_at_once,
    each_failure_is_charged_once,
    rules_decide_what_follows,
    no_round_starts_before_failures_are_charged,
    a_charge_is_counted_once,
    restarts_are_those_that_happened,
    the_window_is_exact,
    budgets_are_exact,
    a_batch_is_decided_as_its_events_are,
)


def broken_invariants(before: World, move: Move, after: World, invariants: Sequence[Invariant] = INVARIANTS) -> str:
    """Return the names of the invariants that a move broke; empty if none."""
    return ", ".join(i.__name__ for i in invariants if not i(before, move, after))


def liveness_violation(world: World, limit: int = 500, invariants: Sequence[Invariant] = INVARIANTS) -> str:
    """Return why the job, or one of its nodes, does not end when no more faults occur; empty if all end."""
    for number in range(limit):
        moves = [m for m in calm(world) if m[0] != "tick"] or list(faults(world, ("succeed",))) or list(calm(world))
        if not moves:
            break
        move = moves[number % len(moves)]
        after = step(world, move)
        if wrong := broken_invariants(world, move, after, invariants):
            return f"{move}: {wrong}"
        world = after
        if world.declared is not None and all(a.ended is not None for a in world.agents):
            return ""
    waiting = [a.pod for a in world.agents if a.ended is None]
    if world.declared is None or waiting:
        return f"after {limit} moves without a fault: outcome {world.declared}, not ended: {waiting}"
    return ""

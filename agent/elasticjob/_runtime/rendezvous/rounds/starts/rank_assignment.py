"""Which agents become members of a round, and with which ranks. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from elasticjob._runtime.contract.log_rules.rules import LogRule
from elasticjob._runtime.contract.messages import StartRound
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.rendezvous.state import KnownAgent, Member


def choose_agents(
    pool: Iterable[KnownAgent],
    last_members: Sequence[str],
    size: int,
    desired_pods: int,
    topology: Callable[[KnownAgent], Sequence[str]],
) -> list[KnownAgent]:
    """Return at most `size` agents in order of group rank; the others of the pool become standbys.

    If there are too many, agents with an index from `desired_pods` on are left out first, then agents that were not in
    the last round. Agents of the last round keep their order among each other, and the first of them has rank 0, so
    that rank 0 (and its checkpoint) stays in its pod. Each other agent goes behind those of its place that stay.
    """
    place = {agent_id: i for i, agent_id in enumerate(last_members)}
    preferred = sorted(pool, key=lambda n: (n.index >= desired_pods, n.agent_id not in place, n.index))[:size]
    staying = sorted((n for n in preferred if n.agent_id in place), key=lambda n: place[n.agent_id])
    joining = sorted((n for n in preferred if n.agent_id not in place), key=lambda n: n.index)
    return _behind_their_places(staying, _side_by_side(joining, topology), topology)


def _behind_their_places(
    staying: Sequence[KnownAgent], joining: Sequence[KnownAgent], topology: Callable[[KnownAgent], Sequence[str]]
) -> list[KnownAgent]:
    """Return the agents that stay in their order, each followed by the agents that join its place.

    A joining agent follows the last agent that stays in the narrowest place in which one stays. Those that join no such
    place come last. Agents that follow the same one keep their order, but those of a narrower place come first.
    """
    last_of_place = {place: position for position, agent in enumerate(staying) for place in _places(topology(agent))}
    following: dict[int, list[tuple[int, KnownAgent]]] = {}
    for agent in joining:
        shared = [place for place in _places(topology(agent)) if place in last_of_place]
        position = last_of_place[shared[-1]] if shared else len(staying)
        following.setdefault(position, []).append((-len(shared), agent))
    behind = {at: [n for _, n in sorted(agents, key=lambda found: found[0])] for at, agents in following.items()}
    ordered = [agent for at, stays in enumerate(staying) for agent in (stays, *behind.get(at, ()))]
    return ordered + behind.get(len(staying), [])


def _places(path: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the places that a path of names leads through, from the widest to the narrowest; none if it is unknown."""
    return [tuple(path[: level + 1]) for level in range(len(path))]


def _side_by_side(agents: Sequence[KnownAgent], topology: Callable[[KnownAgent], Sequence[str]]) -> list[KnownAgent]:
    """Return the agents in an order in which those of one place, wide or narrow, follow each other.

    Otherwise they keep their order: a place comes where its first agent comes. An agent whose place is unknown counts
    as a place of its own.
    """
    first: dict[tuple[str, ...], int] = {}
    order: dict[str, list[int]] = {}
    for position, agent in enumerate(agents):
        places = _places(topology(agent))
        order[agent.agent_id] = [first.setdefault(place, position) for place in places] or [position]
    return sorted(agents, key=lambda n: order[n.agent_id])


def assign_ranks(
    agents: Sequence[KnownAgent],
    round_id: RoundId,
    *,
    restarts: int,
    max_restarts: int,
    progress_timeout: float = 0.0,
    hang_ends_round: bool = True,
    state_known: bool = True,
    log_rules: tuple[LogRule, ...] = (),
    finished_stages: int = 0,
    launchers: tuple[str, ...] = (),
    code: str = "",
) -> Mapping[str, Member]:
    """Return the members by agent id, with ranks as torch assigns them.

    Workers of an agent have consecutive ranks, in order of group rank; role ranks likewise. The process-group store of
    the round is the one that the agent of group rank 0 announced; only this agent gets the addresses of the others.
    """
    world_size = sum(n.local_world_size for n in agents)
    role_sizes: dict[str, int] = {}
    for agent in agents:
        role_sizes[agent.role] = role_sizes.get(agent.role, 0) + agent.local_world_size
    next_rank, next_role_rank = 0, dict.fromkeys(role_sizes, 0)
    members = {}
    for group_rank, agent in enumerate(agents):
        start = StartRound(
            round=round_id,
            group_rank=group_rank,
            group_world_size=len(agents),
            rank=next_rank,
            world_size=world_size,
            role_rank=next_role_rank[agent.role],
            role_world_size=role_sizes[agent.role],
            master_addr=agents[0].address,
            master_port=agents[0].store_port,
            restarts=restarts,
            max_restarts=max_restarts,
            progress_timeout=progress_timeout,
            hang_ends_round=hang_ends_round,
            state_known=state_known,
            log_rules=log_rules,
            finished_stages=finished_stages,
            launchers=launchers,
            code=code,
            member_addresses=tuple(dict.fromkeys(n.address for n in agents)) if group_rank == 0 else (),
        )
        members[agent.agent_id] = Member(start, agent.pod, agent.local_world_size)
        next_rank += agent.local_world_size
        next_role_rank[agent.role] += agent.local_world_size
    return members

"""Who is in a round and with which ranks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from elasticjob.contract.messages import StartRound
from elasticjob.contract.names import RoundId
from elasticjob.rendezvous.state import Member, Node


def choose_nodes(pool: Iterable[Node], last_members: Sequence[str], target: int, indices: int) -> list[Node]:
    """At most `target` nodes in order of group rank; the others stand by.

    Slots from `indices` on go first when there are too many; then nodes of the last round are preferred to new ones.
    Who stays keeps its place, so rank 0 (and its checkpoint) stays where it was.
    """
    place = {agent_id: i for i, agent_id in enumerate(last_members)}
    newcomer = len(place)
    worth = sorted(pool, key=lambda n: (n.index >= indices, n.agent_id not in place, n.index))
    return sorted(worth[:target], key=lambda n: (place.get(n.agent_id, newcomer), n.index))


def assign_ranks(
    nodes: Sequence[Node],
    round_id: RoundId,
    *,
    restarts: int,
    max_restarts: int,
    progress_timeout: float = 0.0,
    hang_ends_round: bool = True,
) -> Mapping[str, Member]:
    """Ranks as torch gives them: workers of a node are consecutive, group rank by group rank; role ranks likewise.

    The round's store is the one that the node of group rank 0 announced.
    """
    world = sum(n.local_world_size for n in nodes)
    roles: dict[str, int] = {}
    for node in nodes:
        roles[node.role] = roles.get(node.role, 0) + node.local_world_size
    next_rank, next_role_rank = 0, dict.fromkeys(roles, 0)
    members = {}
    for group_rank, node in enumerate(nodes):
        start = StartRound(
            round=round_id,
            group_rank=group_rank,
            group_world_size=len(nodes),
            rank=next_rank,
            world_size=world,
            role_rank=next_role_rank[node.role],
            role_world_size=roles[node.role],
            master_addr=nodes[0].address,
            master_port=nodes[0].store_port,
            restarts=restarts,
            max_restarts=max_restarts,
            progress_timeout=progress_timeout,
            hang_ends_round=hang_ends_round,
        )
        members[node.agent_id] = Member(start, node.pod, node.local_world_size)
        next_rank += node.local_world_size
        next_role_rank[node.role] += node.local_world_size
    return members

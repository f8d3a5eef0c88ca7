"""Partitions of `rounds_world`: groups of nodes that reach each other, but no store.

The product decides which of them may write (`write_permission`); the model says which nodes reach which others. The
kubelets of a group report to the API server, as far as an invariant relies on them. A node that must freeze is frozen
before a store loses it: `KeepAlive.trusted_seconds` sees to that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from elasticjob._runtime.agent.state_machine.round import write_permission
from elasticjob._runtime.agent.state_machine.state import AgentPhase
from elasticjob._runtime.contract.messages import EndRound
from elasticjob._runtime.contract.names import RoundId
from support.rendezvous.rounds_agent import Agent

LARGE = 5
"""Jobs of this size have only partitions of neighbours."""


def groups(agents: Sequence[Agent]) -> Iterator[int]:
    """Yield the groups of two or more connected nodes that a fault can cut off, each as a bit mask of indices."""
    indices = sorted(a.index for a in agents if _may_be_cut(a))
    for size in range(2, len(indices) + 1):
        if len(indices) < LARGE:
            yield from (sum(1 << i for i in group) for group in itertools.combinations(indices, size))
        else:
            yield from (sum(1 << i for i in group) for group in (indices[:size], indices[-size:]))


def members_of(agents: Sequence[Agent], group: int) -> list[Agent]:
    """Return the nodes of a group."""
    return [a for a in agents if group >> a.index & 1 and _may_be_cut(a)]


def _may_be_cut(a: Agent) -> bool:
    return a.ended is None and a.store is not None and not a.paused


def must_freeze(agents: Sequence[Agent], a: Agent) -> bool:
    """Return whether a node that is cut off, with its group or alone, has no permission to write."""
    running = a.machine.phase in (AgentPhase.STARTING, AgentPhase.RUNNING, AgentPhase.STOPPING)
    if not a.cut or a.paused or a.ended is not None or a.machine.frozen or not running or a.start is None:
        return False
    linked = dict.fromkeys(_linked(agents, a), math.inf)
    return write_permission.permission_end(a.start.group_rank, a.start.group_world_size, nodes=linked) < math.inf


def _linked(agents: Sequence[Agent], a: Agent) -> set[int]:
    """Return the group ranks of the members of the node's round to which it has a link."""
    peers = {b.start.group_rank: b for b in agents if b.number != a.number and b.start and _same_round(a, b)}
    reached = {rank: b for rank, b in peers.items() if a.group and b.group == a.group}
    if a.start is None or a.start.group_rank == 0:
        return set(reached)
    first = reached.get(0)
    return {0} if first is not None and not first.machine.frozen else set()


def _same_round(a: Agent, b: Agent) -> bool:
    return a.start is not None and b.start is not None and b.busy and a.start.round == b.start.round


def writers(agents: Sequence[Agent], current: frozenset[RoundId]) -> set[RoundId]:
    """Return the rounds whose group rank 0 trains, and is not about to be stopped.

    `current`: rounds that go on, as far as a store knows. A node that hangs or reconnects is no writer here: the first
    is a limit of the design, the second lasts less than the keep-alive time.
    """
    return {a.start.round for a in agents if a.start and a.start.group_rank == 0 and _writes(a, current)}


def _writes(a: Agent, current: frozenset[RoundId]) -> bool:
    assert a.start is not None
    ends = any(isinstance(message, EndRound) and message.round == a.start.round for message in a.inbox)
    return a.training and not a.paused and (a.cut or (a.store is not None and a.start.round in current and not ends))

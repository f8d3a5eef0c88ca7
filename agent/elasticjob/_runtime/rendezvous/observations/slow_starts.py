"""Whether the next round waits for agents that have to start processes, or begins without them. Pure.

The successor of a lost process must run the script up to its function before it can take part. If the next round waits
for it, all ranks wait. If the round begins without that agent, its ranks are missing for the same time, and when they
join, all others pause once more. Agents report how long starts and rounds have taken in this job (`NewProcesses`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elasticjob._runtime.rendezvous.decision import pod_names
from elasticjob._runtime.rendezvous.state import CoordinatorState, KnownAgent, is_restartable

JOIN_ALLOWANCE = 2.0
"""How often the pause of a join is counted. It is known less well than a start: a planned end also waits for a step,
and a load on the Nodes makes it longer. Where both ways cost about the same, one pause is better than two."""


@dataclass(frozen=True)
class WithoutStarts:
    """A round that begins without the agents that have to start processes."""

    pool: Sequence[KnownAgent]
    """The other agents."""
    left_out: tuple[KnownAgent, ...]
    reason: str


def without_slow_starts(
    state: CoordinatorState, ready: Sequence[KnownAgent], chosen: Callable[[Sequence[KnownAgent]], Sequence[KnownAgent]]
) -> WithoutStarts | None:
    """Return the round without the agents that start processes, if that costs less time than to wait; else None.

    `chosen` returns the members of a round for which these agents are available. None also where a cost is unknown, or
    where the other agents are too few.
    """
    starting = tuple(n for n in ready if n.new_processes.count)
    others = [n for n in ready if not n.new_processes.count]
    if not starting or len(others) < state.settings.min_nodes or not is_restartable(state):
        return None
    if not any(n.agent_id in state.last_members and n.new_processes.keeps_newest_state for n in others):
        return None  # only an agent that starts processes may have the newest state, or a shard of it, in its memory
    if not all(n.new_processes.may_start_ahead for n in state.agents.values()):
        return None  # all agents run one script, which needs its round before the function
    start, pause = _start_seconds(state, starting), _pause_seconds(state)
    if start is None or pause is None:
        return None
    ranks, without = _ranks(chosen(ready)), _ranks(chosen(others))
    cost_of_waiting = ranks * start
    cost_of_leaving = ranks * JOIN_ALLOWANCE * pause + max(0, ranks - without) * start
    if cost_of_waiting <= cost_of_leaving:
        return None
    reason = (
        f"all that are ready but {pod_names(n.pod for n in starting)}, where new processes start: that takes about"
        f" {start:.1f} s, and a later join about {pause:.2f} s of the others"
    )
    return WithoutStarts(others, starting, reason)


def _ranks(agents: Sequence[KnownAgent]) -> int:
    return sum(n.local_world_size for n in agents)


def _start_seconds(state: CoordinatorState, starting: Sequence[KnownAgent]) -> float | None:
    """Return how long the slowest of these agents will need to its function; None if that is unknown.

    An agent that has not measured it is as fast as the fastest other one.
    """
    known = [n.new_processes.start_seconds for n in state.agents.values()]
    fastest = min((seconds for seconds in known if seconds is not None), default=None)
    expected = [n.new_processes.start_seconds for n in starting]
    if fastest is None:
        return None
    return max(fastest if seconds is None else seconds for seconds in expected)


def _pause_seconds(state: CoordinatorState) -> float | None:
    """Return how long the ranks that stay pause when others join: until all have stopped, and to one state again.

    What the joining ranks receive then, they would receive now as well.
    """
    formed = [n.new_processes.form_seconds for n in state.agents.values()]
    form = min((seconds for seconds in formed if seconds is not None), default=None)
    return None if form is None or state.shortest_stop is None else state.shortest_stop + form

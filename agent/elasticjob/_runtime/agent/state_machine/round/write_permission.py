"""Until when an agent may write without another answer of the coordinator or of its peers (the design). Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping


def permission_end(
    group_rank: int, group_world_size: int, coordinator: float = -math.inf, nodes: Mapping[int, float] | None = None
) -> float:
    """Return until when an agent may write: as long as it trusts the coordinator, or more than half of the agents.

    `coordinator`: until when the agent trusts the coordinator, according to its last answer. `nodes`: the same for each
    agent to which this one has a link, by group rank. All times are seconds of one clock.

    Every link ends at group rank 0, which counts the agents. It keeps the links only while it may write itself, so for
    every other agent its one link is enough.
    """
    links = nodes or {}
    if group_rank > 0:
        majority = links.get(0, -math.inf)
    elif needed := group_world_size // 2:
        majority = sorted(links.values(), reverse=True)[needed - 1] if len(links) >= needed else -math.inf
    else:
        majority = math.inf  # the only agent of its round
    return max(coordinator, majority)

"""Which workers may write: until when a node may go on without another answer (docs/design.md). Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping


def permission_end(
    group_rank: int, group_world_size: int, coordinator: float = -math.inf, nodes: Mapping[int, float] | None = None
) -> float:
    """Return until when a node may write: while it trusts in the coordinator or in more than half of its round's nodes.

    `coordinator`, `nodes`: until when the node trusts in them, by their last answers; seconds of the same clock as the
    result. `nodes` has the nodes to which it has a link, by group rank. All links end at group rank 0, which counts the
    nodes. It keeps the links of the others only while it may write itself, so one link is enough for them.
    """
    links = nodes or {}
    if group_rank > 0:
        majority = links.get(0, -math.inf)
    elif needed := group_world_size // 2:
        majority = sorted(links.values(), reverse=True)[needed - 1] if len(links) >= needed else -math.inf
    else:
        majority = math.inf  # the only node of its round
    return max(coordinator, majority)

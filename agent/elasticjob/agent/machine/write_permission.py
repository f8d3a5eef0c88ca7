"""Which workers may write: when a node must freeze its workers (docs/design.md, "Which workers may write"). Pure."""

from __future__ import annotations

from collections.abc import Collection


def may_write_alone(group_rank: int, group_world_size: int, linked: Collection[int]) -> bool:
    """Return whether a node may write without the coordinator: more than half of its round's nodes can agree on it.

    `linked`: group ranks of the nodes to which it has a link. All links end at group rank 0, which counts the nodes. It
    keeps the links of the others only while it may write itself, so one link is enough for them.
    """
    if group_rank > 0:
        return 0 in linked
    return 2 * (1 + len(linked)) > group_world_size


def freeze_time(coordinator_lost_at: float | None, majority_lost_at: float | None, keep_alive: float) -> float | None:
    """Return when a node must freeze its workers; None while it reaches the coordinator or `may_write_alone`.

    The other arguments are seconds of the same clock. `keep_alive` is the time that a lost link has to come back.
    """
    if coordinator_lost_at is None or majority_lost_at is None:
        return None
    return max(coordinator_lost_at, majority_lost_at) + keep_alive

"""A queue that takes turns between groups: one with a thousand items delays another one's first item by one turn.

The groups are namespaces: those of the jobs that a worker may reconcile next, of the requests that wait for the rate
limit, and of the large reports that wait to be decoded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items of a group come in the order in which they were added, and the groups that have any by turns.

    A group that gets its first item has its turn after all others that have items then. So an item with k others of its
    group before it waits for at most (k + 1) times as many items as there are groups. `len()` is the number of items.
    """

    def __init__(self) -> None:
        self._groups: dict[Hashable, deque[T]] = {}
        """In the order of their turns. No group is empty."""
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, group: Hashable, item: T) -> None:
        """Add an item behind the others of its group."""
        self._groups.setdefault(group, deque()).append(item)
        self._length += 1

    def pop(self, may_have: Callable[[Hashable], bool] = lambda group: True) -> T | None:
        """Remove and return the next item, of the next group that may have its turn; None without one.

        Groups that may not keep their place.
        """
        for group in self._groups:
            if may_have(group):
                break
        else:
            return None
        items = self._groups.pop(group)
        item = items.popleft()
        if items:
            self._groups[group] = items  # behind the others
        self._length -= 1
        return item

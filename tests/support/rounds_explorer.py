"""Breadth-first exploration of the worlds of `rounds_world`."""

from __future__ import annotations

import itertools
import pickle
from collections import deque

from support.rounds_invariants import broken_invariants, liveness_violation
from support.rounds_world import Move, World, calm, faults, step


def explore(start: World, kinds: tuple[str, ...], budget: int, states: int) -> str:
    """Explore all moves breadth first, with at most `budget` faults.

    Return the first trace that breaks an invariant or leads to a job that does not end; empty if there is none.
    """
    queue: deque[tuple[World, int, tuple[Move, ...]]] = deque([(start, budget, ())])
    seen: set[bytes] = set()
    while queue and len(seen) < states:
        world, left, trace = queue.popleft()
        for move in itertools.chain(faults(world, kinds) if left else (), calm(world)):
            try:
                after = step(world, move)
                wrong = broken_invariants(world, move, after)
            except AssertionError as error:
                wrong = str(error)
            if wrong:
                return f"{wrong}: {' '.join(map(str, (*trace, move)))}"
            key = pickle.dumps((after, left))
            if key not in seen:
                seen.add(key)
                queue.append((after, left - (move in set(faults(world, kinds))), (*trace, move)))
    # The worlds left in the queue are the deepest. From a sample of them the job must end.
    for world, _, trace in list(queue)[:: max(1, len(queue) // 25)]:
        if wrong := liveness_violation(world):
            return f"{wrong}: {' '.join(map(str, trace))}"
    return ""

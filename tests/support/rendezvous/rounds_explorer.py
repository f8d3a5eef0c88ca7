"""Breadth-first search through the worlds of `rounds_world`."""

from __future__ import annotations

import io
import itertools
import pickle
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from elasticjob._runtime.rendezvous.persistent_map import PersistentMap
from support.rendezvous.rounds_invariants import broken_invariants, liveness_violation
from support.rendezvous.rounds_world import Move, World, calm, faults, step


@dataclass(frozen=True)
class Search:
    """What a search found, and how far it came."""

    wrong: str
    """The first trace that breaks an invariant or leads to a job that does not end; empty if there is none."""
    seen: int
    """Different worlds that were reached."""
    depth: int
    """Moves from the start within which every interleaving was explored."""
    exhaustive: bool
    """Whether there are no further worlds: the search was not cut short."""

    def __str__(self) -> str:
        end = "all there are" if self.exhaustive else f"cut short: every interleaving of {self.depth} moves"
        return f"{self.seen} worlds, {end}; {self.wrong or 'nothing wrong'}"


class _Key(pickle.Pickler):
    """Writes equal worlds as equal bytes: without references between equal parts, and maps without their history."""

    dispatch_table = {PersistentMap: lambda m: (dict, (tuple(m.items()),))}  # noqa: RUF012

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.fast = True


def key_of(world: World, left: int) -> bytes:
    file = io.BytesIO()
    _Key(file).dump((world, left))
    return file.getvalue()


def search(start: World, kinds: tuple[str, ...], budget: int, states: int) -> Search:
    """Explore all moves breadth first, with at most `budget` faults, until `states` worlds are known."""
    queue: deque[tuple[World, int, tuple[Move, ...]]] = deque([(start, budget, ())])
    seen = {key_of(start, budget)}
    while queue and len(seen) < states:
        world, left, trace = queue.popleft()
        possible = set(faults(world, kinds)) if left else set()
        for move in itertools.chain(faults(world, kinds) if left else (), calm(world)):
            after, wrong = _checked(world, move)
            if wrong:
                return Search(f"{wrong}: {' '.join(map(str, (*trace, move)))}", len(seen), len(trace), False)
            key = key_of(after, left - (move in possible))
            if key not in seen:
                seen.add(key)
                queue.append((after, left - (move in possible), (*trace, move)))
    depth = len(queue[0][2]) if queue else 0
    return Search(_dead_end(queue), len(seen), depth, exhaustive=not queue)


def _checked(world: World, move: Move) -> tuple[World, str]:
    try:
        after = step(world, move)
        return after, broken_invariants(world, move, after)
    except AssertionError as error:
        return world, str(error) or "assertion"


def _dead_end(queue: Iterable[tuple[World, int, tuple[Move, ...]]]) -> str:
    """The worlds left in the queue are the deepest. From a sample of them the job must end."""
    left = list(queue)
    for world, _, trace in left[:: max(1, len(left) // 25)]:
        if wrong := liveness_violation(world, 2000):
            return f"{wrong}: {' '.join(map(str, trace))}"
    return ""


def explore(start: World, kinds: tuple[str, ...], budget: int, states: int) -> str:
    """Return the first trace that is wrong; print how far the search came."""
    found = search(start, kinds, budget, states)
    print(f"{'+'.join(kinds)}: {found}")
    return found.wrong

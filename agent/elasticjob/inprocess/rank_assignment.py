"""Hook that gives the remaining ranks their numbers in the next iteration.

The rules are pure functions of the members: every rank computes the same arrangement and takes its own place in it.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import timedelta

from elasticjob.inprocess._arguments.times import seconds
from elasticjob.inprocess.exception import RestartError
from elasticjob.inprocess.state import State


class RankAssignment(ABC):
    """Called on each rank before the first iteration, without terminated ranks, and before each later one."""

    @abstractmethod
    def __call__(self, state: State, terminated_ranks: set[int]) -> tuple[State, set[int]]:
        """Return the state with the new rank and world size, and the terminated ranks that are still part of it.

        `terminated_ranks` are numbers of the iteration that ended. All ranks of `state` are active.
        Unless the returned set is empty, the wrapper raises `RestartError`.
        """


@dataclass(frozen=True)
class RankPlace:
    """A rank of the iteration that ended."""

    rank: int
    initial_rank: int
    host: str
    """Name of its host, or the value of ELASTICJOB_TOPOLOGY: names of enclosing domains, the outermost first,
    separated by `/`."""

    def domain(self, depth: int) -> str:
        """Return the name of the enclosing domain at a depth, 1 for the outermost, with its own domains' names."""
        return "/".join(self.host.split("/")[:depth])


@dataclass(frozen=True)
class Arrangement:
    """The next iteration: its rank `i` is the rank `order[i]` of the iteration that ended."""

    order: tuple[int, ...]
    active: int
    """Ranks below this number are active, the others are spares."""


class ArrangedRanks(RankAssignment):
    """A rank assignment by a rule about all ranks."""

    needs_hosts = False
    """Whether the rule reads `RankPlace.host` and `RankPlace.initial_rank`; each rank then reads all from the store."""

    @abstractmethod
    def arrange(self, members: Sequence[RankPlace], terminated: AbstractSet[int]) -> Arrangement:
        """Return the next iteration's ranks. `members` has all ranks in order, also those in `terminated`."""

    def __call__(self, state: State, terminated_ranks: set[int]) -> tuple[State, set[int]]:
        members = [RankPlace(rank, rank, "") for rank in range(state.world_size)]
        if self.needs_hosts:
            alive = [rank for rank in range(state.world_size) if rank not in terminated_ranks]
            for rank, (initial_rank, host) in zip(alive, state.store.get_members(alive), strict=True):
                members[rank] = RankPlace(rank, initial_rank, host)
        return place(state, self.arrange(members, terminated_ranks), terminated_ranks)


def place(state: State, arrangement: Arrangement, terminated: AbstractSet[int]) -> tuple[State, set[int]]:
    """Return the rank's state in an arrangement, and the terminated ranks that the arrangement contains."""
    left = set(terminated) & set(arrangement.order)
    if state.rank not in arrangement.order:
        return state.terminate(), left
    placed = state.with_rank(arrangement.order.index(state.rank), len(arrangement.order))
    return placed.activate(arrangement.active), left


def survivors(members: Sequence[RankPlace], terminated: AbstractSet[int]) -> list[RankPlace]:
    """Return the members that are not terminated, in order."""
    return [member for member in members if member.rank not in terminated]


class ShiftRanks(ArrangedRanks):
    """Ranks above a terminated one move down: the order stays, all numbers behind it change."""

    def arrange(self, members: Sequence[RankPlace], terminated: AbstractSet[int]) -> Arrangement:
        order = tuple(member.rank for member in survivors(members, terminated))
        return Arrangement(order, len(order))


class FillGaps(ArrangedRanks):
    """The last ranks take the numbers of terminated ones. All other ranks keep theirs."""

    def arrange(self, members: Sequence[RankPlace], terminated: AbstractSet[int]) -> Arrangement:
        alive = [member.rank for member in survivors(members, terminated)]
        return Arrangement(fill_gaps(alive, [rank for rank in reversed(alive) if rank >= len(alive)]), len(alive))


class StableRanks(ArrangedRanks):
    """Active ranks keep their numbers: the first spares, and without spares the last ranks, take those of lost ones."""

    def __init__(self, max_active_world_size: int) -> None:
        """Ranks from this number on are spares."""
        if max_active_world_size < 1:
            raise ValueError(f"max_active_world_size must be at least 1, not {max_active_world_size}")
        self._active = max_active_world_size

    def arrange(self, members: Sequence[RankPlace], terminated: AbstractSet[int]) -> Arrangement:
        alive = [member.rank for member in survivors(members, terminated)]
        active = min(self._active, len(alive))
        spares = [rank for rank in alive if rank >= self._active]
        last = [rank for rank in reversed(alive) if active <= rank < self._active]
        order = fill_gaps(alive, [*spares, *last], active)
        placed = set(order)
        return Arrangement((*order, *(rank for rank in alive if rank not in placed)), active)


def fill_gaps(alive: Sequence[int], replacements: Sequence[int], size: int | None = None) -> tuple[int, ...]:
    """Return `size` ranks, each at its own place; replacements, in order, take the places of ranks that are missing."""
    remaining, present = iter(replacements), set(alive)
    return tuple(rank if rank in present else next(remaining) for rank in range(len(alive) if size is None else size))


@dataclass(frozen=True)
class Layer:
    """A layer of the topology, for `Tree`."""

    key: Callable[[RankPlace], str]
    """Returns the name of the member's domain in this layer, for example its host or its rack."""
    min_ranks: int = 1
    """A domain with fewer remaining ranks has spares only."""
    max_ranks: int | None = None
    """Active ranks of a domain; the others are spares, which replace lost ones of their domain."""

    def __post_init__(self) -> None:
        if self.min_ranks < 1 or (self.max_ranks is not None and self.max_ranks < self.min_ranks):
            raise ValueError(f"a Layer needs 1 <= min_ranks <= max_ranks, not {self.min_ranks} and {self.max_ranks}")


class Tree(ArrangedRanks):
    """Orders ranks by topology: those of one domain are neighbours, in every layer. Incomplete domains are spares."""

    needs_hosts = True

    def __init__(self, *layers: Layer) -> None:
        """`layers`: the outermost first."""
        if not layers:
            raise ValueError("Tree needs at least one Layer, for example Layer(key=lambda member: member.host)")
        self._layers = layers

    def arrange(self, members: Sequence[RankPlace], terminated: AbstractSet[int]) -> Arrangement:
        alive = survivors(members, terminated)
        active = _without_incomplete(_neighbours(alive, self._layers), self._layers)
        chosen = {member.rank for member in active}
        spares = [member for member in alive if member.rank not in chosen]
        return Arrangement(tuple(member.rank for member in (*active, *spares)), len(active))


class WholeNodes(ArrangedRanks):
    """Only nodes that have lost no rank are active: ranks of the others are spares."""

    needs_hosts = True

    def __init__(self, ranks_per_node: int) -> None:
        if ranks_per_node < 1:
            raise ValueError(f"ranks_per_node must be at least 1, not {ranks_per_node}")
        self._tree = Tree(Layer(key=lambda member: member.host, min_ranks=ranks_per_node, max_ranks=ranks_per_node))

    def arrange(self, members: Sequence[RankPlace], terminated: AbstractSet[int]) -> Arrangement:
        return self._tree.arrange(members, terminated)


_filters = itertools.count()
"""Numbers of the filters of this process. All ranks create the same ones, and each filter has its own keys."""


class FilterGroupedByKey(RankAssignment):
    """Terminates all remaining ranks of a group, if their number is wrong. Another rank assignment must follow.

    For example `compose(FilterGroupedByKey(lambda _: socket.gethostname(), lambda n: n == 8), ShiftRanks())`
    leaves out each host that has lost a rank. A rank that is left out ends with `RestartError`.
    """

    def __init__(
        self,
        key_or_fn: str | Callable[[State], str],
        condition: Callable[[int], bool],
        timeout: timedelta = timedelta(seconds=60),
    ) -> None:
        """`key_or_fn`: the key of this rank's group, or a function that returns it.

        `condition`: whether a group with so many remaining ranks stays.
        `timeout`: how long a rank waits for the keys of all others; then it ends with `RestartError`.
        """
        self._key = key_or_fn
        self._condition = condition
        self._timeout = timeout
        self._number = next(_filters)

    def __call__(self, state: State, terminated_ranks: set[int]) -> tuple[State, set[int]]:
        key, store = self._key(state) if callable(self._key) else self._key, state.store
        store.set(f"group-key/{self._number}/{state.rank}", key)
        alive = [rank for rank in range(state.world_size) if rank not in terminated_ranks]
        names = [f"group-key/{self._number}/{rank}" for rank in alive]
        if not store.wait_for(names, self._timeout):
            missing = [rank for rank, name in zip(alive, names, strict=True) if not store.exists([name])]
            raise RestartError(f"{self!r}: no key of ranks {missing} within {seconds(self._timeout)}")
        keys = [bytes(store.get(name)) for name in names]
        sizes = Counter(keys)
        wrong = {rank for rank, key in zip(alive, keys, strict=True) if not self._condition(sizes[key])}
        return state, terminated_ranks | wrong


def _neighbours(members: Sequence[RankPlace], layers: Sequence[Layer]) -> list[RankPlace]:
    """Return the members domain by domain. Domains, and the members of one, stay in the order of their first rank."""
    if not layers:
        return list(members)
    domains: dict[str, list[RankPlace]] = {}
    for member in members:
        domains.setdefault(layers[0].key(member), []).append(member)
    return [member for domain in domains.values() for member in _neighbours(domain, layers[1:])]


def _without_incomplete(members: list[RankPlace], layers: Sequence[Layer]) -> list[RankPlace]:
    """Return the members that are active. Inner layers decide first: what they lack, outer ones lack too."""
    for depth in range(len(layers), 0, -1):
        layer = layers[depth - 1]
        sizes = Counter(_path(member, layers[:depth]) for member in members)
        members = [member for member in members if sizes[_path(member, layers[:depth])] >= layer.min_ranks]
        if layer.max_ranks is not None:
            members = _first_of_each(members, layers[:depth], layer.max_ranks)
    return members


def _first_of_each(members: Sequence[RankPlace], layers: Sequence[Layer], count: int) -> list[RankPlace]:
    seen: Counter[tuple[str, ...]] = Counter()
    chosen = []
    for member in members:
        path = _path(member, layers)
        seen[path] += 1
        if seen[path] <= count:
            chosen.append(member)
    return chosen


def _path(member: RankPlace, layers: Sequence[Layer]) -> tuple[str, ...]:
    return tuple(layer.key(member) for layer in layers)

"""Immutable mappings with cheap copies: a copy with one changed item shares the rest with the original."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any, TypeVar, overload

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")

MAX_CHANGES = 64
"""How many changes a map holds in addition to its base before they are merged into a new base."""


class PersistentMap(Mapping[K, V]):
    """A base dict shared with other maps, and changes to it. The order is a dict's: a changed key keeps its place."""

    __slots__ = ("base", "changes")

    def __init__(self, base: Mapping[K, V], changes: Mapping[K, V]) -> None:
        self.base = base
        self.changes = changes

    def put(self, key: K, value: V) -> PersistentMap[K, V]:
        """Return a copy with this value.

        N calls cost about N * MAX_CHANGES / 2 + N * N / MAX_CHANGES steps; N copies of a dict cost N * N.
        """
        base = self._merged() if len(self.changes) >= MAX_CHANGES else self.base
        changes = self.changes if base is self.base else {}
        return PersistentMap(base, {**changes, key: value})

    def _merged(self) -> Mapping[K, V]:
        """Return the contents as one dict. It becomes the base, so that repeated iteration merges once."""
        if self.changes:
            self.base, self.changes = {**self.base, **self.changes}, {}
        return self.base

    def __getitem__(self, key: K) -> V:
        return self.changes[key] if key in self.changes else self.base[key]

    @overload
    def get(self, key: K, default: None = None, /) -> V | None: ...
    @overload
    def get(self, key: K, default: V | T, /) -> V | T: ...
    def get(self, key: K, default: Any = None, /) -> Any:
        return self.changes[key] if key in self.changes else self.base.get(key, default)

    def __contains__(self, key: object) -> bool:
        return key in self.changes or key in self.base

    def __iter__(self) -> Iterator[K]:
        return iter(self._merged())

    def __len__(self) -> int:
        return len(self.base) + sum(key not in self.base for key in self.changes)

    def keys(self) -> KeysView[K]:
        return self._merged().keys()

    def values(self) -> ValuesView[V]:
        return self._merged().values()

    def items(self) -> ItemsView[K, V]:
        return self._merged().items()

    def __eq__(self, other: object) -> bool:
        return self._merged() == (other._merged() if isinstance(other, PersistentMap) else other)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a plain dict, so that equal maps have equal pickles."""
        return (dict, (self._merged(),))

    def __repr__(self) -> str:
        return repr(self._merged())


def with_item(mapping: Mapping[K, V], key: K, value: V) -> Mapping[K, V]:
    """Return a copy of an immutable mapping with this value."""
    return (mapping if isinstance(mapping, PersistentMap) else PersistentMap(mapping, {})).put(key, value)

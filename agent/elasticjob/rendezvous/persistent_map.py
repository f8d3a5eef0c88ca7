"""Mappings that are never changed, and of which a changed copy costs little."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any, TypeVar, overload

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")

_CHANGES = 64
"""As many changes are carried along before they become part of a new base."""


class PersistentMap(Mapping[K, V]):
    """A dict that others share, and changes to it. Keeps a dict's order: a changed key stays where it was."""

    __slots__ = ("_base", "_changes")

    def __init__(self, base: Mapping[K, V], changes: Mapping[K, V]) -> None:
        self._base = base
        self._changes = changes

    def put(self, key: K, value: V) -> PersistentMap[K, V]:
        """A copy with this value. N of them cost about N * _CHANGES / 2 + N * N / _CHANGES steps, not N * N."""
        base = self._merged() if len(self._changes) >= _CHANGES else self._base
        changes = self._changes if base is self._base else {}
        return PersistentMap(base, {**changes, key: value})

    def _merged(self) -> Mapping[K, V]:
        """All of it as one dict; kept, so that many walks over the same mapping merge once."""
        if self._changes:
            self._base, self._changes = {**self._base, **self._changes}, {}
        return self._base

    def __getitem__(self, key: K) -> V:
        return self._changes[key] if key in self._changes else self._base[key]

    @overload
    def get(self, key: K, default: None = None, /) -> V | None: ...
    @overload
    def get(self, key: K, default: V | T, /) -> V | T: ...
    def get(self, key: K, default: Any = None, /) -> Any:
        return self._changes[key] if key in self._changes else self._base.get(key, default)

    def __contains__(self, key: object) -> bool:
        return key in self._changes or key in self._base

    def __iter__(self) -> Iterator[K]:
        return iter(self._merged())

    def __len__(self) -> int:
        return len(self._base) + sum(key not in self._base for key in self._changes)

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
        """Pickled alike, however it came about."""
        return (dict, (self._merged(),))

    def __repr__(self) -> str:
        return repr(self._merged())


def with_item(mapping: Mapping[K, V], key: K, value: V) -> Mapping[K, V]:
    """A copy of a mapping that is never changed, with this value."""
    return (mapping if isinstance(mapping, PersistentMap) else PersistentMap(mapping, {})).put(key, value)

"""Immutable mappings with cheap copies."""

from __future__ import annotations

import pickle

from hypothesis import given
from hypothesis import strategies as st

from elasticjob._runtime.rendezvous import persistent_map
from elasticjob._runtime.rendezvous.persistent_map import PersistentMap, with_item

KEYS = st.integers(0, 200)


@given(st.dictionaries(KEYS, st.integers()), st.lists(st.tuples(KEYS, st.integers(), st.booleans()), max_size=300))
def test_a_copy_equals_a_changed_dict_and_the_original_does_not_change(
    start: dict[int, int], changes: list[tuple[int, int, bool]]
) -> None:
    mapping, expected = with_item(start, -1, 0), {**start, -1: 0}
    for key, value, compare in changes:
        original, before = mapping, dict(expected)
        mapping, expected = with_item(mapping, key, value), {**expected, key: value}
        if compare:
            assert list(mapping.items()) == list(expected.items())
            assert list(original.items()) == list(before.items())
        assert (mapping[key], mapping.get(key), mapping.get(-2), -2 in mapping) == (value, value, None, False)
    assert (list(mapping), list(mapping.values())) == (list(expected), list(expected.values()))
    assert len(mapping) == len(expected)


def test_equal_maps_have_equal_pickles() -> None:
    one, other = with_item(with_item({}, "a", 1), "b", 2), with_item({"a": 1}, "b", 2)
    assert one == other == {"a": 1, "b": 2} != with_item(one, "a", 2)
    assert pickle.dumps(one) == pickle.dumps(other) == pickle.dumps(with_item({"a": 0, "b": 2}, "a", 1))


def test_a_change_does_not_copy_everything() -> None:
    count = 10 * persistent_map.MAX_CHANGES
    mappings = [PersistentMap({n: n for n in range(count)}, {})]
    for n in range(count):
        mappings.append(mappings[-1].put(n, -n))
        assert len(mappings[-1].changes) <= persistent_map.MAX_CHANGES
    assert len({id(mapping.base) for mapping in mappings}) <= 10

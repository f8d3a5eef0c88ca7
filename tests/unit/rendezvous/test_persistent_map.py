"""Mappings that share what they have in common."""

from __future__ import annotations

import pickle

from hypothesis import given
from hypothesis import strategies as st

from elasticjob.rendezvous import persistent_map
from elasticjob.rendezvous.persistent_map import PersistentMap, with_item

KEYS = st.integers(0, 200)


@given(st.dictionaries(KEYS, st.integers()), st.lists(st.tuples(KEYS, st.integers(), st.booleans()), max_size=300))
def test_a_copy_is_what_a_changed_dict_would_be_and_the_original_stays(
    start: dict[int, int], changes: list[tuple[int, int, bool]]
) -> None:
    mapping, like = with_item(start, -1, 0), {**start, -1: 0}
    for key, value, look in changes:
        original, before = mapping, dict(like)
        mapping, like = with_item(mapping, key, value), {**like, key: value}
        if look:
            assert list(mapping.items()) == list(like.items())
            assert list(original.items()) == list(before.items())
        assert (mapping[key], mapping.get(key), mapping.get(-2), -2 in mapping) == (value, value, None, False)
    assert (list(mapping), list(mapping.values()), len(mapping)) == (list(like), list(like.values()), len(like))


def test_what_is_equal_is_pickled_alike() -> None:
    one, other = with_item(with_item({}, "a", 1), "b", 2), with_item({"a": 1}, "b", 2)
    assert one == other == {"a": 1, "b": 2} != with_item(one, "a", 2)
    assert pickle.dumps(one) == pickle.dumps(other) == pickle.dumps(with_item({"a": 0, "b": 2}, "a", 1))


def test_a_change_does_not_copy_everything() -> None:
    count = 10 * persistent_map._CHANGES
    mappings = [PersistentMap({n: n for n in range(count)}, {})]
    for n in range(count):
        mappings.append(mappings[-1].put(n, -n))
        assert len(mappings[-1]._changes) <= persistent_map._CHANGES
    assert len({id(mapping._base) for mapping in mappings}) <= 10

"""Any input is converted, or refused with a sentence: manifests in which every other value is replaced in turn."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from elasticjob.convert.documents import parse_documents
from elasticjob.convert.main import convert_documents
from elasticjob.convert.parts.fields import ConvertError
from elasticjob.convert.yaml_text import manifest_text
from unit.convert.test_manifests import INPUTS

REPLACEMENTS: list[Any] = [None, 7, -1, "text", "", True, [], ["a"], {}, {"name": "a"}, [{}], 1.5]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from places(child, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], replacement: Any) -> Any:
    changed = copy.deepcopy(value)
    target = changed
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = replacement
    return changed


@pytest.mark.parametrize("path", INPUTS, ids=lambda p: p.stem)
def test_a_manifest_with_one_wrong_value(path: Any) -> None:
    refused = []
    values = list(yaml.load_all(path.read_text(), yaml.CSafeLoader))
    for number, place in enumerate(list(places(values))[::2]):
        replacement = REPLACEMENTS[number % len(REPLACEMENTS)]
        text = yaml.dump_all(replaced(values, place, replacement), Dumper=yaml.CSafeDumper)
        try:
            manifests, _ = convert_documents(parse_documents(text, "test"), "test")
        except ConvertError as error:
            refused.append(str(error))
        else:
            assert list(yaml.load_all(manifest_text(manifests), yaml.CSafeLoader)) == manifests, place
    assert all(refused)

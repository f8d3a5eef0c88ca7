"""v1alpha1 and v1beta1 of an ElasticJob say the same in different places: nothing is lost in either direction."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from elasticjob._runtime.local.manifest.job_schema import find_mistakes, job_schema
from elasticjob.convert.documents import parse_documents
from elasticjob.convert.kinds.api_versions import (
    MOVES,
    PLATFORM_FIELDS,
    UNMOVED,
    V1ALPHA1,
    V1BETA1,
    to_v1alpha1,
    to_v1beta1,
    v1beta1_schema,
)
from elasticjob.convert.kinds.elasticjob import convert_elasticjob, in_v1beta1
from elasticjob.convert.main import convert_documents
from elasticjob.convert.parts.fields import ConvertError, Notes
from elasticjob.convert.yaml_text import manifest_text
from elasticjob_operator.model.job.job_defaults import DEFAULT_FIELDS
from elasticjob_operator.model.job.spec import read_spec
from support.cluster.kubectl import REPOSITORY
from support.common.examples import examples

Raw = dict[str, Any]
SPEC: Raw = job_schema()["properties"]["spec"]
PAGE = (REPOSITORY / "docs/contribute/design/api.md").read_text()
TEMPLATE: Raw = {"spec": {"containers": [{"name": "a", "image": "i", "command": ["python", "train.py"]}]}}
EXAMPLES = sorted((REPOSITORY / "examples").glob("*.yaml"))


def values(schema: Raw, path: str = "") -> st.SearchStrategy[Any]:
    """Return values that a schema accepts, apart from its rules; the template is always the same."""
    if path == "template":
        return st.just(TEMPLATE)
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "x-kubernetes-int-or-string" in schema:
        return st.just("1") if "pattern" in schema else st.integers(1, 64) | st.sampled_from(["auto", "gpu", "cpu"])
    match schema["type"]:
        case "object":
            return objects(schema, path)
        case "array":
            one = schema.get("x-kubernetes-list-type") in ("set", "map")  # the items must differ
            return st.lists(values(schema["items"], f"{path}[]"), max_size=1 if one else 2)
        case "integer":
            return st.integers(schema.get("minimum", 0), min(schema.get("maximum", 2**31), 2**31))
        case "number":
            return st.floats(schema["minimum"], schema["maximum"])
        case "boolean":
            return st.booleans()
    return st.text(min_size=1, max_size=min(schema.get("maxLength", 8), 8))


def objects(schema: Raw, path: str) -> st.SearchStrategy[Raw]:
    if "properties" not in schema:
        return st.dictionaries(st.text(max_size=3), values(schema["additionalProperties"]), max_size=2)
    inner = {name: values(child, f"{path}.{name}".lstrip(".")) for name, child in schema["properties"].items()}
    required = {name: inner.pop(name) for name in schema.get("required", ())}
    return st.fixed_dictionaries(required, optional=inner)


def without_empty(value: Any) -> Any:
    """Return a spec without objects that have no field, and with the current spelling of no gang: what may change.

    Each object that may vanish has only defaults.
    """
    if not isinstance(value, dict):
        return value
    if value == {"provider": "none"}:
        return {"provider": "None"}
    kept = {name: without_empty(inner) for name, inner in value.items()}
    return {name: inner for name, inner in kept.items() if inner != {}}


@examples(200)
@given(values(SPEC))
def test_a_spec_of_v1alpha1_comes_back_as_it_was(spec: Raw) -> None:
    assert find_mistakes(SPEC, spec) == []
    converted = to_v1beta1(spec)
    assert find_mistakes(v1beta1_schema(), converted) == []
    assert without_empty(to_v1alpha1(converted)) == without_empty(spec)


@examples(200)
@given(values(v1beta1_schema()))
def test_a_spec_of_v1beta1_comes_back_as_it_was(spec: Raw) -> None:
    assert find_mistakes(v1beta1_schema(), spec) == []
    converted = to_v1alpha1(spec)
    assert find_mistakes(SPEC, converted) == []
    assert without_empty(to_v1beta1(converted)) == without_empty(spec)


@examples(100)
@given(values(SPEC))
def test_the_operator_reads_the_same_job(spec: Raw) -> None:
    assert read_spec(to_v1alpha1(to_v1beta1(spec))) == read_spec(spec)


@examples(50)
@given(values(SPEC))
def test_a_conversion_changes_no_input_and_has_one_result(spec: Raw) -> None:
    before = repr(spec)
    assert to_v1beta1(spec) == to_v1beta1(spec)
    assert repr(spec) == before


def test_each_field_has_one_place_in_either_version() -> None:
    roots = {move.v1alpha1.split(".")[0] for move in MOVES}
    assert {*SPEC["properties"]} == roots | {*UNMOVED}, "decide where the field belongs: UNMOVED, or a new one in MOVES"
    new = [move.v1beta1 for move in MOVES]
    assert len(set(new)) == len(new) == len({move.v1alpha1 for move in MOVES})
    assert len(v1beta1_schema()["properties"]) <= 12
    for move in MOVES:
        old_schema, new_schema = schema_at(SPEC, move.v1alpha1), schema_at(v1beta1_schema(), move.v1beta1)
        if move.values:
            assert {*move.values} == {*old_schema.get("enum", (True, False))}
            assert new_schema["enum"] == [*dict.fromkeys(move.values.values())]
            spellings = {old: str(old).lower() for old in move.values}
            assert len({*move.values.values()}) == len({*spellings.values()}), "two values would become one"
            assert all(re.fullmatch(r"[A-Z][A-Za-z]+", value) for value in move.values.values())


def test_the_page_has_each_move() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| `([\w.]+)`", PAGE, re.MULTILINE)
    assert rows == [(move.v1alpha1, move.v1beta1) for move in MOVES]
    for move in MOVES:
        (row,) = re.findall(rf"^\| `{re.escape(move.v1alpha1)}` \|.*$", PAGE, re.MULTILINE)
        named = [
            f"`{str(old).lower() if isinstance(old, bool) else old}` is `{new}`"
            for old, new in move.values.items()
            if old != new
        ]
        assert [text for text in named if text not in row] == []


def test_the_page_has_each_field_that_the_platform_may_have_a_default_for() -> None:
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| (in v1alpha1 too|from v1beta1 on) \|$", PAGE, re.MULTILINE)
    since = {path: when for names, when in rows for path in re.findall(r"`([\w.]+)`", names)}
    assert {*since} == {*PLATFORM_FIELDS}
    new_places = {move.v1alpha1: move.v1beta1 for move in MOVES}
    today = [".".join(path) for path in DEFAULT_FIELDS if path[0] != "template"]
    places = [new_places.get(path, path) for path in today]
    for path, when in since.items():
        assert any(place == path or place.startswith(f"{path}.") for place in places) is (when == "in v1alpha1 too"), (
            path
        )
        assert "default" not in schema_at(v1beta1_schema(), path)
    assert [place for place in places if not any(f"{place}.".startswith(f"{path}.") for path in since)] == []


def schema_at(schema: Raw, path: str) -> Raw:
    for name in path.split("."):
        schema = schema["properties"][name]
    return schema


def test_the_example_of_the_page() -> None:
    old, new = re.findall(r"```yaml\n(apiVersion: .*?)```", PAGE, re.DOTALL)
    manifests, notes = convert_documents(parse_documents(old, "page"), "page", "v1beta1")
    assert notes == []
    assert manifest_text(manifests) == manifest_text([yaml.safe_load(new)])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_our_manifests(path: Path) -> None:
    for document in parse_documents(path.read_text(), path.name):
        if document.kind != "ElasticJob":
            continue
        notes = Notes()
        converted = convert_elasticjob(document.content, "v1beta1", notes)
        assert (converted["apiVersion"], notes.items) == (V1BETA1, [])
        back = convert_elasticjob(converted, "v1alpha1", notes)
        assert back["apiVersion"] == V1ALPHA1
        assert back["spec"] == document.content["spec"]
        assert back["metadata"] == document.content["metadata"]


def job(**spec: Any) -> Raw:
    return {
        "apiVersion": V1BETA1,
        "kind": "ElasticJob",
        "metadata": {"name": "a", "uid": "u", "labels": {"team": "b"}},
        "spec": {"template": TEMPLATE, **spec},
        "status": {"phase": "Running"},
    }


@pytest.mark.parametrize(
    ("manifest", "problem"),
    [
        (job(preload=[]), 'the spec is not one of v1beta1:\n  unknown field "preload"'),
        (job(workers={"preload": "torch"}), "workers.preload in body must be of type array"),
        (job(network={"isolation": True}), "network.isolation in body must be of type string"),
        (job(scheduling={"gang": {"provider": "volcano"}}), 'supported values: "None", "Coscheduling", "Volcano"'),
        (job(failurePolicy={"backoffSeconds": 9, "maxBackoffSeconds": 1}), "the ElasticJob would be refused:\n"),
        (
            job() | {"apiVersion": "elasticjob.dev/v1"},
            "apiVersion: want elasticjob.dev/v1alpha1 or elasticjob.dev/v1beta1",
        ),
        (job(successPolicy="All"), "successPolicy in body must be of type object"),
    ],
)
def test_a_mistake_is_an_error(manifest: Raw, problem: str) -> None:
    with pytest.raises(ConvertError, match=re.escape(problem)):
        convert_elasticjob(manifest, "v1alpha1", Notes())


def test_the_result_is_a_manifest_to_apply() -> None:
    converted = convert_elasticjob(job(runPolicy={"ttlSecondsAfterFinished": 9}), "v1alpha1", Notes())
    assert converted == {
        "apiVersion": V1ALPHA1,
        "kind": "ElasticJob",
        "metadata": {"name": "a", "labels": {"team": "b"}},
        "spec": {"ttlSecondsAfterFinished": 9, "template": TEMPLATE},
    }
    assert in_v1beta1(converted)["spec"] == {"runPolicy": {"ttlSecondsAfterFinished": 9}, "template": TEMPLATE}

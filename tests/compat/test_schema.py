"""An ElasticJob that an earlier version accepted is accepted today."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from compat.versions import TODAY, VERSIONS, code_of

Schema = dict[str, Any]
SAME = (
    "type",
    "format",
    "pattern",
    "$ref",
    "default",
    "nullable",
    "x-kubernetes-int-or-string",
    "x-kubernetes-list-type",
)
LOW, HIGH = ("minimum", "minLength", "minItems", "minProperties"), ("maximum", "maxLength", "maxItems", "maxProperties")
MOVED = "0.1.0 has the rule at spec, where a rule cannot see whether the job has finished"
FIXED_FIELDS = ("template", "rendezvous", "preload", "gang", "successPolicy", "placement")
SAME_ISOLATION = (
    "(!has(self.spec.networkIsolation) || self.spec.networkIsolation) "
    "== (!has(oldSelf.spec.networkIsolation) || oldSelf.spec.networkIsolation)"
)
ENDED = "oldSelf.status.conditions.exists(c, c.type in ['Complete', 'Failed'] && c.status == 'True')"
SUSPENDED = "self.spec.suspend || oldSelf.spec.suspend"
FINISHED = f"(has(oldSelf.status) && has(oldSelf.status.conditions) && {ENDED})"
RATCHETED = "the API server (1.30 and newer) checks only fields that change: a stored object keeps its value"
ACCEPTED = {
    "spec.template: required spec": "the rules of 0.1.0 read template.spec: it refused a template without one too",
    "spec.rendezvous.store.resources: rule !has(self.claims)": RATCHETED,
    "spec.rendezvous.store.resources: rule !has(self.limits) || !has(self.limits.memory) || "
    "(type(self.limits['memory']) == int ? self.limits['memory'] >= 268435456 : "
    "!quantity(self.limits['memory']).isLessThan(quantity('256Mi')))": RATCHETED,
    **{f": rule self.spec.{name} == oldSelf.spec.{name} || {SUSPENDED} || {FINISHED}": MOVED for name in FIXED_FIELDS},
    f": rule {SAME_ISOLATION} || {SUSPENDED} || {FINISHED}": MOVED,
    f": rule has(self.spec.elasticPolicy) || {SUSPENDED} || (has(self.spec.replicas) ? self.spec.replicas : 1) == "
    "(has(oldSelf.spec.replicas) ? oldSelf.spec.replicas : has(oldSelf.spec.elasticPolicy) ? "
    f"oldSelf.spec.elasticPolicy.maxReplicas : 1) || {FINISHED}": MOVED,
    f": rule !has(oldSelf.status) || !has(oldSelf.status.conditions) || !{ENDED} || "
    "(has(self.spec.replicas) == has(oldSelf.spec.replicas) && "
    f"(!has(self.spec.replicas) || self.spec.replicas == oldSelf.spec.replicas) && ({SUSPENDED} || "
    f"({' && '.join(f'self.spec.{name} == oldSelf.spec.{name}' for name in FIXED_FIELDS)} && {SAME_ISOLATION})))": (
        "for replicas, 0.1.0 has the same rule; for the other fields, it has those that have moved"
    ),
}
"""What today's schema refuses although the earlier one accepted it, and why this breaks no stored object."""


def schema_of(code: Path) -> Schema:
    (version,) = yaml.safe_load((code / "crds/elasticjobs.in.yaml").read_text())["spec"]["versions"]
    properties: Schema = version["schema"]["openAPIV3Schema"]
    return properties


def narrower(old: Schema, new: Schema, path: str = "") -> Iterator[str]:
    """Yield where `new` may refuse what `old` accepts, or gives it another meaning."""
    yield from (
        f"{path}: {word}" for word in SAME if word in (old.keys() | new.keys()) and old.get(word) != new.get(word)
    )
    yield from (f"{path}: {word}" for word in LOW if word in new and new[word] > old.get(word, float("-inf")))
    yield from (f"{path}: {word}" for word in HIGH if word in new and new[word] < old.get(word, float("inf")))
    yield from (f"{path}: required {name}" for name in {*new.get("required", ())} - {*old.get("required", ())})
    if "enum" in new:
        yield from (f"{path}: enum {value}" for value in {*old.get("enum", ["any value"])} - {*new["enum"]})
    added = new.get("properties", {}).keys() - old.get("properties", {}).keys()
    rules = {rule["rule"] for rule in old.get("x-kubernetes-validations", ())}
    for rule in (rule["rule"] for rule in new.get("x-kubernetes-validations", ())):
        if rule not in rules and not any(f"self.{name}" in rule for name in added):
            yield f"{path}: rule {rule}"
    for name, inner in old.get("properties", {}).items():
        where = f"{path}.{name}".lstrip(".")
        if name in new.get("properties", {}):
            yield from narrower(inner, new["properties"][name], where)
        else:
            yield f"{where}: removed"
    for word in ("items", "additionalProperties"):
        if isinstance(old.get(word), dict):
            yield from narrower(old[word], new.get(word) or {}, f"{path}[]")


@pytest.mark.parametrize("version", VERSIONS)
def test_todays_schema_accepts_what_an_earlier_version_accepted(version: str) -> None:
    found = {*narrower(schema_of(code_of(version)), schema_of(TODAY))}
    assert found <= ACCEPTED.keys(), "\n".join(sorted(found - ACCEPTED.keys()))


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ({"maximum": 5}, {"maximum": 4}, [": maximum"]),
        ({"minimum": 1}, {"minimum": 0}, []),
        ({}, {"minLength": 1}, [": minLength"]),
        ({"enum": ["a", "b"]}, {"enum": ["a", "c"]}, [": enum b"]),
        ({"properties": {"a": {"type": "string"}}}, {"properties": {"a": {"type": "integer"}}}, ["a: type"]),
        ({"properties": {"a": {}}}, {"properties": {"b": {}}}, ["a: removed"]),
        ({"items": {"default": 1}}, {"items": {"default": 2}}, ["[]: default"]),
        ({}, {"required": ["a"]}, [": required a"]),
        ({}, {"x-kubernetes-validations": [{"rule": "self.a > 1"}]}, [": rule self.a > 1"]),
        ({}, {"properties": {"a": {}}, "x-kubernetes-validations": [{"rule": "self.a > 1"}]}, []),
    ],
)
def test_what_counts_as_narrower(old: Schema, new: Schema, found: list[str]) -> None:
    assert [*narrower(old, new)] == found

"""An ElasticJob that a released version accepted is accepted today, and none of its fields is dropped."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from compat.narrowing import narrowed, narrowed_definition
from compat.versions import TODAY, VERSIONS, code_of

Raw = dict[str, Any]
MOVED = "0.1.0 has the rule at spec, where a rule cannot see whether the job has finished"
OPERATORS = "the operator has the same default, where the platform has no other; what is stored keeps its value"
SAME_PRELOAD = " == ".join(
    f"(has({job}.spec.preload) ? {job}.spec.preload : ['torch', 'torch._dynamo'])" for job in ("self", "oldSelf")
)
SAME_FIELD = {
    name: SAME_PRELOAD if name == "preload" else f"self.spec.{name} == oldSelf.spec.{name}"
    for name in ("template", "rendezvous", "preload", "gang", "successPolicy", "placement")
}
NO_BOUNDS = "!has(self.minReplicas) || !has(self.maxReplicas)"
UNBOUNDED = "0.1.0 requires both fields, so the rule says the same of every object that it accepted"
SAME_FIELD["gang"] = (
    "(self.spec.gang == oldSelf.spec.gang || (self.spec.gang.provider in ['None', 'none'] && "
    "oldSelf.spec.gang.provider in ['None', 'none']))"
)
SAME_ISOLATION = (
    "(!has(self.spec.networkIsolation) || self.spec.networkIsolation) "
    "== (!has(oldSelf.spec.networkIsolation) || oldSelf.spec.networkIsolation)"
)
ENDED = "oldSelf.status.conditions.exists(c, c.type in ['Complete', 'Failed'] && c.status == 'True')"
SUSPENDED = "self.spec.suspend || oldSelf.spec.suspend"
FINISHED = f"(has(oldSelf.status) && has(oldSelf.status.conditions) && {ENDED})"
RATCHETED = "the API server (1.30 and newer) checks only fields that change: a stored object keeps its value"
NEW_FIELD = "0.1.0 does not have the field, which no stored object can have set"
ACCEPTED = {
    "spec.failurePolicy: rule !has(self.backoffSeconds) || !has(self.maxBackoffSeconds) || "
    "self.backoffSeconds <= self.maxBackoffSeconds": NEW_FIELD,
    "spec: rule !has(self.networkIsolation) || !self.networkIsolation || !has(self.template.spec.hostNetwork) || "
    "!self.template.spec.hostNetwork": NEW_FIELD,
    "spec.template: required spec": "the rules of 0.1.0 read template.spec: it refused a template without one too",
    "spec.rendezvous.store.resources: rule !has(self.claims)": RATCHETED,
    "spec.rendezvous.store.resources: rule !has(self.limits) || !has(self.limits.memory) || "
    "(type(self.limits['memory']) == int ? self.limits['memory'] >= 268435456 : "
    "!quantity(self.limits['memory']).isLessThan(quantity('256Mi')))": RATCHETED,
    **{f": rule {same} || {SUSPENDED} || {FINISHED}": MOVED for same in SAME_FIELD.values()},
    "status.lastFailure.recoverySeconds: removed": "no operator writes it there: it belongs to recentFailures",
    "spec.preload: default": OPERATORS,
    "spec.elasticPolicy.spares: default": OPERATORS,
    "spec.elasticPolicy: rule has(self.minReplicas) == has(self.maxReplicas)": UNBOUNDED,
    f"spec.elasticPolicy: rule {NO_BOUNDS} || self.minReplicas <= self.maxReplicas": UNBOUNDED,
    f"spec.elasticPolicy: rule {NO_BOUNDS} || self.minReplicas > self.maxReplicas || "
    "(self.maxReplicas - self.minReplicas) % self.replicaIncrementStep == 0": UNBOUNDED,
    **{
        f"spec: rule !has(self.elasticPolicy) || !has(self.elasticPolicy.{bound}) || !has(self.replicas) || "
        f"self.replicas {relation} self.elasticPolicy.{bound}": UNBOUNDED
        for bound, relation in (("minReplicas", ">="), ("maxReplicas", "<="))
    },
    "spec.template: rule self.spec.containers.all(c, c.name != 'trainer' || (!has(c.restartPolicyRules) && "
    "(!has(c.restartPolicy) || c.restartPolicy in ['', 'Never']))) && (size(self.spec.containers) == 0 || "
    "self.spec.containers.exists(c, c.name == 'trainer') || (!has(self.spec.containers[0].restartPolicyRules) && "
    "(!has(self.spec.containers[0].restartPolicy) || self.spec.containers[0].restartPolicy in ['', 'Never'])))": (
        "no pod of such a template has run well: older API servers refuse it, newer ones restart an agent in place"
    ),
    f": rule {SAME_ISOLATION} || {SUSPENDED} || {FINISHED}": MOVED,
    f": rule (has(self.spec.elasticPolicy) && has(self.spec.elasticPolicy.maxReplicas)) || {SUSPENDED} || "
    "(has(self.spec.replicas) ? self.spec.replicas : 1) == "
    "(has(oldSelf.spec.replicas) ? oldSelf.spec.replicas : has(oldSelf.spec.elasticPolicy) && "
    f"has(oldSelf.spec.elasticPolicy.maxReplicas) ? oldSelf.spec.elasticPolicy.maxReplicas : 1) || {FINISHED}": MOVED,
    f": rule !has(oldSelf.status) || !has(oldSelf.status.conditions) || !{ENDED} || "
    "(has(self.spec.replicas) == has(oldSelf.spec.replicas) && "
    f"(!has(self.spec.replicas) || self.spec.replicas == oldSelf.spec.replicas) && ({SUSPENDED} || "
    f"({' && '.join(SAME_FIELD.values())} && {SAME_ISOLATION})))": (
        "for replicas, 0.1.0 has the same rule; for the other fields, it has those that have moved"
    ),
}
"""What today's definition refuses or drops although an earlier one accepted it, and why this breaks no stored object.

A new rule of a field that the earlier version has needs an entry too: nothing here can tell what it refuses."""


@cache
def definition_of(code: Path) -> Raw:
    text = (code / "crds/elasticjobs.yaml").read_text()
    definition: Raw = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - both are safe
    return definition


@pytest.mark.parametrize("version", VERSIONS)
def test_todays_definition_accepts_what_a_released_version_accepted(version: str) -> None:
    found = {*narrowed_definition(definition_of(code_of(version)), definition_of(TODAY))}
    assert found <= ACCEPTED.keys(), "narrower, without a reason in ACCEPTED:\n" + "\n".join(
        sorted(found - ACCEPTED.keys())
    )


def test_each_accepted_change_is_one() -> None:
    today = definition_of(TODAY)
    found = {change for version in VERSIONS for change in narrowed_definition(definition_of(code_of(version)), today)}
    assert ACCEPTED.keys() <= found, "no longer a change:\n" + "\n".join(sorted(ACCEPTED.keys() - found))


def test_the_pod_template_is_compared_too() -> None:
    old = definition_of(TODAY)
    new = deepcopy(old)
    (version,) = new["spec"]["versions"]
    pod = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["template"]["properties"]["spec"]
    del pod["properties"]["containers"]["items"]["properties"]["image"]
    assert [*narrowed_definition(old, new)] == ["spec.template.spec.containers[].image: removed"]


ANY = {"x-kubernetes-preserve-unknown-fields": True}
RULE = {"x-kubernetes-validations": [{"rule": "self.a > 1"}]}


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        # Limits: of numbers, texts, lists and maps.
        ({"maximum": 5}, {"maximum": 4}, [": maximum"]),
        ({"maximum": 5}, {"maximum": 6}, []),
        ({"maximum": 5}, {}, []),
        ({}, {"maximum": 4}, [": maximum"]),
        ({"minimum": 1}, {"minimum": 2}, [": minimum"]),
        ({"minimum": 1}, {"minimum": 0}, []),
        ({}, {"minimum": 0}, [": minimum"]),
        ({"maxLength": 9}, {"maxLength": 8}, [": maxLength"]),
        ({"maxItems": 9}, {"maxItems": 8}, [": maxItems"]),
        ({"maxProperties": 9}, {"maxProperties": 8}, [": maxProperties"]),
        ({}, {"minLength": 1}, [": minLength"]),
        ({"minItems": 0}, {"minItems": 1}, [": minItems"]),
        ({}, {"minProperties": 1}, [": minProperties"]),
        ({}, {"exclusiveMinimum": True}, [": exclusiveMinimum"]),
        ({"multipleOf": 2}, {"multipleOf": 4}, [": multipleOf"]),
        # Values.
        ({"enum": ["a", "b"]}, {"enum": ["a", "c"]}, [": enum b"]),
        ({"enum": ["a"]}, {"enum": ["a", "c"]}, []),
        ({"enum": ["a"]}, {}, []),
        ({}, {"enum": ["a"]}, [": enum any value"]),
        ({}, {"pattern": "^a$"}, [": pattern"]),
        ({"pattern": "^a*$"}, {"pattern": "^a$"}, [": pattern"]),
        ({"pattern": "^a$"}, {}, []),
        ({"format": "int64"}, {"format": "int32"}, [": format"]),
        ({}, {"format": "date-time"}, [": format"]),
        ({"type": "string"}, {"type": "integer"}, [": type"]),
        ({"x-kubernetes-int-or-string": True}, {"type": "integer"}, [": type", ": x-kubernetes-int-or-string"]),
        ({"nullable": True}, {}, [": nullable"]),
        ({}, {"nullable": True}, []),
        ({"default": 1}, {"default": 2}, [": default"]),
        ({}, {"default": 2}, [": default"]),
        ({"default": 1}, {}, [": default"]),
        ({}, {"oneOf": [{"required": ["a"]}]}, [": oneOf"]),
        # Fields.
        ({"properties": {"a": {}}}, {"properties": {"b": {}}}, ["a: removed"]),
        ({"properties": {"a": {}}}, {"properties": {}, **ANY}, []),
        ({"properties": {"a": {"type": "string"}}}, {"properties": {"a": {"type": "integer"}}}, ["a: type"]),
        ({"items": {"properties": {"b": {}}}}, {"items": {}}, ["[].b: removed"]),
        ({"items": {"default": 1}}, {"items": {"default": 2}}, ["[]: default"]),
        ({"additionalProperties": {"type": "string"}}, {"additionalProperties": {"type": "integer"}}, ["[]: type"]),
        ({"additionalProperties": {"type": "string"}}, {}, ["[]: removed"]),
        ({"additionalProperties": True}, {"additionalProperties": {"type": "string"}}, ["[]: declared"]),
        ({"additionalProperties": {"type": "string"}}, {"additionalProperties": True}, []),
        (ANY, {}, [": x-kubernetes-preserve-unknown-fields"]),
        (ANY, {**ANY, "properties": {"a": {}}}, ["a: declared"]),
        ({}, {"required": ["a"]}, [": required a"]),
        ({"required": ["a", "b"]}, {"required": ["a"]}, []),
        # How lists and objects are merged.
        ({"x-kubernetes-list-type": "atomic"}, {"x-kubernetes-list-type": "set"}, [": x-kubernetes-list-type"]),
        ({"x-kubernetes-list-map-keys": ["a"]}, {}, [": x-kubernetes-list-map-keys"]),
        ({"x-kubernetes-map-type": "granular"}, {"x-kubernetes-map-type": "atomic"}, [": x-kubernetes-map-type"]),
        # Rules.
        ({}, RULE, [": rule self.a > 1"]),
        ({}, {"properties": {"a": {}}, **RULE}, [": rule self.a > 1"]),
        (RULE, RULE, []),
        (RULE, {}, []),
        (RULE, {"x-kubernetes-validations": [{"rule": "self.a >\n 1", "message": "another"}]}, []),
        (RULE, {"x-kubernetes-validations": [{"rule": "self.a > 2"}]}, [": rule self.a > 2"]),
        (
            RULE,
            {"x-kubernetes-validations": [{"rule": "self.a > 1", "optionalOldSelf": True}]},
            [": rule self.a > 1 (optionalOldSelf)"],
        ),
        # What refuses nothing.
        ({"description": "a"}, {"description": "b"}, []),
        ({}, {"properties": {"a": {"type": "integer", "required": ["b"]}}}, []),
    ],
)  # fmt: skip
def test_what_counts_as_narrower(old: Raw, new: Raw, found: list[str]) -> None:
    assert [*narrowed(old, new)] == found


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"group": "other.dev"}, ["definition: group"]),
        ({"scope": "Cluster"}, ["definition: scope"]),
        ({"names": {"kind": "Job", "shortNames": ["ej"]}}, ["definition: names.kind"]),
        ({"names": {"kind": "ElasticJob", "shortNames": []}}, ["definition: names.shortNames"]),
        ({"names": {"kind": "ElasticJob", "shortNames": ["ej", "ejob"]}}, []),
        ({"versions": []}, ["definition: version v1alpha1"]),
        ({"served": False}, ["definition: version v1alpha1"]),
        ({"storage": False}, ["definition: stored version v1alpha1"]),
        ({"subresources": {"status": {}}}, ["definition: subresource scale"]),
        ({"subresources": {"status": {}, "scale": {"path": ".b"}}}, ["definition: subresource scale"]),
        ({"additionalPrinterColumns": [{"name": "Ready"}]}, ["definition: column Phase"]),
        ({"schema": {"openAPIV3Schema": {"type": "array"}}}, [": type"]),
    ],
)
def test_what_counts_as_narrower_of_a_definition(change: Raw, found: list[str]) -> None:
    version = {
        "name": "v1alpha1",
        "served": True,
        "storage": True,
        "subresources": {"status": {}, "scale": {"path": ".a"}},
        "additionalPrinterColumns": [{"name": "Phase"}],
        "schema": {"openAPIV3Schema": {"type": "object"}},
    }
    names = {"kind": "ElasticJob", "shortNames": ["ej"]}
    spec: Raw = {"group": "elasticjob.dev", "scope": "Namespaced", "names": names, "versions": [version]}
    changed = {"versions": [version | change]} if change.keys() <= version.keys() else change
    assert [*narrowed_definition({"spec": spec}, {"spec": spec | changed})] == found

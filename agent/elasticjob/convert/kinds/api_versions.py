"""The spec of an ElasticJob in v1alpha1 and in v1beta1, and the conversion between them. Pure.

v1beta1 has the same fields in groups: each field has one place in either version, and one value for each value, so
that a conversion loses nothing in any direction. docs/contribute/design/api.md has the reasons. No cluster
serves v1beta1 yet.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from elasticjob._runtime.contract.names import GROUP, VERSION
from elasticjob._runtime.local.manifest.job_schema import Schema, job_schema
from elasticjob.convert.parts.fields import JsonObject

V1ALPHA1 = f"{GROUP}/{VERSION}"
V1BETA1 = f"{GROUP}/v1beta1"


@dataclass(frozen=True)
class FieldMove:
    """A field whose place differs, by its path in the spec of either version."""

    v1alpha1: str
    v1beta1: str
    values: Mapping[Any, str] = field(default_factory=dict)
    """Values of v1alpha1 to those of v1beta1, if any differs: all of them. Of two spellings the last one is current."""


MOVES = (
    FieldMove("nprocPerNode", "workers.nprocPerNode"),
    FieldMove("preload", "workers.preload"),
    FieldMove("stopGraceSeconds", "workers.stopGraceSeconds"),
    FieldMove("trainerIntegration", "workers.trainerIntegration"),
    FieldMove("logRules", "workers.logRules"),
    FieldMove("restartStrategy", "failurePolicy.restartStrategy"),
    FieldMove("hangPolicy", "failurePolicy.hang"),
    FieldMove("successPolicy", "successPolicy.operator"),
    FieldMove("activeDeadlineSeconds", "runPolicy.activeDeadlineSeconds"),
    FieldMove("ttlSecondsAfterFinished", "runPolicy.ttlSecondsAfterFinished"),
    FieldMove("cleanPodPolicy", "runPolicy.cleanPodPolicy"),
    FieldMove("podReplacementPolicy", "runPolicy.podReplacementPolicy"),
    FieldMove("podTerminationTimeoutSeconds", "runPolicy.podTerminationTimeoutSeconds"),
    FieldMove("placement", "scheduling.placement"),
    FieldMove(
        "gang.provider",
        "scheduling.gang.provider",
        {
            "none": "None",
            "None": "None",
            "coscheduling": "Coscheduling",
            "volcano": "Volcano",
            "kubernetes": "Kubernetes",
        },
    ),
    FieldMove("waitForMinSeconds", "scheduling.waitForMinSeconds"),
    FieldMove("disruptionBudget", "scheduling.disruptionBudget", {True: "MinReplicas", False: "None"}),
    FieldMove("networkIsolation", "network.isolation", {True: "Job", False: "None"}),
)
UNMOVED = ("replicas", "suspend", "managedBy", "elasticPolicy", "rendezvous", "failurePolicy", "template")
"""Fields of spec that are the same in both versions, apart from fields that move into them."""
PLATFORM_FIELDS = (
    "rendezvous.port", "rendezvous.joinTimeoutSeconds", "rendezvous.lastCallTimeoutSeconds",
    "rendezvous.keepAliveIntervalSeconds", "rendezvous.keepAliveMaxAttempts", "rendezvous.store",
    "failurePolicy.hang", "failurePolicy.rules", "failurePolicy.avoidNodeSeconds", "failurePolicy.maxStartFailures",
    "scheduling.gang.provider", "scheduling.placement", "scheduling.waitForMinSeconds", "scheduling.disruptionBudget",
    "network.isolation", "runPolicy.activeDeadlineSeconds", "runPolicy.ttlSecondsAfterFinished",
    "runPolicy.podTerminationTimeoutSeconds", "workers.preload", "elasticPolicy.spares",
)  # fmt: skip
"""Fields of v1beta1 without a default in the definition, so that the platform can have one. The API server would fill
it in, and nothing would tell whether the job has set the field."""
_ORDER = (
    "replicas", "suspend", "managedBy", "elasticPolicy", "workers", "rendezvous", "failurePolicy", "successPolicy",
    "runPolicy", "scheduling", "network", "template",
)  # fmt: skip


def to_v1beta1(spec: JsonObject) -> JsonObject:
    """Return the spec in v1beta1. `spec`: one that the schema of v1alpha1 accepts. Empty objects may vanish."""
    return _moved(spec, [(move.v1alpha1, move.v1beta1, dict(move.values)) for move in MOVES])


def to_v1alpha1(spec: JsonObject) -> JsonObject:
    """Return the spec in v1alpha1. `spec`: one that `v1beta1_schema` accepts. Empty objects may vanish."""
    back = [(move.v1beta1, move.v1alpha1, {new: old for old, new in move.values.items()}) for move in MOVES]
    return _moved(spec, back)


def _moved(spec: JsonObject, moves: Iterable[tuple[str, str, Mapping[Any, Any]]]) -> JsonObject:
    result = copy.deepcopy(spec)
    found: list[tuple[str, Any]] = []
    for source, target, values in moves:
        # All fields leave their places first: successPolicy is a text in one version, and an object in the other.
        value = _take(result, source.split("."))
        if value is not _ABSENT:
            found.append((target, values.get(value, value) if values else value))
    for target, value in found:
        *parents, name = target.split(".")
        _object_at(result, parents)[name] = value
    return result


_ABSENT = object()


def _take(place: JsonObject, path: list[str]) -> Any:
    """Remove and return the value at a path, and remove the objects around it that have no other field."""
    name, *rest = path
    if not rest:
        return place.pop(name, _ABSENT)
    inner = place.get(name)
    if not isinstance(inner, dict):
        return _ABSENT
    value = _take(inner, rest)
    if not inner and (value is not _ABSENT or name not in UNMOVED):
        del place[name]
    return value


def _object_at(place: JsonObject, path: Iterable[str]) -> JsonObject:
    for name in path:
        place = place.setdefault(name, {})
    return place


# ---- schema ----------------------------------------------------------------------------------------------------


@cache
def v1beta1_schema() -> Schema:
    """Return the schema of a spec in v1beta1, without its CEL rules: they are those of the spec in v1alpha1."""
    spec: Schema = _without_rules(job_schema()["properties"]["spec"])
    for move in MOVES:
        inner = _take_schema(spec, move.v1alpha1.split("."))
        if move.values:
            inner = {"type": "string", "enum": [*dict.fromkeys(move.values.values())]}
        *parents, name = move.v1beta1.split(".")
        place = spec
        for parent in parents:
            # successPolicy had its text's schema there, which has been taken.
            place = place["properties"].setdefault(parent, {"type": "object", "properties": {}})
        place["properties"][name] = inner
    for path in PLATFORM_FIELDS:
        _schema_at(spec, path).pop("default", None)
    spec["properties"] = {name: spec["properties"][name] for name in sorted(spec["properties"], key=_place)}
    return spec


def _place(name: str) -> int:
    return _ORDER.index(name) if name in _ORDER else len(_ORDER) - 2


def _schema_at(schema: Schema, path: str) -> Schema:
    for name in path.split("."):
        schema = schema["properties"][name]
    return schema


def _take_schema(schema: Schema, path: list[str]) -> Schema:
    name, *rest = path
    if not rest:
        taken: Schema = schema["properties"].pop(name)
        return taken
    inner = schema["properties"][name]
    taken = _take_schema(inner, rest)
    if not inner["properties"]:
        del schema["properties"][name]
    return taken


def _without_rules(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_rules(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {name: _without_rules(value) for name, value in node.items() if name != "x-kubernetes-validations"}

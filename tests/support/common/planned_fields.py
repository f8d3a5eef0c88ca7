"""The schema of an ElasticJob with all fields that the API is planned to have, whatever this version's CRD has."""

from __future__ import annotations

import copy
from typing import Any

from elasticjob._runtime.local.manifest.job_schema import Schema, job_schema

_NUMBER = {"type": "integer", "minimum": 0}
_PLANNED: dict[str, Schema] = {
    "suspend": {"type": "boolean"},
    "managedBy": {"type": "string"},
    "activeDeadlineSeconds": _NUMBER,
    "ttlSecondsAfterFinished": _NUMBER,
    "cleanPodPolicy": {"type": "string"},
    "gang": {"type": "object", "properties": {"provider": {"type": "string"}}},
}
_RULES: Schema = {"type": "array", "items": {"x-kubernetes-preserve-unknown-fields": True}}


def planned_schema() -> Schema:
    """Return this version's schema with the planned fields that it has not, before the template."""
    schema: Schema = copy.deepcopy(job_schema())
    spec: Schema = schema["properties"]["spec"]
    known: dict[str, Any] = spec["properties"]
    template = known.pop("template")
    planned = {k: v for k, v in _PLANNED.items() if k not in known or k == "gang"}  # its providers come one by one
    spec["properties"] = {**known, **planned, "template": template}
    known["failurePolicy"]["properties"].setdefault("rules", _RULES)
    return schema


def bare_schema() -> Schema:
    """Return this version's schema without the planned fields."""
    schema: Schema = copy.deepcopy(job_schema())
    fields = schema["properties"]["spec"]["properties"]
    for name in _PLANNED:
        fields.pop(name, None)
    fields["failurePolicy"]["properties"].pop("rules", None)
    return schema

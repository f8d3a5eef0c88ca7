"""Manifests, and parts of them, in the documentation: the whole job that a part belongs to. Pure."""

from __future__ import annotations

from functools import reduce
from typing import Any

from elasticjob._runtime.local.manifest.job_schema import job_schema

Json = dict[str, Any]
POD = "spec.template.spec"
CONTAINER = "spec.template.spec.containers"


def complete_job(part: Any, where: str | None = None) -> Json:
    """Return an ElasticJob that contains this part of a manifest.

    `where` is its place, such as `spec.failurePolicy.rules`. Without it, its keys say whether it belongs to the job,
    to its spec, its pods or its container. Raise ValueError if they do not.
    """
    job: Json = {
        "apiVersion": "elasticjob.dev/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": "mine"},
        "spec": {"template": {"spec": {"containers": [{"name": "trainer", "image": "i", "command": ["python3"]}]}}},
    }
    whole: Json = _merged(job, _nested(part, _place(part) if where is None else where))
    return whole


def _place(part: Any) -> str:
    keys = set(part) if isinstance(part, dict) else {None}
    for place in ("", "spec", POD, CONTAINER):
        if keys <= _fields(place):
            return place
    raise ValueError(f"no part of a manifest has the fields {sorted(map(str, keys))}: mark it with its place")


def _fields(place: str) -> set[str]:
    schema = reduce(lambda found, name: found["properties"][name], filter(None, place.split(".")), job_schema())
    if place == "":
        return {"apiVersion", "kind", "metadata", "spec"}
    return set(schema.get("items", schema)["properties"])


def _nested(part: Any, place: str) -> Any:
    if place == CONTAINER and isinstance(part, dict):
        part = [part]
    for name in reversed(place.split(".") if place else []):
        part = {name: part}
    return part


def _merged(whole: Any, part: Any) -> Any:
    """Return `whole` with the fields of `part`; the first container of a part completes that of the whole."""
    if isinstance(whole, dict) and isinstance(part, dict):
        return {**whole, **{key: _merged(whole.get(key), value) for key, value in part.items()}}
    if isinstance(whole, list) and isinstance(part, list) and whole and part:
        return [_merged(whole[0], part[0]), *part[1:]]
    return part

"""Check a manifest as the API server does: unknown fields, types, limits, rules and the admission policy. Pure.

`job_schema.json` is the CRD's schema without descriptions and status; `make crds` generates it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from importlib import resources
from typing import Any

from elasticjob._runtime.local.manifest.admission import find_reserved_variables
from elasticjob._runtime.local.manifest.cel import parse_cel

Schema = dict[str, Any]
"""A structural OpenAPI schema."""

_TYPES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}
_ANY = "x-kubernetes-preserve-unknown-fields"
_INT_OR_STRING = "x-kubernetes-int-or-string"
_RULES = "x-kubernetes-validations"
_OLD_VALUE = re.compile(r"\boldSelf\b")
"""Rules with the old value apply only to changes of a job."""


@cache
def job_schema() -> Schema:
    """Return the schema of an ElasticJob."""
    schema: Schema = json.loads(resources.files(__package__).joinpath("job_schema.json").read_text())
    return schema


def find_problems(manifest: Any) -> list[str]:
    """Return why a cluster refuses this ElasticJob; empty if it does not.

    As the API server does, it checks types only if all fields are known, rules only if all types are right, and the
    admission policy last.
    """
    schema = job_schema()
    complete = with_defaults(schema, manifest)
    return (
        find_mistakes(schema, complete)
        or list(_broken_rules(schema, complete, ""))
        or find_reserved_variables(complete)
    )


def find_mistakes(schema: Schema, value: Any) -> list[str]:
    """Return the unknown fields of a value; if there are none, its wrong types and limits."""
    unknown = [f'unknown field "{path}"' for path in _unknown_fields(schema, value, "")]
    return unknown or list(_mistakes(schema, value, ""))


def with_defaults(schema: Schema, value: Any) -> Any:
    """Return a copy of `value` with the schema's defaults for absent fields."""
    if isinstance(value, list) and "items" in schema:
        return [with_defaults(schema["items"], item) for item in value]
    if not isinstance(value, dict) or _ANY in schema:
        return value
    fields = {name: s["default"] for name, s in schema.get("properties", {}).items() if "default" in s}
    fields |= {name: item for name, item in value.items() if item is not None or name not in fields}
    return {name: with_defaults(_child(schema, name) or {_ANY: True}, item) for name, item in fields.items()}


def _child(schema: Schema, name: str) -> Schema | None:
    """Return the schema of a field; None if the schema has no such field."""
    found: Schema | None = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
    return found


def _children(schema: Schema, value: Any, path: str) -> Iterator[tuple[Schema, Any, str]]:
    """Return the schema, value and path of each item of a list, or of each known field of an object."""
    if isinstance(value, list) and "items" in schema:
        yield from ((schema["items"], item, f"{path}[{i}]") for i, item in enumerate(value))
    elif isinstance(value, dict):
        children = ((_child(schema, name), item, f"{path}.{name}" if path else name) for name, item in value.items())
        yield from ((child, item, at) for child, item, at in children if child is not None)


def _unknown_fields(schema: Schema, value: Any, path: str) -> Iterator[str]:
    if _ANY in schema:
        return
    if isinstance(value, dict) and schema.get("type") == "object":
        yield from (f"{path}.{name}" if path else str(name) for name in value if _child(schema, name) is None)
    for child in _children(schema, value, path):
        yield from _unknown_fields(*child)


# ---- types and limits ------------------------------------------------------------------------------------------------


def _mistakes(schema: Schema, value: Any, path: str) -> Iterator[str]:
    if _ANY in schema:
        return
    wanted = ("integer", "string") if _INT_OR_STRING in schema else (schema["type"],)
    found = _TYPES.get(type(value), "string")
    if found not in wanted and (found, wanted) != ("integer", ("number",)):
        yield _invalid(path, f'"{found}"', f'must be of type {",".join(wanted)}: "{found}"')
        return
    yield from (problem for check in _CHECKS for problem in check(schema, value, path))
    for child in _children(schema, value, path):
        yield from _mistakes(*child)


def _invalid(path: str, value: str, problem: str) -> str:
    return f"{path}: Invalid value: {value}: {path} in body {problem}"


def _required(schema: Schema, value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        missing = (name for name in schema.get("required", ()) if name not in value)
        yield from (f"{path}.{name}: Required value" if path else f"{name}: Required value" for name in missing)


def _limits(schema: Schema, value: Any, path: str) -> Iterator[str]:
    if _is_number(value):
        if value < schema.get("minimum", value):
            yield _invalid(path, str(value), f"should be greater than or equal to {schema['minimum']}")
        if value > schema.get("maximum", value):
            yield _invalid(path, str(value), f"should be less than or equal to {schema['maximum']}")


def _is_number(value: Any) -> bool:
    # A boolean of Python is an integer, one of YAML is not a number.
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _lengths(schema: Schema, value: Any, path: str) -> Iterator[str]:
    if isinstance(value, list) and len(value) > schema.get("maxItems", len(value)):
        yield f"{path}: Too many: {len(value)}: must have at most {schema['maxItems']} items"
    if isinstance(value, str) and len(value) > schema.get("maxLength", len(value)):
        yield f"{path}: Too long: may not be more than {schema['maxLength']} bytes"


def _values(schema: Schema, value: Any, path: str) -> Iterator[str]:
    if "enum" in schema and value not in schema["enum"]:
        supported = ", ".join(json.dumps(allowed) for allowed in schema["enum"])
        yield f"{path}: Unsupported value: {json.dumps(value)}: supported values: {supported}"
    if "pattern" in schema and isinstance(value, str) and not re.search(schema["pattern"], value):
        yield _invalid(path, json.dumps(value), f"should match '{schema['pattern']}'")


def _duplicates(schema: Schema, value: Any, path: str) -> Iterator[str]:
    """Return the items of a list that have the key of an earlier one."""
    kind = schema.get("x-kubernetes-list-type")
    if not isinstance(value, list) or kind not in ("map", "set"):
        return
    seen = set()
    for i, item in enumerate(value):
        key = item
        if kind == "map" and isinstance(item, dict):
            key = {name: item[name] for name in schema["x-kubernetes-list-map-keys"] if name in item}
        text = json.dumps(key, separators=(",", ":"), default=str)
        if text in seen:
            yield f"{path}[{i}]: Duplicate value: {text}"
        seen.add(text)


_CHECKS: tuple[Callable[[Schema, Any, str], Iterator[str]], ...] = (_required, _limits, _lengths, _values, _duplicates)


# ---- rules -----------------------------------------------------------------------------------------------------------


def _broken_rules(schema: Schema, value: Any, path: str) -> Iterator[str]:
    for rule in schema.get(_RULES, ()):
        if not _OLD_VALUE.search(rule["rule"]) and not _holds(rule["rule"], value):
            yield f"{path}: {rule['message']}" if path else rule["message"]
    for child in _children(schema, value, path):
        yield from _broken_rules(*child)


def _holds(rule: str, value: Any) -> bool:
    try:
        return parse_cel(rule)({"self": value}) is True
    except (KeyError, IndexError, TypeError):
        return False  # as in the API server: a rule that cannot be evaluated refuses the object

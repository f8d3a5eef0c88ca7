"""Compare two versions of a CustomResourceDefinition: what the newer one refuses or drops that the older one accepted.

Every keyword that differs counts, also one that this module does not know, unless it only accepts more. The meaning of
CEL rules cannot be compared: each rule that the older version does not have, word for word, counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Raw = dict[str, Any]

_LOW = {"minimum", "minLength", "minItems", "minProperties"}
_HIGH = {"maximum", "maxLength", "maxItems", "maxProperties"}
_SUBSCHEMAS = {"properties", "items", "additionalProperties"}
_ONLY_IF_GAINED = {"pattern", "format", "multipleOf"}
"""Keywords that refuse values: one that is gone accepts more."""
_ONLY_IF_LOST = {"nullable", "x-kubernetes-preserve-unknown-fields"}
"""Keywords that accept values: one that is new accepts more."""
_SAYS_NOTHING = {"description"}
_LISTED = _LOW | _HIGH | _SUBSCHEMAS | _SAYS_NOTHING | {"required", "enum", "x-kubernetes-validations"}
_KEEPS_UNKNOWN = "x-kubernetes-preserve-unknown-fields"
_NAMES = ("group", "scope")


def narrowed_definition(old: Raw, new: Raw) -> Iterator[str]:
    """Yield what the definition `new` refuses, drops or serves differently that `old` has, as `path: what`."""
    old, new = old["spec"], new["spec"]
    yield from (f"definition: {name}" for name in _NAMES if old[name] != new[name])
    for name, value in old["names"].items():
        now = new["names"].get(name)
        if set(value) - set(now or ()) if isinstance(value, list) else value != now:
            yield f"definition: names.{name}"
    served = {version["name"]: version for version in new["versions"] if version["served"]}
    for version in old["versions"]:
        if version["storage"] and not served.get(version["name"], version)["storage"]:
            yield f"definition: stored version {version['name']}"
        if not version["served"]:
            continue
        if version["name"] not in served:
            yield f"definition: version {version['name']}"
            continue
        yield from _narrowed_version(version, served[version["name"]])


def _narrowed_version(old: Raw, new: Raw) -> Iterator[str]:
    for name, value in old.get("subresources", {}).items():
        if new.get("subresources", {}).get(name) != value:
            yield f"definition: subresource {name}"
    columns = {column["name"] for column in new.get("additionalPrinterColumns", ())}
    yield from (
        f"definition: column {column['name']}"
        for column in old.get("additionalPrinterColumns", ())
        if column["name"] not in columns
    )
    yield from narrowed(old["schema"]["openAPIV3Schema"], new["schema"]["openAPIV3Schema"])


def narrowed(old: Raw, new: Raw, path: str = "") -> Iterator[str]:
    """Yield where the schema `new` may refuse or drop what `old` accepts, or gives it another meaning."""
    for word in sorted((old.keys() | new.keys()) - _LISTED):
        if old.get(word) != new.get(word) and not _accepts_more(word, old, new):
            yield f"{path}: {word}"
    yield from (f"{path}: {word}" for word in sorted(_LOW & new.keys()) if new[word] > old.get(word, float("-inf")))
    yield from (f"{path}: {word}" for word in sorted(_HIGH & new.keys()) if new[word] < old.get(word, float("inf")))
    yield from (f"{path}: required {name}" for name in new.get("required", ()) if name not in old.get("required", ()))
    if "enum" in new:
        lost = [value for value in old.get("enum", ["any value"]) if value not in new["enum"]]
        yield from (f"{path}: enum {value}" for value in lost)
    rules = [_rule(rule) for rule in old.get("x-kubernetes-validations", ())]
    yield from (
        f"{path}: rule {_rule(rule)}" for rule in new.get("x-kubernetes-validations", ()) if _rule(rule) not in rules
    )
    yield from _narrowed_below(old, new, path)


def _accepts_more(word: str, old: Raw, new: Raw) -> bool:
    return (word in _ONLY_IF_GAINED and word not in new) or (word in _ONLY_IF_LOST and not old.get(word))


def _rule(rule: Raw) -> str:
    text = " ".join(rule["rule"].split())
    return f"{text} (optionalOldSelf)" if rule.get("optionalOldSelf") else text


def _narrowed_below(old: Raw, new: Raw, path: str) -> Iterator[str]:
    fields: Raw = new.get("properties", {})
    for name, inner in old.get("properties", {}).items():
        where = f"{path}.{name}".lstrip(".")
        if name in fields:
            yield from narrowed(inner, fields[name], where)
        elif not new.get(_KEEPS_UNKNOWN):
            yield f"{where}: removed"
    if old.get(_KEEPS_UNKNOWN) or old.get("additionalProperties"):
        # Until now the field could have any value, or the one that additionalProperties allows.
        yield from (f"{path}.{name}: declared".lstrip(".") for name in fields.keys() - old.get("properties", {}).keys())
    for word in ("items", "additionalProperties"):
        before, now = old.get(word), new.get(word)
        if isinstance(before, dict) and isinstance(now, dict):
            yield from narrowed(before, now, f"{path}[]")
        elif before and not now:
            yield f"{path}[]: removed"
        elif before is True and isinstance(now, dict):
            yield f"{path}[]: declared"

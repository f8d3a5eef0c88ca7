"""Read untrusted JSON: a missing or wrongly typed value reads as absent and never raises."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any, TypeAlias

Raw: TypeAlias = Mapping[str, Any]
"""A Kubernetes object, or a part of one."""


def mapping(value: Any, *path: str) -> Raw:
    """Return the object at `path`, or an empty one."""
    found = at(value, *path)
    return found if isinstance(found, Mapping) else {}


def sequence(value: Any, *path: str) -> list[Any]:
    """Return the list at `path`, or an empty one."""
    found = at(value, *path)
    return found if isinstance(found, list) else []


def objects(value: Any, *path: str) -> list[Raw]:
    """Return the objects in the list at `path`."""
    return [item for item in sequence(value, *path) if isinstance(item, Mapping)]


def text(value: Any, *path: str) -> str:
    """Return the string at `path`, or an empty one."""
    found = at(value, *path)
    return found if isinstance(found, str) else ""


def integer(value: Any, *path: str, default: int = 0) -> int:
    """Return the whole number at `path`, or `default`."""
    found = at(value, *path)
    return found if isinstance(found, int) and not isinstance(found, bool) else default


def at(value: Any, *path: str) -> Any:
    """Return the value at `path`, or None."""
    for key in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def moment(value: Any, *path: str) -> float | None:
    """Return the RFC 3339 time at `path` as Unix seconds, or None."""
    found = text(value, *path)
    try:
        return datetime.fromisoformat(found.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None


def timestamp(seconds: float, *, precise: bool = False) -> str:
    """Return Unix seconds as an RFC 3339 time, as Kubernetes writes it; `precise` keeps microseconds."""
    when = datetime.fromtimestamp(seconds, timezone.utc)
    return when.strftime("%Y-%m-%dT%H:%M:%S.%fZ" if precise else "%Y-%m-%dT%H:%M:%SZ")

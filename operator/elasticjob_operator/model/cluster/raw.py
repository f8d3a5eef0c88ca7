"""Read untrusted JSON: a missing, wrongly typed or excessive value reads as absent and never raises."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any, TypeAlias

from elasticjob._runtime.contract.codec import MAX_NUMBER

Raw: TypeAlias = Mapping[str, Any]
"""A Kubernetes object, or a part of one."""

MAX_DIGITS = 18
"""Digits of a number in a text: a number of so many digits fits into 64 bits, as the API server's numbers do. Python
refuses to read one of more than 4300 digits, with an exception."""
LAST_MOMENT = 253402300799.0
"""The last second of the year 9999: RFC 3339 has no later time."""


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
    """Return the whole number at `path`, or `default`. One of more than 64 bits is none."""
    found = at(value, *path)
    whole = isinstance(found, int) and not isinstance(found, bool)
    return found if whole and -MAX_NUMBER <= found < MAX_NUMBER else default


def real(value: Any, *path: str) -> float:
    """Return the number at `path`, whole or not, or 0."""
    found = at(value, *path)
    usable = isinstance(found, (int, float)) and not isinstance(found, bool) and abs(found) < MAX_NUMBER
    return float(found) if usable else 0.0


def is_number(written: str) -> bool:
    """Return whether a text is a whole number in decimal digits, of `MAX_DIGITS` at most."""
    return written.isascii() and written.isdigit() and len(written) <= MAX_DIGITS


def whole_number(written: str) -> int:
    """Return the whole number in a text such as a label or an annotation; 0 where it is none (`is_number`)."""
    return int(written) if is_number(written) else 0


def at(value: Any, *path: str) -> Any:
    """Return the value at `path`, or None."""
    for key in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def moment(value: Any, *path: str) -> float | None:
    """Return the RFC 3339 time at `path` as Unix seconds, or None. A time that `timestamp` cannot write is none."""
    found = text(value, *path)
    try:
        seconds = datetime.fromisoformat(found.replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError):
        return None
    return seconds if 0 <= seconds <= LAST_MOMENT else None


def timestamp(seconds: float, *, precise: bool = False) -> str:
    """Return Unix seconds as an RFC 3339 time, as Kubernetes writes it; `precise` keeps microseconds.

    Other hosts' clocks are not trusted: a time before 1970 or after the year 9999 is written as the nearest one in
    between, because a status that cannot be written would stop its job.
    """
    when = datetime.fromtimestamp(min(max(0.0, seconds), LAST_MOMENT), timezone.utc)
    return when.strftime("%Y-%m-%dT%H:%M:%S.%fZ" if precise else "%Y-%m-%dT%H:%M:%SZ")

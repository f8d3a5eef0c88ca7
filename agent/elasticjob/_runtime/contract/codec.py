"""Convert frozen dataclasses to JSON and back, with strict checks: data of a peer is never trusted.

Numbers and lists have limits (`MAX_NUMBER`, `MAX_ITEMS`), so no reader meets a number that it cannot add to a time or
store in 8 bytes.

A newer peer may send more than this version knows. Unknown fields are ignored. A field with a value that its enum does
not have counts as absent; if it is required, the element of a list or the optional field around it does. A missing,
wrongly typed or non-finite value raises a `MessageError` that names its path, e.g. `WorkersFailed.failure.time`.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from elasticjob._runtime.contract.names import RoundId

T = TypeVar("T")

_PLAIN = frozenset((str, int, float, bool, type(None)))
"""Types that JSON has itself."""
_UNCHECKED = frozenset((str, bool))
"""Types whose JSON values are all valid."""
MAX_NUMBER = 1 << 63
"""Numbers are below this, and not below its negative: they fit in 8 bytes, and no sum of two exceeds a float."""
MAX_ITEMS = 100_000
"""Items of a list. The longest lists have an item for each agent or rank of a job."""


class MessageError(ValueError):
    """The data is not valid JSON, or does not match the dataclass."""


class UnknownMessageError(MessageError):
    """The type of a message is unknown: a newer peer may have sent it."""


class UnknownValueError(MessageError):
    """A required field has a value that its enum does not have: a newer peer may have sent it."""


def dump(value: object) -> Any:
    """Return a dataclass, enum, RoundId, tuple or plain value as plain JSON data."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is RoundId:
        return str(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [dump(item) for item in value]
    return {name: dump(getattr(value, name)) for name in _names(kind)} if is_dataclass(kind) else value


@cache
def _names(cls: type) -> tuple[str, ...]:
    return tuple(f.name for f in fields(cls))


def dumps(value: object) -> bytes:
    """Return `dump(value)` as compact UTF-8 JSON."""
    return json.dumps(dump(value), separators=(",", ":"), allow_nan=False).encode()


def loads(data: bytes) -> Any:
    """Return the JSON value in `data`. MessageError: `data` is not JSON.

    Half of a surrogate pair in a text becomes `?`: no UTF-8 has it, so it could be neither hashed nor sent on.
    """
    try:
        value = json.loads(data)
        return _without_surrogates(value) if b"\\u" in data else value
    except (ValueError, RecursionError) as error:
        raise MessageError(f"not JSON: {error}") from None


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="replace").decode()
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_surrogates(name): _without_surrogates(item) for name, item in value.items()}
    return value


def dump_tagged(message: object) -> bytes:
    """Return a dataclass as a JSON object whose first field, `type`, is the name of its class."""
    return dumps({"type": type(message).__name__} | dump(message))


def parse_tagged(types: Mapping[str, type[T]], data: bytes) -> T:
    """Return the message that `dump_tagged` wrote. `types`: the classes that it may have, by name.

    MessageError: the data is something else; UnknownMessageError: none of `types` has this name.
    """
    raw = loads(data)
    if not isinstance(raw, dict):
        raise MessageError("want an object")
    name = raw.get("type")
    if not isinstance(name, str) or name not in types:
        raise UnknownMessageError(f"unknown message type {str(name)[:80]!r}")
    return parse(types[name], raw)


@dataclass(frozen=True)
class _Field:
    name: str
    kind: Any
    required: bool


@cache
def _shape(cls: type) -> tuple[_Field, ...]:
    hints = get_type_hints(cls)
    return tuple(
        _Field(f.name, hints[f.name], f.default is MISSING and f.default_factory is MISSING) for f in fields(cls)
    )


def parse(cls: type[T], data: Any, path: str = "") -> T:
    """Return an instance of the dataclass `cls` from plain JSON data. MessageError names the invalid field."""
    result: T = _dataclass(cls, data, path or cls.__name__)
    return result


def _dataclass(cls: Any, data: Any, path: str) -> Any:
    if not isinstance(data, dict):
        raise MessageError(f"{path}: want an object, got {type(data).__name__}")
    known = {}
    for field in _shape(cls):
        if field.name in data:
            raw = data[field.name]
            valid = type(raw) is field.kind and field.kind in _UNCHECKED
            try:
                known[field.name] = raw if valid else _value(field.kind, raw, f"{path}.{field.name}")
            except UnknownValueError:
                if field.required:
                    raise
        elif field.required:
            raise MessageError(f"{path}.{field.name}: missing")
    try:
        return cls(**known)
    except ValueError as error:
        raise MessageError(f"{path}: {error}") from None


def _value(kind: Any, data: Any, path: str) -> Any:
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _optional(kind, data, path)
    if origin is tuple:
        if not isinstance(data, list):
            raise MessageError(f"{path}: want a list, got {type(data).__name__}")
        if len(data) > MAX_ITEMS:
            raise MessageError(f"{path}: {len(data)} items; {MAX_ITEMS} are allowed")
        return tuple(_items(get_args(kind)[0], data, path))
    if is_dataclass(kind):
        return _dataclass(kind, data, path)
    return _scalar(kind, data, path)


def _items(kind: Any, data: list[Any], path: str) -> Iterator[Any]:
    for i, item in enumerate(data):
        try:
            yield _value(kind, item, f"{path}[{i}]")
        except UnknownValueError:
            continue


def _optional(kind: Any, data: Any, path: str) -> Any:
    if data is None:
        return None
    (inner,) = (arg for arg in get_args(kind) if arg is not type(None))
    return _value(inner, data, path)


def _scalar(kind: Any, data: Any, path: str) -> Any:
    if kind is RoundId or issubclass(kind, Enum):
        try:
            return _from_text(kind, data)
        except (ValueError, AttributeError, TypeError):
            error = MessageError if kind is RoundId or type(data) is not str else UnknownValueError
            raise error(f"{path}: not a {kind.__name__}: {str(data)[:80]!r}") from None
    if type(data) is not kind and not (kind is float and type(data) is int):
        raise MessageError(f"{path}: want {kind.__name__}, got {type(data).__name__}")
    if kind in (int, float) and not -MAX_NUMBER <= data < MAX_NUMBER:  # neither is NaN
        raise MessageError(f"{path}: not a number from -2^63 to 2^63")
    return float(data) if kind is float else data


def _from_text(kind: Any, data: Any) -> Any:
    return RoundId.parse(data) if kind is RoundId else kind(data)

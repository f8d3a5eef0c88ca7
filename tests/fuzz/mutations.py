"""Inputs that differ from valid ones in a few places."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

NASTY_NUMBERS = (0, -1, 1 << 31, (1 << 63) - 1, 1 << 63, -(1 << 63), 1 << 64, 10**300, 10**400, 1e300, 5e-324)
NASTY_TEXTS = (
    "",
    "\0",
    "\x1b[31m",
    "\ud800",
    "é" * 300,
    "9" * 5000,
    "1e999",
    "../../etc",
    "a" * 70_000,
    "*a",
    "&a",
    "{",
)
NASTY_BYTES = (b"", b"\0" * 8, b"\xff" * 8, b"[" * 3000, b'{"a":' * 3000, b"NaN", b"-Infinity", b"1e999", b"\x1b]0;")
EDITS = 4
"""Places at most in which an input differs from a valid one."""


def mutate(valid: bytes, rng: random.Random) -> bytes:
    """Return changed bytes: JSON by its values half of the time, everything else byte by byte."""
    if rng.random() < 0.5:
        try:
            value = json.loads(valid)
        except (ValueError, RecursionError):
            pass
        else:
            for _ in range(rng.randint(1, EDITS)):
                value = _change_value(value, rng)
            return json.dumps(value).encode()
    data = bytearray(valid)
    for _ in range(rng.randint(1, EDITS)):
        rng.choice(_EDITS)(data, rng)
    return bytes(data)


def mutate_object(value: Any, rng: random.Random) -> Any:
    """Return the plain JSON data with a few values changed; what it contains may be shared with `value`."""
    for _ in range(rng.randint(1, EDITS)):
        value = _change_value(value, rng)
    return value


def _change_value(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {name: each for name, each in value.items() if name != key}
        return {**value, key: _change_value(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        index = rng.randrange(len(value))
        return [*value[:index], _change_value(value[index], rng), *value[index + 1 :]]
    return _nasty_value(rng)


def _nasty_value(rng: random.Random) -> Any:
    choices: Sequence[Callable[[], Any]] = (
        lambda: rng.choice(NASTY_NUMBERS), lambda: rng.choice(NASTY_TEXTS), lambda: None, lambda: rng.random() < 0.5,
        list, dict, lambda: [rng.choice(NASTY_NUMBERS)] * rng.choice((1, 3, 1000)),
        lambda: {rng.choice(NASTY_TEXTS): rng.choice(NASTY_NUMBERS)}, lambda: _nested(rng.choice((5, 500))),
    )  # fmt: skip
    return rng.choice(choices)()


def _nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def _flip(data: bytearray, rng: random.Random) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _cut(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data) + 1)
    del data[at : at + rng.choice((1, 4, 8, 64, len(data)))]


def _repeat(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = data[at : at + rng.choice((1, 8, 64))] * rng.choice((1, 2, 100))


def _insert(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.choice(NASTY_BYTES)


def _overwrite(data: bytearray, rng: random.Random) -> None:
    at, number = rng.randrange(len(data) + 1), rng.choice((0, 1, 0xFF, 1 << 31, (1 << 32) - 1, (1 << 63) - 1))
    size = rng.choice((1, 4, 8))
    data[at : at + size] = (number & ((1 << (8 * size)) - 1)).to_bytes(size, rng.choice(("little", "big")))


_EDITS: Sequence[Callable[[bytearray, random.Random], None]] = (_flip, _cut, _repeat, _insert, _overwrite)

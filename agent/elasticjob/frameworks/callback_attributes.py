"""Attributes of callbacks that no framework exports: each round begins with those of the callback as it was created.

A callback that is created once in a process has counted on in the ranks that survive a fault, and not in the process
that replaces a lost rank: ranks would disagree on what it decides. What a framework exports is part of the State. Of
everything else a new process knows only how the script creates it, so all ranks begin with that.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Iterable
from copy import deepcopy
from typing import Any

log = logging.getLogger(__name__)


class CallbackAttributes:
    """The plain attributes of callbacks, as they were when this process first passed them to a trainer."""

    def __init__(self) -> None:
        self.first_values: list[tuple[weakref.ref[Any], dict[str, Any]]] = []

    def begin_round(self, callbacks: Iterable[Any], advice: str) -> None:
        """Set the plain attributes of callbacks that are known to their first values, and note those of new ones.

        Plain: numbers, text, and lists, tuples, sets, deques and dicts of them. A warning names what has
        changed, with `advice`.
        """
        self.first_values = [(found, values) for found, values in self.first_values if found() is not None]
        for callback in callbacks:
            values = next((values for found, values in self.first_values if found() is callback), None)
            if values is None:
                self.first_values.append((weakref.ref(callback), _plain_attributes(callback)))
            elif changed := _reset(callback, values):
                log.warning(
                    "%s: %s changed in an earlier round, and is as it was created again, as in a new process: %s",
                    type(callback).__name__,
                    ", ".join(changed),
                    advice,
                )


def _reset(callback: Any, first: dict[str, Any]) -> list[str]:
    """Set the plain attributes of a callback to `first`; return the names of those that have changed."""
    own = vars(callback)
    names = {**first, **_plain_attributes(callback)}
    changed = [name for name in names if name not in first or repr(own.get(name)) != repr(first[name])]
    for name in changed:
        if name in first:
            own[name] = _refilled(own.get(name), deepcopy(first[name]))
        else:
            del own[name]
    return changed


def _refilled(container: Any, content: Any) -> Any:
    """Return `content`; in the same list, set or dict, if it is one, because other code may hold it."""
    if type(container) is not type(content) or not isinstance(content, (list, deque, set, dict)):
        return content
    container.clear()
    (container.extend if isinstance(content, (list, deque)) else container.update)(content)
    return container


def _plain_attributes(callback: Any) -> dict[str, Any]:
    attributes = getattr(callback, "__dict__", {})
    return {name: deepcopy(value) for name, value in attributes.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple, set, deque)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes))

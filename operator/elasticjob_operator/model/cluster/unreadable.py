"""Objects that cannot be read are skipped or reduced, and logged: an object of one tenant never stops the jobs of all.

The functions of this package raise for no object that we know of (`tests/unit/operator/test_hostile_objects.py`). The
operator lists the objects of all namespaces in one go and watches them in one task, so an exception for one of them
would end the operator at each start.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import TypeVar

from elasticjob_operator.model.cluster.raw import Raw, text

T = TypeVar("T")

log = logging.getLogger(__name__)

MAX_PROBLEM = 300
"""Characters of a problem: the exception may quote the object."""


def parse_or_skip(
    parse: Callable[[Raw], T],
    kind: str,
    raw: Raw,
    known: str | None = "",
    minimal: Callable[[Raw], T] | None = None,
) -> tuple[T | None, str]:
    """Return the parsed object and ""; None and why it cannot be read, a sentence that names it, if `parse` raises.

    `minimal` reads less: what it returns takes the place of None. The problem is logged, unless it is `known`: the one
    that this function has returned for the object before. None: the caller has handed the object to the cache, which
    logs it.
    """
    try:
        return parse(raw), ""
    except Exception as error:  # whatever it is, it concerns this object only
        found, consequence = None, "is ignored"
        if minimal is not None:
            with contextlib.suppress(Exception):
                found, consequence = minimal(raw), "only its identity, node, phase and deletion count"
        namespace, name = text(raw, "metadata", "namespace"), text(raw, "metadata", "name")
        problem = f"{kind} {name} cannot be read, and {consequence}: {type(error).__name__}: {error}"[:MAX_PROBLEM]
        if known is not None and problem != known:
            log.error("%s: %s", namespace or "cluster", problem)
        return found, problem


class ObjectGuard:
    """Keeps an exception for one object of a list from ending the list. `kind`: what the objects are, for the log."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._failing = set[tuple[str, str]]()
        """Namespace and name of each object that failed at its last call: its exception is logged once."""

    def call(self, record: Callable[[Raw], object], raw: Raw) -> None:
        """Call `record` with the object; log its exception, unless the last call for this object failed too."""
        name = text(raw, "metadata", "namespace"), text(raw, "metadata", "name")
        try:
            record(raw)
        except Exception:  # whatever it is, it concerns this object only
            if name not in self._failing:
                log.exception("%s: %s %s in a list cannot be taken over", name[0] or "cluster", self._kind, name[1])
            self._failing.add(name)
        else:
            self._failing.discard(name)

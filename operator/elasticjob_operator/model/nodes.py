"""Nodes of the cluster, reduced to their warnings (the machine is about to end, or it is cordoned) and their place."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from elasticjob_operator.model.raw import Raw, at, mapping, moment, objects, text

_UNIX_SECONDS = re.compile(r"[0-9]{1,12}(\.[0-9]{1,9})?")


@dataclass(frozen=True)
class NoticeKeys:
    """Keys of the taints and annotations that announce the end of a machine, such as that of a spot instance."""

    taints: frozenset[str]
    annotations: frozenset[str]
    taint_seconds: Mapping[str, float] = field(default_factory=dict)
    """By key of a taint: how long the machine still runs once it has the taint."""


@dataclass(frozen=True)
class NodeWarning:
    """The warnings of one Node."""

    notice: str = ""
    """The taint or annotation that announces the machine's end, such as `taint ToBeDeletedByClusterAutoscaler`; empty
    if there is none."""
    cordoned: bool = False
    ends: tuple[tuple[str, float], ...] = ()
    """The taints and annotations that say when the machine ends, each with that time in Unix seconds."""

    @property
    def ends_at(self) -> float | None:
        """When the machine ends, Unix seconds; None if that is unknown."""
        return min((time for _, time in self.ends), default=None)


def parse_warning(raw: Raw, keys: NoticeKeys, now: float, before: NodeWarning | None = None) -> NodeWarning | None:
    """Return the warnings of a Node; None if it has none.

    `now`: Unix seconds; `before`: the warnings that the Node had, as this function returned them.
    """
    known = dict(before.ends) if before is not None else {}
    ends: dict[str, float | None] = {}
    for taint in objects(raw, "spec", "taints"):
        if (key := text(taint, "key")) in keys.taints:
            ends[f"taint {key}"] = _end_by_taint(taint, keys.taint_seconds.get(key), now, known.get(f"taint {key}"))
    annotations = mapping(raw, "metadata", "annotations")
    for key in sorted(keys.annotations & annotations.keys()):
        ends[f"annotation {key}"] = _end_by_annotation(annotations[key], now, known.get(f"annotation {key}"))
    cordoned = at(raw, "spec", "unschedulable") is True
    if not ends and not cordoned:
        return None
    return NodeWarning(next(iter(ends), ""), cordoned, tuple((n, end) for n, end in ends.items() if end is not None))


def _end_by_taint(taint: Raw, seconds: float | None, now: float, known: float | None) -> float | None:
    """Return when a machine with this taint ends; `known`: the same as of its last event.

    Most components that set a taint leave `timeAdded` out. The first sighting of it bounds the time anyway, because the
    clock of another host wrote `timeAdded`.
    """
    if seconds is None or known is not None:
        return None if seconds is None else known
    added = moment(taint, "timeAdded")
    stated = None if added is None else added + seconds
    return stated if stated is not None and now < stated < now + seconds else now + seconds


def _end_by_annotation(value: object, now: float, known: float | None) -> float | None:
    """Return the time in the value of an annotation. One that is over at its first sighting does not count."""
    time = _parse_time(value) if isinstance(value, str) else None
    return time if time is not None and (time > now or time == known) else None


def _parse_time(value: str) -> float | None:
    """Return an RFC 3339 time or a number of Unix seconds as Unix seconds; None for any other text."""
    if _UNIX_SECONDS.fullmatch(value):
        return float(value)
    try:
        time = datetime.fromisoformat(value.replace("Z", "+00:00"))
    except ValueError:
        return None
    return None if time.tzinfo is None else time.timestamp()


def parse_topology(raw: Raw, labels: Sequence[str]) -> tuple[str, ...]:
    """Return a Node's values of these labels, "" for those that it does not have; empty if it has none of them."""
    values = tuple(text(raw, "metadata", "labels", label) for label in labels)
    return values if any(values) else ()

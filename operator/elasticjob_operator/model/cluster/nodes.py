"""Nodes of the cluster, reduced to their warnings (the Node is about to end, or it is cordoned) and their place."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from elasticjob_operator.model.cluster.notices import NoticeKeys, NoticeKind
from elasticjob_operator.model.cluster.raw import Raw, at, mapping, moment, objects, text

_UNIX_SECONDS = re.compile(r"[0-9]{1,12}(\.[0-9]{1,9})?")


@dataclass(frozen=True)
class NodeWarning:
    """The warnings of one Node."""

    notice: str = ""
    """What announces the end (`NoticeKind.ENDS`), such as `taint cloud.google.com/impending-node-termination`; empty
    if nothing does."""
    cordoned: bool = False
    ends: tuple[tuple[str, float], ...] = ()
    """The notices that say when the Node ends, each with that time in Unix seconds."""
    drain: str = ""
    """What asks for a drain that may be withdrawn (`NoticeKind.DRAINS`), such as `taint karpenter.sh/disrupted`; empty
    if nothing does, or if the end is announced."""

    @property
    def ends_at(self) -> float | None:
        """When the Node ends, Unix seconds; None if that is unknown."""
        return min((time for _, time in self.ends), default=None)


def parse_warning(raw: Raw, keys: NoticeKeys, now: float, before: NodeWarning | None = None) -> NodeWarning | None:
    """Return the warnings of a Node; None if it has none.

    `now`: Unix seconds; `before`: the warnings that the Node had, as this function returned them.
    """
    known = dict(before.ends) if before is not None else {}
    found = {name: (key, end) for name, key, end in _notices(raw, keys, known, now)}
    ends = {name: end for name, (key, end) in found.items() if keys.kind(key) is NoticeKind.ENDS}
    drain = "" if ends else next(iter(found), "")
    cordoned = at(raw, "spec", "unschedulable") is True
    if not found and not cordoned:
        return None
    times = tuple((name, end) for name, end in ends.items() if end is not None)
    return NodeWarning(next(iter(ends), ""), cordoned, times, drain)


def _notices(
    raw: Raw, keys: NoticeKeys, known: Mapping[str, float], now: float
) -> Iterator[tuple[str, str, float | None]]:
    """Yield each notice of a Node: its name in messages, its key, and when the Node ends, if known."""
    for taint in objects(raw, "spec", "taints"):
        if (key := text(taint, "key")) in keys.taints:
            name = f"taint {key}"
            yield name, key, _end_by_taint(taint, keys.taint_seconds.get(key), now, known.get(name))
    annotations = mapping(raw, "metadata", "annotations")
    for key in sorted(keys.annotations & annotations.keys()):
        name = f"annotation {key}"
        yield name, key, _end_by_value(annotations[key], now, known.get(name))
    for condition in objects(raw, "status", "conditions"):
        kind, status = text(condition, "type"), text(condition, "status")
        if f"{kind}={status}" in keys.conditions or (status == "True" and kind in keys.conditions):
            yield f"condition {kind}={status}", kind, None
    labels = mapping(raw, "metadata", "labels")
    for row in sorted(keys.labels):
        key, _, value = row.partition("=")
        if key in labels and value in ("", text(labels, key)):
            name = f"label {key}={text(labels, key)}"
            yield name, key, _end_by_value(text(labels, key), now, known.get(name))


def _end_by_taint(taint: Raw, seconds: float | None, now: float, known: float | None) -> float | None:
    """Return when a Node with this taint ends. `known`: what this function returned for the Node's last event; it does
    not change any more.

    Most components leave `timeAdded` out, and if it is there another host's clock wrote it. So the end is at most
    `seconds` after the operator first saw the taint.
    """
    if seconds is None or known is not None:
        return None if seconds is None else known
    added = moment(taint, "timeAdded")
    stated = None if added is None else added + seconds
    return stated if stated is not None and now < stated < now + seconds else now + seconds


def _end_by_value(value: object, now: float, known: float | None) -> float | None:
    """Return the time in the value of an annotation or label. A time that was past when the operator first saw it does
    not count."""
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

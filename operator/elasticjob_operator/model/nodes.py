"""Nodes of the cluster, reduced to their warnings (the machine is about to end, or it is cordoned) and their place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elasticjob_operator.model.raw import Raw, at, mapping, objects, text


@dataclass(frozen=True)
class NoticeKeys:
    """Keys of the taints and annotations that announce the end of a machine, such as that of a spot instance."""

    taints: frozenset[str]
    annotations: frozenset[str]


@dataclass(frozen=True)
class NodeWarning:
    """The warnings of one Node."""

    notice: str = ""
    """The taint or annotation that announces the machine's end, such as `taint ToBeDeletedByClusterAutoscaler`; empty
    if there is none."""
    cordoned: bool = False


def parse_warning(raw: Raw, keys: NoticeKeys) -> NodeWarning | None:
    """Return the warnings of a Node; None if it has none."""
    taints = [text(taint, "key") for taint in objects(raw, "spec", "taints")]
    notices = [f"taint {key}" for key in taints if key in keys.taints]
    annotations = mapping(raw, "metadata", "annotations")
    notices += [f"annotation {key}" for key in sorted(keys.annotations) if key in annotations]
    cordoned = at(raw, "spec", "unschedulable") is True
    return NodeWarning(notices[0] if notices else "", cordoned) if notices or cordoned else None


def parse_topology(raw: Raw, labels: Sequence[str]) -> tuple[str, ...]:
    """Return a Node's values of these labels, "" for those that it does not have; empty if it has none of them."""
    values = tuple(text(raw, "metadata", "labels", label) for label in labels)
    return values if any(values) else ()

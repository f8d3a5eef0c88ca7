"""What a Node may say about its end: the built-in table, and the rows that apply in this cluster.

A notice of the kind `Ends` announces an end that comes in any case: pods leave at once, whatever their number. One of
the kind `Drains` is a wish of an autoscaler, of maintenance or of a health check. It can be withdrawn, and is no
reason to leave a job with fewer nodes than its budget allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from elasticjob._runtime.contract.names import GROUP

NOTICE_ANNOTATION = f"{GROUP}/terminating"
"""Annotation of a Node, by an administrator or a tool that ends the Node: the pods of jobs leave it."""


class NoticeSource(str, Enum):
    """Where a Node has the notice."""

    TAINT = "taint"
    ANNOTATION = "annotation"
    CONDITION = "condition"
    LABEL = "label"


class NoticeKind(str, Enum):
    """What it means."""

    ENDS = "Ends"
    DRAINS = "Drains"


@dataclass(frozen=True)
class Notice:
    """One row of the table."""

    source: NoticeSource
    key: str
    """Key of the taint, annotation or label, or type of the condition."""
    kind: NoticeKind
    by: str
    """Who sets it, and when."""
    value: str = ""
    """Value of the label or status of the condition; empty: any."""
    seconds: int | None = None
    """How long the Node still runs once it has the taint; None: unknown."""

    @property
    def written(self) -> str:
        """The row as settings list it: the key, with the value if there is one."""
        return f"{self.key}={self.value}" if self.value else self.key


_TAINT, _ANNOTATION, _CONDITION, _LABEL = NoticeSource
_ENDS, _DRAINS = NoticeKind

BUILT_IN = (
    Notice(_TAINT, "ToBeDeletedByClusterAutoscaler", _DRAINS,
           "cluster-autoscaler drains a node that it does not need; it removes the taint if the drain fails"),
    Notice(_TAINT, "aws-node-termination-handler/asg-lifecycle-termination", _ENDS,
           "AWS ends the instance of an Auto Scaling group"),
    Notice(_TAINT, "aws-node-termination-handler/rebalance-recommendation", _DRAINS,
           "AWS sees a higher risk that it interrupts the spot instance"),
    Notice(_TAINT, "aws-node-termination-handler/scheduled-maintenance", _ENDS, "AWS stops or reboots the instance"),
    Notice(_TAINT, "aws-node-termination-handler/spot-itn", _ENDS, "AWS interrupts the spot instance", seconds=120),
    Notice(_TAINT, "cloud.google.com/impending-node-termination", _ENDS, "GKE ends the node"),
    Notice(_TAINT, "karpenter.sh/disrupted", _DRAINS,
           "Karpenter drains a node for consolidation, drift or expiry, and before it deletes the node"),
    Notice(_TAINT, "karpenter.sh/disruption", _DRAINS, "the same, of Karpenter before 1.0"),
    Notice(_TAINT, "node.kubernetes.io/out-of-service", _ENDS, "an administrator says that the node is down for good"),
    Notice(_TAINT, "remediator.kubernetes.azure.com/unschedulable", _ENDS,
           "Azure preempts, moves or deletes the virtual machine"),
    Notice(_ANNOTATION, NOTICE_ANNOTATION, _ENDS, "you, or a tool of yours"),
    Notice(_CONDITION, "DrainInProgress", _DRAINS, "Kubernetes 1.37 (KEP-5683): the node is being drained", "True"),
    Notice(_CONDITION, "GPUMissing", _DRAINS, "node-problem-detector on Azure: a GPU is not found any more", "True"),
    Notice(_CONDITION, "GracefulNodeShutdownInProgress", _ENDS, "Kubernetes 1.37 (KEP-5683): the node shuts down",
           "True"),
    Notice(_CONDITION, "KernelDeadlock", _DRAINS, "node-problem-detector: tasks of the kernel hang", "True"),
    Notice(_CONDITION, "MaintenanceInProgress", _DRAINS, "Kubernetes 1.37 (KEP-5683): maintenance has begun", "True"),
    Notice(_CONDITION, "NVLinkStatusInactive", _DRAINS, "node-problem-detector on Azure: an NVLink is down", "True"),
    Notice(_CONDITION, "ReadonlyFilesystem", _DRAINS, "node-problem-detector: a file system became read-only", "True"),
    Notice(_LABEL, "cloud.google.com/active-node-maintenance", _ENDS, "GKE: maintenance of the host has begun",
           "ONGOING"),
    Notice(_LABEL, "sagemaker.amazonaws.com/node-health-status", _ENDS,
           "HyperPod reboots a node that failed a health check", "UnschedulablePendingReboot"),
    Notice(_LABEL, "sagemaker.amazonaws.com/node-health-status", _ENDS,
           "HyperPod replaces a node that failed a health check", "UnschedulablePendingReplacement"),
)  # fmt: skip


def built_in(source: NoticeSource) -> tuple[str, ...]:
    """Return the built-in rows of this source, as settings list them."""
    return tuple(row.written for row in BUILT_IN if row.source is source)


BUILT_IN_DRAINS = tuple(dict.fromkeys(row.key for row in BUILT_IN if row.kind is NoticeKind.DRAINS))
BUILT_IN_SECONDS = {row.key: row.seconds for row in BUILT_IN if row.seconds is not None}


@dataclass(frozen=True)
class NoticeKeys:
    """The rows that apply in this cluster."""

    taints: frozenset[str]
    annotations: frozenset[str]
    taint_seconds: Mapping[str, float] = field(default_factory=dict)
    """By key of a taint: how long the Node still runs once it has the taint."""
    conditions: frozenset[str] = frozenset()
    """`TYPE=STATUS`, or `TYPE` for `TYPE=True`."""
    labels: frozenset[str] = frozenset()
    """`KEY=VALUE`, or `KEY` for any value."""
    drains: frozenset[str] = frozenset()
    """The keys that announce no certain end. All others do."""

    def kind(self, key: str) -> NoticeKind:
        """Return the kind of a notice with this key."""
        return NoticeKind.DRAINS if key in self.drains else NoticeKind.ENDS

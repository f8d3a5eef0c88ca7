"""Everything that the operator does to a cluster, as a closed union of frozen values.

Object names are derived from the job's state, so that an action that is repeated has no further effect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from elasticjob_operator.model.cluster.evictions import Eviction
from elasticjob_operator.model.observed import Policy


@dataclass(frozen=True)
class CreateSecret:
    """Create the Secret that holds the job's keys."""


@dataclass(frozen=True)
class CreateNodesService:
    """Create the headless Service that gives workers their host names."""


@dataclass(frozen=True)
class CreateStoreService:
    """Create the Service of the store; it selects the store pod of one incarnation."""

    incarnation: int


@dataclass(frozen=True)
class UpdateStoreService:
    """Make the store's Service select the store pod of another incarnation."""

    uid: str
    incarnation: int


@dataclass(frozen=True)
class DeleteService:
    """Delete a Service of the job."""

    name: str
    uid: str


@dataclass(frozen=True)
class CreateGang:
    """Create the object that asks the scheduler to place the job's smallest number of pods together."""


@dataclass(frozen=True)
class ResizeGang:
    """Change the number of pods that the gang object asks for."""

    uid: str
    size: int


@dataclass(frozen=True)
class DeleteGang:
    """Delete the gang object."""

    uid: str


@dataclass(frozen=True)
class CreateWorkload:
    """Create a Workload that asks the job's queue for quota."""

    name: str
    replaces: tuple[str, str] = ("", "")
    """Name and UID of the admitted Workload that this one replaces; empty if it replaces none."""


@dataclass(frozen=True)
class UpdateWorkload:
    """Make a Workload ask for what the job's spec says now."""

    name: str
    uid: str


@dataclass(frozen=True)
class DeleteWorkload:
    """Delete a Workload, and with it its quota and its place in the queue."""

    name: str
    uid: str


@dataclass(frozen=True)
class MarkPodsReady:
    """Report in a Workload that its pods train, or in that of the job that it has too few pods to train."""

    ready: bool = True
    step: str = ""
    """Name of the Workload of a step; empty: that of the job."""


@dataclass(frozen=True)
class ReclaimPods:
    """Give the quota of some pods of an admitted Workload back: the job has shrunk."""

    count: int
    """How many of the pods that the Workload asks for the job does without, for as long as it is admitted."""
    step: str = ""
    """As in `MarkPodsReady`."""


@dataclass(frozen=True)
class ReleaseQuota:
    """Give the quota of an evicted Workload back: its pods have ended. It stays in the queue."""

    step: str = ""
    """As in `MarkPodsReady`."""


@dataclass(frozen=True)
class FinishWorkload:
    """Report in the Workload that the job has ended."""

    succeeded: bool
    message: str


@dataclass(frozen=True)
class CreateStep:
    """Create the Workload of a step, which asks the job's queue for pods above the job's minimum."""

    index: int
    count: int


@dataclass(frozen=True)
class DeactivateStep:
    """Ask Kueue to evict a step that the job cannot use, and not to admit it again."""

    name: str
    uid: str


@dataclass(frozen=True)
class WritePolicy:
    """Create a policy of the job, or change the one with the same UID. The job runs without it if that fails."""

    policy: Policy
    """What it is to be."""


@dataclass(frozen=True)
class DeletePolicy:
    """Delete a policy of the job."""

    policy: Policy


@dataclass(frozen=True)
class DeleteJob:
    """Delete the job itself, and with it all its objects."""

    uid: str
    why: str


@dataclass(frozen=True)
class CreateStore:
    """Create a store pod."""

    name: str
    incarnation: int
    avoid: tuple[str, ...] = ()
    """Nodes on which the pod must not be placed."""


@dataclass(frozen=True)
class CreateStandbyStore:
    """Create the pod of a standby store. The job runs without it if that fails."""

    name: str
    incarnation: int
    avoid: tuple[str, ...] = ()
    """Nodes on which the pod must not be placed."""


@dataclass(frozen=True)
class CreateWorker:
    """Create a worker pod."""

    name: str
    index: int
    incarnation: int
    avoid: tuple[str, ...] = ()
    """Nodes on which the pod must not be placed."""
    outside_gang: bool = False
    """Whether it is not a member of the job's gang; without a gang this says nothing."""


@dataclass(frozen=True)
class DeletePod:
    """Delete a pod. `force` removes the object without the kubelet's confirmation: only where the kubelet is down."""

    name: str
    uid: str
    why: str
    force: bool = False
    grace: int | None = None
    """Seconds from SIGTERM to SIGKILL; None: what the pod says."""


@dataclass(frozen=True)
class AnswerEviction:
    """Report in an Eviction that its pod is about to leave, or with `completed` that it has left."""

    eviction: Eviction
    message: str
    completed: bool = False


StepAction: TypeAlias = CreateStep | DeleteWorkload | DeactivateStep | MarkPodsReady | ReclaimPods | ReleaseQuota
"""What is done about the steps of a job in its queue."""
Action: TypeAlias = (
    CreateSecret
    | CreateNodesService
    | CreateStoreService
    | UpdateStoreService
    | DeleteService
    | CreateGang
    | ResizeGang
    | DeleteGang
    | CreateWorkload
    | UpdateWorkload
    | DeleteWorkload
    | MarkPodsReady
    | ReclaimPods
    | ReleaseQuota
    | FinishWorkload
    | CreateStep
    | DeactivateStep
    | WritePolicy
    | DeletePolicy
    | DeleteJob
    | CreateStore
    | CreateStandbyStore
    | CreateWorker
    | DeletePod
    | AnswerEviction
)


@dataclass(frozen=True)
class EventRecord:
    """A Kubernetes Event. `reason` and `key` make its name: the same reason and key again are the same Event."""

    reason: str
    message: str
    key: str
    warning: bool = False
    repeats: bool = False
    """Whether recording the Event again raises its count."""

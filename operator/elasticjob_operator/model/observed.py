"""A job and all objects around it at one moment: the argument of `plan`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import ClassVar, TypeAlias

from elasticjob._runtime.contract.messages import Report
from elasticjob._runtime.contract.shipped_code import CODE_SHA256
from elasticjob_operator.model.cluster.evictions import Eviction
from elasticjob_operator.model.cluster.nodes import NodeWarning
from elasticjob_operator.model.cluster.pods import Pod
from elasticjob_operator.model.cluster.raw import Raw, integer, mapping, moment, objects, text
from elasticjob_operator.model.cluster.workload import QueueView
from elasticjob_operator.model.job.guarded import guarded_digest, template_digest
from elasticjob_operator.model.job.job_defaults import NO_DEFAULTS, JobDefaults, effective_spec, recorded_defaults
from elasticjob_operator.model.job.spec import JobSpec, read_spec
from elasticjob_operator.model.job.status import Status, parse_status

CONTROLLER = "elasticjob.dev/elasticjob-controller"
"""`spec.managedBy` of the jobs that this operator manages."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
QUEUE_PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
ELASTIC_ANNOTATION = "kueue.x-k8s.io/elastic-job"
"""Annotation of a job, and of its Workloads: Kueue may resize an admitted job."""
STEP_PRIORITY_ANNOTATION = "elasticjob.dev/step-priority-class"
"""Annotation of a job: its pods above `minReplicas` are steps with this WorkloadPriorityClass."""
JobKey: TypeAlias = tuple[str, str]
"""Namespace and name of a job."""


@dataclass(frozen=True)
class Job:
    """An ElasticJob."""

    namespace: str
    name: str
    uid: str
    generation: int
    deleting: bool
    spec: JobSpec | None
    """None only where a caller has none: `parse_job` reads every spec."""
    spec_error: str
    """Why no worker pod can be made from the spec; empty if one can."""
    status: Status
    managed: bool = True
    """Whether this operator manages the job (`spec.managedBy`)."""
    queue: str = ""
    """The Kueue queue that admits the job; empty without one."""
    queue_priority: str = ""
    """The job's WorkloadPriorityClass; empty without one."""
    guarded_digest: str = ""
    """The digest of the fields that may change only while the job is suspended (`guarded`)."""
    template_digest: str = ""
    """The digest of the pod template of a job with a queue; empty without one."""
    queue_elastic: bool = False
    """Whether an admitted job asks the queue for more or less when its size changes. A job with steps does not."""
    step_priority: str = ""
    """The WorkloadPriorityClass of the job's steps in its queue; empty: it has no steps."""
    queue_conflict: bool = False
    """Whether the job has both annotations. Only one of them is allowed."""
    defaults: JobDefaults = NO_DEFAULTS
    """Those that `spec` includes: of the execution if there is one, else `current_defaults`."""
    default_sources: Mapping[str, str] = field(default_factory=dict)
    """The fields of `spec` that the job leaves open and a default sets, and where the default comes from."""
    current_defaults: JobDefaults = NO_DEFAULTS
    """Those of an execution that starts now."""


def parse_job(raw: Raw, current_defaults: JobDefaults = NO_DEFAULTS) -> Job:
    """Return the ElasticJob that the API server returned as `raw`. `current_defaults`: those of its namespace now."""
    recorded = _has_execution(mapping(raw, "status"))
    defaults = recorded_defaults(mapping(raw, "status")) if recorded else current_defaults
    complete, sources = effective_spec(mapping(raw, "spec"), defaults)
    spec, error = read_spec(complete)
    queue = text(raw, "metadata", "labels", QUEUE_LABEL)
    step_priority = text(raw, "metadata", "annotations", STEP_PRIORITY_ANNOTATION) if queue else ""
    resizable = text(raw, "metadata", "annotations", ELASTIC_ANNOTATION) == "true"
    return Job(
        namespace=text(raw, "metadata", "namespace"),
        name=text(raw, "metadata", "name"),
        uid=text(raw, "metadata", "uid"),
        generation=integer(raw, "metadata", "generation"),
        deleting=moment(raw, "metadata", "deletionTimestamp") is not None,
        spec=replace(spec, code=text(raw, "metadata", "annotations", CODE_SHA256)),
        spec_error=error,
        status=parse_status(mapping(raw, "status")),
        managed=text(raw, "spec", "managedBy") in ("", CONTROLLER),
        queue=queue,
        queue_priority=text(raw, "metadata", "labels", QUEUE_PRIORITY_LABEL),
        guarded_digest=guarded_digest(complete),
        template_digest=template_digest(mapping(complete, "template")) if queue else "",
        queue_elastic=resizable and not step_priority,
        step_priority=step_priority,
        queue_conflict=resizable and bool(step_priority),
        defaults=defaults,
        default_sources=sources,
        current_defaults=current_defaults,
    )


def _has_execution(status: Raw) -> bool:
    """Return whether an execution runs or has ended, so that its defaults are in status.

    A suspended job without pods has none: its Workload in a queue already asks for what its next execution will need.
    """
    suspended = any(
        text(c, "type") == "Suspended" and text(c, "status") == "True" for c in objects(status, "conditions")
    )
    pods = integer(status, "replicas") + integer(status, "terminating")
    return "startTime" in status and (pods > 0 or not suspended or "completionTime" in status)


def is_owned(raw: Raw, uid: str) -> bool:
    """Return whether the job of this UID is the object's controller."""
    owners = objects(raw, "metadata", "ownerReferences")
    return any(text(owner, "uid") == uid and owner.get("controller") is True for owner in owners)


class RefusalReason(str, Enum):
    """Why the API server refused to create a child. The values are reasons of the `Running` condition."""

    QUOTA_EXCEEDED = "QuotaExceeded"
    POD_CREATION_FAILED = "PodCreationFailed"
    NAME_TAKEN = "NameTaken"
    INVALID_SPEC = "InvalidSpec"
    """The operator itself can make no worker pod from the spec (`Job.spec_error`)."""


class Remedy(Enum):
    """What makes the API server accept a child that it has refused."""

    WAIT = "wait"
    """Another attempt may succeed, and the message says all that is known."""
    CORRECT_SPEC = "correct the spec"
    """The child itself is wrong: only a change of the job's spec helps."""
    EITHER = "either"
    """An object is missing or a permission, or the spec names the wrong one."""


@dataclass(frozen=True)
class Refusal:
    """A child that was certainly not created: the operator may try the same name again from `retry_at` on."""

    reason: RefusalReason
    message: str
    retry_at: float
    """Unix seconds."""
    since: float
    """When the API server first refused it, Unix seconds."""
    remedy: Remedy = Remedy.WAIT
    skipped: bool = False
    """Whether the operator did not try this child, because the API server refused another one that comes first:
    `reason`, `message` and `remedy` are those of the other one."""


@dataclass(frozen=True)
class Child:
    """A Service or gang object that has the name of a child of the job."""

    uid: str
    ours: bool
    """Whether the job owns the object. If not, the operator neither uses nor changes it."""
    incarnation: int | None = None
    """The store incarnation that a Service selects; None for every other object."""
    terminating: bool = False
    """Whether Kubernetes deletes the object soon: it is being deleted, or its owner was a deleted job of this name."""
    gang_size: int | None = None
    """How many pods a gang object asks the scheduler to place together; None for every other object."""


@dataclass(frozen=True)
class Children:
    """The job's Services and its gang object; None where no object has the name."""

    secret: str = ""
    """The name of a Secret of the job that exists: this operator has created it, or a pod runs that needs it. Empty if
    none is known. The operator may not read Secrets."""
    nodes: Child | None = None
    """The headless Service of the workers."""
    rendezvous: Child | None = None
    """The Service of the store."""
    gang: Child | None = None
    """The object of `spec.gang.provider`. An object of another provider is not read."""
    known: bool = True
    """Whether this operator has read them. If not, status says that they have been created, and nothing is planned for
    them."""

    @property
    def not_ours(self) -> tuple[Child, ...]:
        """The objects that have the name of a child but do not belong to the job."""
        return tuple(c for c in (self.nodes, self.rendezvous, self.gang) if c is not None and not c.ours)


@dataclass(frozen=True)
class DisruptionBudget:
    """The job's PodDisruptionBudget."""

    kind: ClassVar = "PodDisruptionBudget"
    uid: str
    """Empty if it is to be created."""
    min_available: int


@dataclass(frozen=True)
class NetworkPolicy:
    """The job's NetworkPolicy: what it admits besides the job's own pods."""

    kind: ClassVar = "NetworkPolicy"
    uid: str
    """Empty if it is to be created."""
    store_port: int
    operator_namespace: str
    """Pods of operators in this namespace may connect to the port; empty: everything may."""


Policy: TypeAlias = DisruptionBudget | NetworkPolicy


@dataclass(frozen=True)
class Policies:
    """The job's own objects that limit what others do to its pods; None where the job has none."""

    budget: DisruptionBudget | None = None
    network: NetworkPolicy | None = None
    known: bool = True
    """As in `Children`."""


@dataclass(frozen=True)
class LinkView:
    """The state of the control link to the job's store, and what arrived over it."""

    connected: bool = False
    since: float = 0.0
    """Unix seconds. Connected: when the store sent its first report over this link. Not connected: when the operator
    last received anything from the store, or first dialed it."""
    report: Report | None = None
    """The last report. It may be old while the link is not connected, and it may be a previous store's."""
    lost_pods: Mapping[str, float] = field(default_factory=dict)
    """Pods that the coordinator reports as lost, each with the time of the first such report, Unix seconds."""
    previous_report: Report | None = None
    """The last report of the store before this one; None if this operator received none."""
    refused: str = ""
    """Why the store refused the last attempt to connect; empty if it did not refuse it."""


@dataclass(frozen=True)
class ReachedStores:
    """How many stores of all jobs this operator reaches."""

    lost_nodes: int = 0
    """Nodes with a store that does not respond to the operator, and none that does."""
    reached_nodes: int = 0
    """Nodes with a store that responds."""
    replaced: int = 0
    """Stores that the operator replaced within the last seconds because they did not respond."""


def has_retired(pod: Pod, standby_link: LinkView) -> bool:
    """Return whether this store has confirmed that it was never active and never will be."""
    report = standby_link.report
    return report is not None and report.incarnation == pod.incarnation and report.retired


@dataclass(frozen=True)
class Observed:
    """A job, its pods, its children and its control link at one moment."""

    job: Job
    workers: tuple[Pod, ...] = ()
    stores: tuple[Pod, ...] = ()
    children: Children = Children()
    policies: Policies = Policies()
    key_ids: tuple[str, str] = ("", "")
    """What stands for the keys that the operator's master key gives this execution, and the next one
    (`JobKeys.key_id`)."""
    queue: QueueView = field(default_factory=QueueView)
    operator_namespace: str = ""
    """The namespace of this operator's pod; empty if the operator runs in no pod."""
    refusals: Mapping[str, Refusal] = field(default_factory=dict)
    """Keyed by name for pods, by `Kind/name` for other children."""
    withheld: frozenset[str] = frozenset()
    """Names of worker pods that status names and this operator has not created yet: older pods of the index must end
    before, or the job's gang must have its Nodes."""
    terminating_since: float | None = None
    """Since when Services that are being deleted have the names of the children, on this operator's clock, Unix
    seconds; None: none has."""
    link: LinkView = LinkView()
    standby_link: LinkView = LinkView()
    """The link to the standby store, or to one that was retired."""
    standby_store_at: float = 0.0
    """When a store pod newer than the one that status names last existed without having confirmed its retirement, Unix
    seconds. An operator that has seen none counts from its own first reconcile of the job."""
    store_named_at: float = 0.0
    """When this operator first read a status that names the present store, Unix seconds."""
    older_store_at: float = 0.0
    """When a store pod with a successor last existed, to this operator's knowledge, Unix seconds. An operator that has
    seen none counts from its own first reconcile of the job."""
    leases: Mapping[str, float] = field(default_factory=dict)
    """Keyed by node: since when its kubelet's lease is the same, Unix seconds: now less the seconds from the operator's
    first to its last read of it; 0 if the node has no lease. Only nodes whose state is in doubt are listed."""
    returned_nodes: frozenset[str] = frozenset()
    """Nodes avoided as lost whose kubelet has renewed its lease since."""
    lease_reads: Mapping[str, float] = field(default_factory=dict)
    """Keyed by nodes that status avoids as lost: when to read their lease again, Unix seconds."""
    start_warning_reads: tuple[float, ...] = ()
    """When to read Events about pods that do not start, Unix seconds."""
    start_failure_seen: float | None = None
    """When this operator first read the present `status.failedStarts`, Unix seconds; None: no start has failed. Another
    operator, on another host, may have written `status.lastStartFailureTime`."""
    back_off_seen: float | None = None
    """When this operator first read the present `status.backOff`, Unix seconds; None: there is none."""
    warnings: Mapping[str, NodeWarning] = field(default_factory=dict)
    """Warnings of `node_names`, by name of the Node."""
    topologies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Where `node_names` are (`parse_topology`), by name of the Node, as far as it is known."""
    nodes_watched: bool | None = False
    """Whether the operator watches the warnings of Nodes; None: it does not know yet whether it may."""
    evictions: tuple[Eviction, ...] = ()
    """Those of the job's worker pods, of those that are gone too, for which it is the operator's turn."""
    reach: ReachedStores = ReachedStores()
    unreadable: tuple[str, ...] = ()
    """Why Workloads of the job are missing here, and pods are reduced (`unreadable.parse_or_skip`)."""
    end_seen: float | None = None
    """When this operator first saw a worker pod whose termination message declares the outcome, Unix seconds; None:
    there is none."""
    outcome_seen: float | None = None
    """When this operator first read a status that declares the outcome, Unix seconds; None: status declares none."""

    @property
    def node_names(self) -> frozenset[str]:
        """The nodes that pods of the job are on, or must not be on."""
        pods = (*self.workers, *self.stores)
        return frozenset(name for pod in pods for name in (pod.node, *pod.avoided_nodes) if name)

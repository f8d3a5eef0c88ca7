"""One job and everything around it at one moment: the argument of `plan`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from elasticjob.contract.messages import Report
from elasticjob_operator.model.pods import Pod
from elasticjob_operator.model.raw import Raw, integer, mapping, moment, text
from elasticjob_operator.model.spec import JobSpec, SpecError, parse_spec
from elasticjob_operator.model.status import Status, parse_status


@dataclass(frozen=True)
class Job:
    """`spec` is None when it cannot be run; `spec_error` says why."""

    namespace: str
    name: str
    uid: str
    generation: int
    deleting: bool
    spec: JobSpec | None
    spec_error: str
    status: Status


def parse_job(raw: Raw) -> Job:
    """An ElasticJob as the API server gave it."""
    spec, error = None, ""
    try:
        spec = parse_spec(mapping(raw, "spec"))
    except SpecError as wrong:
        error = str(wrong)
    return Job(
        namespace=text(raw, "metadata", "namespace"),
        name=text(raw, "metadata", "name"),
        uid=text(raw, "metadata", "uid"),
        generation=integer(raw, "metadata", "generation"),
        deleting=moment(raw, "metadata", "deletionTimestamp") is not None,
        spec=spec,
        spec_error=error,
        status=parse_status(mapping(raw, "status")),
    )


class RefusalReason(str, Enum):
    """Why the API server did not make a child. Reasons of the `Running` condition."""

    QUOTA_EXCEEDED = "QuotaExceeded"
    POD_CREATION_FAILED = "PodCreationFailed"
    NAME_TAKEN = "NameTaken"


@dataclass(frozen=True)
class Refusal:
    """A child that certainly was not made: the same name may be tried again from `retry_at` on."""

    reason: RefusalReason
    message: str
    retry_at: float


@dataclass(frozen=True)
class Child:
    """A Service or Secret of the job; `ours` is False when the name belongs to somebody else's object."""

    uid: str
    ours: bool
    incarnation: int | None = None
    """The store incarnation that a Service selects."""


@dataclass(frozen=True)
class Children:
    """None: there is no such object."""

    secret: Child | None = None
    nodes: Child | None = None
    """The headless Service of the workers."""
    rendezvous: Child | None = None
    """The Service of the store."""


@dataclass(frozen=True)
class LinkView:
    """What the control link to the job's store gives. `report` may be old when not `connected`."""

    connected: bool = False
    since: float = 0.0
    """When it was connected, or the peer last heard of, or first tried."""
    report: Report | None = None
    lost_pods: Mapping[str, float] = field(default_factory=dict)
    """Pods that the coordinator has lost, and since when."""
    previous_report: Report | None = None
    """The last report of the store before this one; None where this operator had none."""


@dataclass(frozen=True)
class Observed:
    job: Job
    workers: tuple[Pod, ...] = ()
    stores: tuple[Pod, ...] = ()
    children: Children = Children()
    refusals: Mapping[str, Refusal] = field(default_factory=dict)
    """By name for pods, by `Kind/name` for the rest."""
    link: LinkView = LinkView()
    older_store_at: float = 0.0
    """When a store that has a successor was last there, as far as this operator can know."""
    leases: Mapping[str, float] = field(default_factory=dict)
    """By node, when its kubelet last renewed its lease; 0 where it has none. Only of nodes in doubt."""

"""The operator of `rounds_world`: the product's `plan`, with a model of its memory, its link and the pods it sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from elasticjob._runtime.contract.messages import OperatorView, Outcome, Report
from elasticjob._runtime.contract.names import ExitCode
from elasticjob_operator.manifests.names import store_pod
from elasticjob_operator.model.cluster.nodes import NodeWarning
from elasticjob_operator.model.cluster.pods import Pod, TrainerEnd
from elasticjob_operator.model.job.spec import JobSpec, parse_spec
from elasticjob_operator.model.job.status import Status, parse_status
from elasticjob_operator.model.observed import Child, Children, Job, LinkView, Observed, Refusal, RefusalReason
from elasticjob_operator.plan import Plan, plan
from elasticjob_operator.plan.context import STORE_GRACE_SECONDS
from support.rendezvous.rounds_agent import Agent
from support.rendezvous.rounds_options import JobOptions

MIN = 2
GRACE = 30.0
"""Seconds of a pod's grace period."""
NEVER = 1e9
"""Seconds until the API server is asked again for a pod for which there is no room."""
SKEW = 5000.0
"""Seconds by which the operator's clock is ahead of the stores' when it tells them when a machine ends."""
_EXITS = {Outcome.SUCCEEDED: ExitCode.SUCCEEDED, Outcome.FAILED: ExitCode.FAILED, Outcome.LEFT: ExitCode.LEFT,
          Outcome.SUPERSEDED: ExitCode.SUPERSEDED, Outcome.ERROR: ExitCode.INTERNAL}  # fmt: skip


@dataclass(frozen=True)
class StorePod:
    """What the API server and the kubelets report of a store's pod."""

    incarnation: int
    node: str
    created: float
    deleting: bool = False


@dataclass(frozen=True)
class Operator:
    """The job's status, and what the operator's process remembers of the job."""

    status: Mapping[str, Any] = field(default_factory=dict)
    down: bool = False
    inputs: object = None
    """What the last reconcile was based on."""
    requeue_at: float | None = None
    linked: int | None = None
    """The incarnation of the store that it is connected to."""
    address: int | None = None
    """The incarnation of the store that it dials."""
    silent_since: float | None = None
    """Since when the store that it dials does not answer; None while it does."""
    since: float = 0.0
    """When the link was connected, or was lost."""
    report: Report | None = None
    """The last report."""
    previous_report: Report | None = None
    """The last report of the store before."""
    lost_pods: tuple[tuple[str, float], ...] = ()
    older_store_at: float = 0.0
    store_named: tuple[int | None, float] = (None, 0.0)
    """The store that status names, as last read, and when that was first read."""
    standby_store_at: float | None = None
    standby_address: int | None = None
    """The incarnation of the standby store that it dials, or of one that is retired."""
    standby_since: float = 0.0
    standby_report: Report | None = None
    standby_sent: OperatorView | None = None
    """The last view that it sent over the link to that store."""
    standby_linked: bool = False
    refusals: tuple[str, ...] = ()
    """Pods that the API server does not create: there is no room for them."""
    service: int | None = None
    """The incarnation that the Service selects."""
    services: bool = True
    """Whether the job's Services exist."""
    sequence: int = 0
    sent: OperatorView | None = None
    """The last view that it sent over the present link."""
    before: OperatorView | None = None
    """The view that it sent before that one, to whichever store."""

    @property
    def parsed(self) -> Status:
        return _parsed(ById(self.status))


class ById:
    """A value that a cache compares by identity."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and self.value is other.value


@lru_cache(maxsize=2000)
def _parsed(status: ById) -> Status:
    return parse_status(status.value)


def restarted(operator: Operator, now: float) -> Operator:
    """Return the operator after a restart: only the job's status is left."""
    return Operator(
        operator.status, older_store_at=now, standby_store_at=now, since=now, standby_since=now,
        service=operator.service, services=operator.services, sequence=operator.sequence,
    )  # fmt: skip


@lru_cache(maxsize=256)
def job_spec(
    target: int, maximum: int, spares: int, budget: int, backoff: int, options: JobOptions, code: str
) -> JobSpec:
    """Return the parsed spec of the job, with the digest of its code that an annotation has."""
    template = {"spec": {"containers": [{"name": "main", "image": "user:1", "command": ["python", "train.py"]}]}}
    policy = {"minReplicas": MIN, "maxReplicas": maximum, "spares": spares}
    failures = {"maxRestarts": budget, "backoffSeconds": backoff}
    spec = options.apply({"replicas": target, "elasticPolicy": policy, "failurePolicy": failures})
    # No rule of rounds depends on policies, so the simulation has none.
    spec |= {"template": template, "disruptionBudget": False, "networkIsolation": False}
    return replace(parse_spec(spec), code=code)


def worker_pods(agents: Sequence[Agent], now: float) -> tuple[Pod, ...]:
    """Return the worker pods as the API server lists them."""
    pods = (_worker_pod(a) for a in agents)
    return tuple(sorted(pods, key=lambda p: (p.index, p.incarnation)))


@lru_cache(maxsize=4096)
def _pod(
    name: str, index: int, incarnation: int, node: str, created: float, ended_at: float, deleting: bool,
    end: TrainerEnd | None,
) -> Pod:  # fmt: skip
    phase = "Running" if end is None else "Failed"
    return Pod(
        name, f"uid-{name}", index, incarnation, phase, node, f"10.0.0.{index}", ready=end is None, seen=created,
        deleting=created + GRACE if deleting else None, end=end,
    )  # fmt: skip


def _worker_pod(a: Agent) -> Pod:
    end, last = None, a.start.round if a.start and a.machine.launched else None
    if a.crashed:
        end = TrainerEnd(137, "OOMKilled", "", a.ended_at, round=last)
    elif a.ended is not None:
        end = TrainerEnd(int(_EXITS[a.ended]), "Error", "", a.ended_at, a.termination, round=last)
    return _pod(a.pod, a.index, a.incarnation, node_of(a), a.created, a.ended_at, a.deleting, end)


def node_of(a: Agent) -> str:
    """Return the Kubernetes node: each pod has its own."""
    return f"node-{a.number}"


def block_of(a: Agent) -> str:
    """Return the block of the Kubernetes node: pods whose numbers follow each other are in different ones."""
    return f"block-{a.number % 2}"


def reconcile(
    operator: Operator, spec: JobSpec, agents: Sequence[Agent], stores: Sequence[StorePod],
    leases: Mapping[str, float], ends: Sequence[tuple[str, float]], now: float,
) -> Plan:  # fmt: skip
    """Return the product's plan for the job as the operator sees it."""
    job = Job("ns", "bert", "uid", 1, deleting=False, spec=spec, spec_error="", status=operator.parsed)
    connected = operator.linked is not None and operator.linked == operator.address
    link = LinkView(connected, operator.since, operator.report, dict(operator.lost_pods), operator.previous_report)
    nodes = Child("n", True) if operator.services else None
    refused = {name: Refusal(RefusalReason.QUOTA_EXCEEDED, "no room", now + NEVER, now) for name in operator.refusals}
    children = Children("bert-rdzv", nodes, _service(operator))
    observed = Observed(
        job, worker_pods(agents, now), tuple(_store_pod(s) for s in stores), children, link=link,
        standby_link=LinkView(operator.standby_linked, operator.standby_since, operator.standby_report),
        standby_store_at=operator.standby_store_at or 0.0, store_named_at=operator.store_named[1],
        older_store_at=operator.older_store_at, leases=leases, refusals=refused,
        topologies={node_of(a): (block_of(a),) for a in agents}, nodes_watched=True,
        warnings={node: NodeWarning("taint spot", ends=(("taint spot", end + SKEW),)) for node, end in ends},
    )  # fmt: skip
    return plan(observed, "elasticjob:test", now)


def numbered(operator: Operator, view: OperatorView, now: float) -> OperatorView:
    """Return the view as the operator's link sends it."""
    return replace(view, lease=1, sequence=operator.sequence + 1, sent_at=now + SKEW)


def _service(operator: Operator) -> Child | None:
    return None if operator.service is None or not operator.services else Child("r", True, operator.service)


def _store_pod(s: StorePod) -> Pod:
    name = store_pod("bert", s.incarnation)
    return Pod(
        name, f"uid-{name}", 0, s.incarnation, "Running", s.node, "10.0.1.1", ready=True, seen=s.created,
        deleting=s.created + STORE_GRACE_SECONDS if s.deleting else None,
    )  # fmt: skip


def with_report(operator: Operator, report: Report, now: float) -> Operator:
    """Return the operator after the report of the store that it is connected to."""
    known = dict(operator.lost_pods)
    lost = tuple((pod, known.get(pod, now)) for pod in report.lost_pods)
    return replace(operator, report=report, lost_pods=lost)


def connected(operator: Operator, incarnation: int, now: float) -> Operator:
    """Return the operator once it is connected to a store."""
    previous = operator.previous_report
    if operator.report is not None and operator.report.incarnation != incarnation:
        previous = operator.report
    return replace(
        operator, linked=incarnation, address=incarnation, silent_since=None, since=now, previous_report=previous,
        report=None if operator.report is None or operator.report.incarnation != incarnation else operator.report,
        lost_pods=(), sent=None,
    )  # fmt: skip


def promoted(operator: Operator, now: float) -> Operator:
    """Return the operator once the standby store, with its link, has become the store."""
    return replace(
        operator, linked=operator.standby_address, address=operator.standby_address, silent_since=None, since=now,
        previous_report=operator.report, report=operator.standby_report, lost_pods=(), sent=operator.standby_sent,
        standby_address=None, standby_report=None, standby_sent=None, standby_linked=False,
    )  # fmt: skip


def with_standby_link(operator: Operator, report: Report | None, now: float) -> Operator:
    """Return the operator with the last report of the standby store; None: it is not connected to it."""
    if report is None:
        lost = replace(operator, standby_linked=False, standby_since=now, standby_sent=None)
        return lost if operator.standby_linked else operator
    since = operator.standby_since if operator.standby_linked else now
    return replace(operator, standby_linked=True, standby_since=since, standby_report=report)


def disconnected(operator: Operator, now: float) -> Operator:
    """Return the operator once its link is lost."""
    return replace(operator, linked=None, since=now, sent=None)

"""The inputs of one reconcile, the actions that the parts of a plan add up to, and a helper for messages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import count, groupby, islice

from elasticjob._runtime.contract.messages import AgentReport, Report, RoundEnded
from elasticjob_operator.actions import Action, EventRecord
from elasticjob_operator.backoff import growing_interval
from elasticjob_operator.model.cluster.evictions import Eviction
from elasticjob_operator.model.cluster.pods import Pod
from elasticjob_operator.model.job.spec import JobSpec
from elasticjob_operator.model.job.status import Status
from elasticjob_operator.model.observed import Job, Observed

LOST_GRACE_SECONDS = 3.0
"""Seconds between the loss of an agent and the loss of its pod: in this time the kubelet may report more, for example
that the container ended."""
LEASE_LATE_SECONDS = 15.0
"""Seconds without a lease renewal after which a kubelet counts as down if a second sign agrees. Kubelets renew their
lease every 10 s."""
LEASE_STALE_SECONDS = 40.0
"""Seconds without a lease renewal after which Kubernetes itself marks the node NotReady."""
POLL_SECONDS = 5.0
"""Seconds between two reconciles of a job that waits for what the operator does not watch, such as kubelets' leases."""
LONGEST_POLL_SECONDS = 120.0
"""The same once the job has waited for long."""
STORE_UNRESPONSIVE_SECONDS = 2.0
"""Seconds without contact after which the operator may replace a store. A container that restarts in place is back by
then, or its kubelet has reported it as not ready."""
STORE_LEFT_SECONDS = 0.25
"""The same if agents have moved from the store to its standby store, which then takes over."""
STORE_GRACE_SECONDS = 5
"""Seconds that a store has to end which is not the job's store any more. Only the job's store ends with the grace of
the workers, for which it serves."""
LAST_REPORT_SECONDS = 17.0
"""Seconds for which a job's end that pods declare waits for the report of its store, which knows the restarts too. An
attempt to connect begins within 6 s of the last one's end, and may take 10 s (`store_links`)."""
AGENTS_SWITCH_SECONDS = 4.0
"""Seconds after the end of a store within which its agents connect to the next one: their first attempt may still go to
the old one."""


@dataclass(frozen=True)
class ReconcileContext:
    """The inputs of one reconcile: the observed objects, the job's valid spec, and the time in Unix seconds."""

    observed: Observed
    spec: JobSpec
    now: float
    vacant: frozenset[int] = frozenset()
    """Indices below the highest one that have no pod, because the job has shrunk (`indices`)."""
    withdrawn: frozenset[int] = frozenset()
    """Indices that have no pod for now, because the cluster has no room (`capacity`)."""
    cordon_spares: int = 0
    """How many of `spec.spares` the job has for pods on cordoned nodes (`cordons`)."""

    @property
    def job(self) -> Job:
        return self.observed.job

    @property
    def status(self) -> Status:
        return self.observed.job.status

    @cached_property
    def report(self) -> Report | None:
        """The last report of the store that status names; None if this operator has received none from it."""
        report = self.observed.link.report
        if report is None or report.incarnation != self.status.store_incarnation:
            return None
        return report

    @cached_property
    def new_rounds(self) -> tuple[RoundEnded, ...]:
        """The ended rounds that status does not include yet, the oldest first."""
        charged = self.status.charged_round
        ended = self.report.ended_rounds if self.report else ()
        return tuple(sorted((e for e in ended if charged is None or e.round > charged), key=lambda e: e.round))

    @cached_property
    def last_indices(self) -> frozenset[int]:
        """The indices that the job was to have at the last status write, those of withdrawn pods included."""
        known, withdrawn = range(len(self.status.incarnations)), self.status.withdrawn
        if self.status.target is None:
            return frozenset(known)
        number = max(0, self.status.target + len(self.status.spares))
        left_out = self.status.vacant | withdrawn
        return frozenset([index for index in known if index not in left_out][:number]) | withdrawn

    @cached_property
    def all_indices(self) -> tuple[int, ...]:
        """The indices of the job, in order, those of withdrawn pods included."""
        return tuple(islice((i for i in count() if i not in self.vacant), self.spec.settings.desired_pods))

    @cached_property
    def indices(self) -> tuple[int, ...]:
        """The indices that should have a pod now."""
        return tuple(i for i in self.all_indices if i not in self.withdrawn)

    @cached_property
    def index_set(self) -> frozenset[int]:
        """The same as a set."""
        return frozenset(self.indices)

    @cached_property
    def reported_agents(self) -> dict[str, AgentReport]:
        """The agents in the store's last report, by pod name; empty if it has not reported."""
        return {agent.pod: agent for agent in (self.report.nodes if self.report else ())}

    @cached_property
    def current_pods(self) -> tuple[Pod, ...]:
        """The existing worker pods that status names: one for each index that the job should have."""
        known = self.status.incarnations
        current = {(index, known[index]) for index in self.indices if index < len(known)}
        return tuple(p for p in self.observed.workers if (p.index, p.incarnation) in current)

    @cached_property
    def ready_pods(self) -> frozenset[str]:
        """Names of the worker pods that train or could start at once; empty if the store has not reported."""
        agents = self.report.nodes if self.report else ()
        return frozenset(agent.pod for agent in agents if agent.ready or agent.member)

    @cached_property
    def workers_by_index(self) -> dict[int, tuple[Pod, ...]]:
        """The existing worker pods of each index that has any, old ones included, by incarnation."""
        pods = sorted(self.observed.workers, key=lambda p: (p.index, p.incarnation))
        return {index: tuple(of_index) for index, of_index in groupby(pods, key=lambda p: p.index)}

    @cached_property
    def newer_stores(self) -> tuple[Pod, ...]:
        """The live store pods that are newer than the one that status names: the standby store, and retired ones."""
        current = self.status.store_incarnation
        return tuple(p for p in self.observed.stores if current is not None and p.incarnation > current and not p.end)

    @cached_property
    def newer_store(self) -> Pod | None:
        """The newest of them that serves: the one to which the standby link goes; None without one."""
        serving = [p for p in self.newer_stores if p.phase == "Running" and p.ip]
        return max(serving, key=lambda p: p.incarnation, default=None)

    @cached_property
    def standby_report(self) -> Report | None:
        """The last report of `newer_store`; None if this operator has received none from it."""
        report, pod = self.observed.standby_link.report, self.newer_store
        return report if report is not None and pod is not None and report.incarnation == pod.incarnation else None

    @cached_property
    def report_due(self) -> float:
        """Until when an outcome that pods declare waits for the report of the store, Unix seconds; 0: it does not."""
        seen, link, store = self.observed.end_seen, self.observed.link, self.store_pod(self.status.store_incarnation)
        if seen is None or link.connected or link.refused or store is None or not store.live:
            return 0.0
        # The link is down since now for as long as its first attempt waits for its turn.
        return 0.0 if self.lease_late(store.node) else max(seen, link.since) + LAST_REPORT_SECONDS

    @cached_property
    def notices(self) -> dict[str, str]:
        """By name, what announces the end of a Node that pods of the job are on or must not be on."""
        return {name: warning.notice for name, warning in self.observed.warnings.items() if warning.notice}

    @cached_property
    def drains(self) -> dict[str, str]:
        """The same for what asks for a drain that may be withdrawn."""
        return {name: warning.drain for name, warning in self.observed.warnings.items() if warning.drain}

    @cached_property
    def nodes_to_leave(self) -> dict[str, str]:
        """By name, both: the Nodes that pods of the job are to leave, and on which no new one may be placed."""
        return {**self.drains, **self.notices}

    def must_leave(self, pod: Pod) -> bool:
        """Return whether the end of the pod's node is announced.

        A pod that was placed there although it must not be stays: its successor would be placed there too.
        """
        return pod.live and pod.node in self.notices and pod.node not in pod.avoided_nodes

    def should_leave(self, pod: Pod) -> bool:
        """Return whether it must leave, or leaves as soon as the job can do without it."""
        return pod.live and pod.node in self.nodes_to_leave and pod.node not in pod.avoided_nodes

    @cached_property
    def evictions(self) -> dict[str, Eviction]:
        """By UID of a pod: the Eviction that asks it to leave."""
        return {eviction.pod_uid: eviction for eviction in self.observed.evictions}

    def may_create(self, child: str) -> bool:
        """Return whether the API server has not refused this child, or its next try is due."""
        refusal = self.observed.refusals.get(child)
        return refusal is None or self.now >= refusal.retry_at

    def store_pod(self, incarnation: int | None) -> Pod | None:
        """Return the store pod of this incarnation, or None."""
        return next((p for p in self.observed.stores if p.incarnation == incarnation), None)

    def node_of(self, pod: str) -> str:
        """Return the node of the worker pod of this name; empty if there is no such pod or it is not scheduled."""
        return next((p.node for p in self.observed.workers if p.name == pod), "")

    def lease_age(self, node: str) -> float | None:
        """Return for how many seconds the operator has read the same lease of the node's kubelet; None if it has not
        read it. The kubelet's last renewal is at least as old."""
        since = self.observed.leases.get(node)
        return None if since is None else self.now - since

    def lease_late(self, node: str) -> bool:
        """Return whether the node's lease is late: together with a second sign, its kubelet counts as down."""
        age = self.lease_age(node)
        return age is not None and age >= LEASE_LATE_SECONDS

    def kubelet_down(self, node: str) -> bool:
        """Return whether Kubernetes marks the node NotReady: its kubelet neither ends pods nor counts their grace."""
        age = self.lease_age(node)
        return age is not None and age >= LEASE_STALE_SECONDS


def poll_interval(waited: float) -> float:
    """Return the seconds until the next reconcile of a job that has waited for `waited` seconds."""
    return growing_interval(waited, POLL_SECONDS, LONGEST_POLL_SECONDS)


@dataclass(frozen=True)
class Actions:
    """What one part of the plan wants done; `+` combines parts."""

    actions: tuple[Action, ...] = ()
    event_records: tuple[EventRecord, ...] = ()
    requeue_at: tuple[float, ...] = ()
    """Times at which the job must be reconciled again, Unix seconds."""

    def __add__(self, other: Actions) -> Actions:
        return Actions(
            self.actions + other.actions, self.event_records + other.event_records, self.requeue_at + other.requeue_at
        )

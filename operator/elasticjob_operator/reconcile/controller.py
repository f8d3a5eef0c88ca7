"""Reconcile one job: observe, plan, write status, update the store, act, record Events. In this order.

A reconcile begins with what the watches delivered. Most find nothing to do, or only something that is harmless by a
late view (`plan.staleness`), and read nothing.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from elasticjob._runtime.contract.messages import RestartStrategy
from elasticjob._runtime.contract.text import with_noun
from elasticjob_operator import metrics
from elasticjob_operator.actions import CreateStandbyStore, CreateStore, CreateWorker, EventRecord
from elasticjob_operator.kube import JOBS, Conflict, KubeApi, KubeError, NotFound
from elasticjob_operator.links.store_links import StoreLinks
from elasticjob_operator.links.store_reachability import StoreReachability
from elasticjob_operator.manifests.names import attempt
from elasticjob_operator.manifests.placement import HOSTNAME
from elasticjob_operator.manifests.services import OPERATOR_KEY
from elasticjob_operator.model.cluster.raw import Raw, text
from elasticjob_operator.model.cluster.workload import queue_view
from elasticjob_operator.model.job.job_defaults import NO_DEFAULTS, JobDefaults
from elasticjob_operator.model.job.status import ConditionType
from elasticjob_operator.model.observed import Job, JobKey, Observed, parse_job
from elasticjob_operator.observation.children import children_of
from elasticjob_operator.observation.job_memory import READ_SECONDS, JobMemory
from elasticjob_operator.observation.observe import fetch_job, observe, observe_watched
from elasticjob_operator.plan import SHORTEST_REQUEUE, Plan, needs_fresh_read, plan
from elasticjob_operator.plan.pods.start_problems import describe_refusal
from elasticjob_operator.reconcile import job_metrics
from elasticjob_operator.reconcile.action_executor import ActionExecutor
from elasticjob_operator.reconcile.events import Recorder
from elasticjob_operator.reconcile.failed_reconcile import FailedReconciles, failed_reconcile_of, shown_failure
from elasticjob_operator.reconcile.keys import JobKeys
from elasticjob_operator.watch.node_leases import NodeLeases
from elasticjob_operator.watch.watch_cache import WatchCache

log = logging.getLogger(__name__)

CONFLICT_DELAY = 0.05
"""Seconds until the next reconcile after a status write met a newer resourceVersion."""
FIRST_READ_SECONDS = (300.0, 900.0)
"""When a restarted operator reads a job that needs nothing, seconds after its start: not all jobs at once."""

_MAX_USED_NAMES = 10_000


@dataclass
class Controller:
    """Reconciles jobs. The work queue calls `reconcile` for several keys at a time, never twice for one key."""

    api: KubeApi
    keys: JobKeys
    links: StoreLinks
    recorder: Recorder
    image: str
    resync: float = 300.0
    clock: Callable[[], float] = time.time
    watched: WatchCache = field(default_factory=WatchCache)
    operator_namespace: str = ""
    """The namespace of this operator's pod; empty if it runs in no pod."""
    placement_label: str = HOSTNAME
    """The label of Nodes within whose values `spec.placement` packs pods, or between which it spreads them."""
    defaults: Callable[[str], JobDefaults] = lambda namespace: NO_DEFAULTS
    """Returns the platform's defaults for jobs of a namespace that start now."""
    label_namespaces: bool = False
    """Whether metrics about jobs have their namespace as a label."""
    _leases: NodeLeases = field(init=False)
    _failed: FailedReconciles = field(init=False)
    _reachability: StoreReachability = field(default_factory=StoreReachability)
    _memories: dict[JobKey, JobMemory] = field(default_factory=dict)
    _phases: dict[JobKey, str] = field(default_factory=dict)
    _deleted_jobs: set[JobKey] = field(default_factory=set)
    """Names of jobs that have been deleted: Kubernetes may still delete objects that have the names of children."""

    def __post_init__(self) -> None:
        self._leases = NodeLeases(self.clock)
        self._failed = FailedReconciles(self.api, self.recorder, self.clock)

    async def reconcile(self, key: JobKey) -> float | None:
        """Bring one job nearer to its spec; return seconds until the next reconcile, None where the job is deleted."""
        with metrics.reconcile_seconds.time(), metrics.reconcile_errors.count_exceptions():
            try:
                delay = await self._reconcile(key)
            except Exception as error:
                await self._show_failure(key, error)
                raise
            raw = self.watched.job(key)
            if raw is not None and shown_failure(raw) is not None:
                self._record_written(await self._failed.clear(raw))
            return delay

    async def _show_failure(self, key: JobKey, error: Exception) -> None:
        """Show in the job why its reconcile failed. What goes wrong here is only logged: the error itself counts."""
        failure = failed_reconcile_of(error)
        if failure is None:
            return
        try:
            raw = self.watched.job(key) or await fetch_job(self.api, *key)
            if raw is not None:
                self._record_written(await self._failed.show(raw, failure))
                self.watched.know_job(key)
        except Exception as other:
            log.warning("%s: its failure cannot be shown in its status: %s: %s", key, type(other).__name__, other)

    def _record_written(self, written: Raw | None) -> None:
        if written is not None:
            self.watched.record_job(written)

    async def _reconcile(self, key: JobKey) -> float | None:
        watched = await self._observe_watched(key)
        if watched is not None:
            raw, observed, memory = watched
            decided = self._plan(key, observed)
            queued = bool(observed.job.queue or self.watched.workloads(memory.uid))
            wait = self._delay_of_minor_write(decided, memory)
            if not (queued or needs_fresh_read(decided, observed)) or self._nothing_to_do(decided, wait, memory):
                return await self._apply_plan(key, raw, observed, decided, memory)
        fetched = await fetch_job(self.api, *key)
        if fetched is None:
            self._forget(key)
            return None
        raw, memory = fetched, self._memory(key, text(fetched, "metadata", "uid"))
        self.watched.record_job(raw)
        memory.read_at, now = None, self.clock()
        links = self.links.view(key), self.links.standby_view(key)
        workloads = self.watched.workloads(memory.uid)
        queued, stepped = bool(workloads), any(w is not None and w.step is not None for w in workloads)
        observed = await observe(
            self.api, raw, memory, self._leases, *links, self.clock(), queued=queued, stepped=stepped,
            current_defaults=self.defaults(key[0]), see_pod=self.watched.record_pod,
        )  # fmt: skip
        # Not after a read that failed, nor while the names of children are taken: then the next reconcile reads again.
        memory.read_at = now if memory.children is not None else None
        return await self._apply_plan(key, raw, observed, self._plan(key, observed), memory)

    async def _observe_watched(self, key: JobKey) -> tuple[dict[str, Any], Observed, JobMemory] | None:
        """Return the job, all that the watches delivered of it, and its memory; None where it must be read."""
        raw, memory, now = self.watched.job(key), self._memories.get(key), self.clock()
        if raw is None:
            return None
        defaults = self.defaults(key[0])
        job = (memory.parsed_as(raw, defaults) if memory else None) or parse_job(raw, defaults)
        if memory is None:
            memory = self._first_memory(key, job, now)
        if memory is None or memory.uid != job.uid or memory.read_at is None:
            return None
        memory.parsed = raw, defaults, job
        ended = job.status.terminal and memory.children is not None
        if not ended and now >= memory.read_at + READ_SECONDS:
            return None
        links = self.links.view(key), self.links.standby_view(key)
        pods = self.watched.pods(memory.uid)
        observed = await observe_watched(self.api, job, pods, memory, self._leases, *links, now)
        if observed is None:
            return None
        return raw, replace(observed, queue=queue_view(self.watched.workloads(job.uid))), memory

    def _first_memory(self, key: JobKey, job: Job, now: float) -> JobMemory | None:
        """Return the memory of a job that this operator reconciles for the first time; None where it must be read."""
        if key in self._deleted_jobs:
            return None
        if not job.status.raw:
            memory = self._memory(key, job.uid)
            memory.begin(now, children_of(job))
            return memory
        # A job that has not trained yet may miss policies that only a read would show.
        runs = job.spec is not None and not job.spec.suspend and job.status.last_round is not None
        settled = not job.status.outcome_declared and not job.status.is_true(ConditionType.SUSPENDED)
        if not self.watched.is_listed(key[0]) or job.queue or not (job.status.terminal or (runs and settled)):
            return None
        memory = self._memory(key, job.uid)
        first, last = FIRST_READ_SECONDS
        memory.adopt(now, random.uniform(first, last))  # noqa: S311 - it spreads requests, nothing more
        return memory

    def _nothing_to_do(self, decided: Plan, wait: float | None, memory: JobMemory) -> bool:
        """Return whether nothing is to be done or sent to stores now. `wait`: as `_delay_of_minor_write` has it."""
        write = decided.status is not None and wait is None
        changed = _sent(decided) != memory.sent or decided.withheld != memory.withheld
        return not (decided.actions or decided.event_records or write or changed)

    async def _apply_plan(
        self, key: JobKey, raw: dict[str, Any], observed: Observed, decided: Plan, memory: JobMemory
    ) -> float | None:
        """Do what the plan says, and return the seconds until the next reconcile; None if the job has been deleted."""
        wait, now = self._delay_of_minor_write(decided, memory), self.clock()
        if self._nothing_to_do(decided, wait, memory):
            return self._next_delay(decided, wait, memory, now)
        if decided.unresponsive_store:
            self._reachability.record_replacement(key, decided.unresponsive_store, now)
        if decided.status is not None and wait is None:
            try:
                await self._write(raw, decided.status, memory)
                memory.write_at = None
            except Conflict:
                # Another client changed the job since it was read. Nothing has been done yet: reconcile again.
                return CONFLICT_DELAY
            except NotFound:
                self._forget(key)
                return None
        written = decided.status if wait is None else None
        memory.withheld = decided.withheld
        self._show_phase(key, text(written or raw.get("status"), "phase"))
        self._update_link(key, observed, decided)
        memory.sent = _sent(decided)
        before = self.clock()
        await self.run_actions(observed, decided, memory)
        return self._next_delay(decided, wait, memory, before)

    def _plan(self, key: JobKey, observed: Observed) -> Plan:
        """Plan with what is known of all stores and Nodes.

        This must not await: otherwise two plans could both count the same lost store.
        """
        now = self.clock()
        self._reachability.record(key, observed, now)
        if not observed.link.connected:
            self._reachability.record_links(lambda other: self.links.view(other).connected)
        known = replace(
            observed,
            reach=self._reachability.reach(now),
            key_ids=self._key_ids(observed.job),
            warnings=self.watched.warnings(observed.node_names),
            topologies=self.watched.topologies(observed.node_names),
            nodes_watched=self.watched.nodes_watched,
            evictions=self.watched.evictions(key),
            operator_namespace=self.operator_namespace,
            unreadable=self.watched.unreadable(observed.job.uid),
        )
        return plan(known, self.image, now)

    def _key_ids(self, job: Job) -> tuple[str, str]:
        """Return `Observed.key_ids`."""
        present, following = attempt(job), job.status.execution_attempts + 1
        return self.keys.key_id(job.uid, present), self.keys.key_id(job.uid, following)

    def _next_delay(self, decided: Plan, wait: float | None, memory: JobMemory, since: float) -> float:
        """Return the seconds until the next reconcile: for the plan, a minor status change that waits for `wait`
        seconds, or actions that failed at `since` or later."""
        retry_at = memory.next_retry(since)
        retry = None if retry_at is None else max(SHORTEST_REQUEUE, retry_at - self.clock())
        return min(delay for delay in (self.resync, decided.requeue_after, wait, retry) if delay is not None)

    def _delay_of_minor_write(self, decided: Plan, memory: JobMemory) -> float | None:
        """Return the seconds that the plan's status may still wait, because only minor fields of it change.

        None: nothing delays it: it is to be written now, if the plan has one.
        """
        if decided.status is None or not decided.write_delay:
            memory.write_at = None
            return None
        now = self.clock()
        latest = now + decided.write_delay
        memory.write_at = latest if memory.write_at is None else min(memory.write_at, latest)
        wait = memory.write_at - now
        return wait if wait > 0 else None

    async def _write(self, raw: dict[str, Any], status: Any, memory: JobMemory) -> None:
        try:
            body = {**raw, "status": dict(status)}
            written = await self.api.update(JOBS, raw["metadata"]["namespace"], body, "status")
        except KubeError:
            memory.read_at = None  # another client's write, or an own one that may have taken effect
            raise
        self.watched.record_job(written)
        strategy = text(raw, "spec", "restartStrategy") or RestartStrategy.IN_PLACE.value
        namespace = self._namespace_label(text(raw, "metadata", "namespace"))
        job_metrics.count_change(raw.get("status") or {}, status, strategy, namespace)

    def _update_link(self, key: JobKey, observed: Observed, decided: Plan) -> None:
        """Set the link's address and send the operator view.

        Call this after the status write only: charges that the store receives must be persisted.
        """
        address = decided.store_address or decided.standby_address
        operator_key = self._operator_key(observed.job.uid, address.attempt, decided.key_id) if address else b""
        self.links.set_address(key, decided.store_address, operator_key, decided.standby_address)
        if decided.operator_view is not None:
            self.links.set_operator_view(key, decided.operator_view)
        if decided.standby_view is not None:
            self.links.set_standby_view(key, decided.standby_view)

    def _operator_key(self, uid: str, execution: int, key_id: str) -> bytes:
        """Return the key for the stores of an execution. Those with keys of a forgotten master key refuse any key."""
        return (self.keys.of_key_id(uid, execution, key_id) or self.keys).derive(OPERATOR_KEY, uid, execution)

    async def run_actions(self, observed: Observed, decided: Plan, memory: JobMemory) -> None:
        job, now = replace(observed.job, status=replace(observed.job.status, key_id=decided.key_id)), self.clock()
        created: list[str] = []
        if decided.actions and job.spec is not None:
            image = job.status.runtime_image or self.image
            executor = ActionExecutor(
                self.api, self.keys, job, job.spec, image, memory, self.watched, self.clock, decided.failed_starts,
                self.placement_label, decided.operator_view.settings if decided.operator_view else None,
            )  # fmt: skip
            created = await executor.execute(decided.actions)
        wanted = {a.name for a in decided.actions if isinstance(a, (CreateWorker, CreateStore, CreateStandbyStore))}
        for record in (*decided.event_records, *_creation_records(decided, created, memory)):
            # An Event about a pod is recorded only where the pod was created.
            if record.key not in wanted or record.key in created:
                self.recorder.record(job, record, now)

    def _memory(self, key: JobKey, uid: str) -> JobMemory:
        """Return the memory of a job; a job of the same name with another UID starts with an empty one."""
        memory = self._memories.get(key)
        if memory is None or memory.uid != uid:
            if memory is not None:
                self._forget(key)
            memory = self._memories[key] = JobMemory(uid)
        return memory

    def _forget(self, key: JobKey) -> None:
        if len(self._deleted_jobs) >= _MAX_USED_NAMES:
            self._deleted_jobs.clear()
        self._deleted_jobs.add(key)
        self._memories.pop(key, None)
        self.links.forget(key)
        self._reachability.forget(key)
        self._show_phase(key, "")

    def _show_phase(self, key: JobKey, phase: str) -> None:
        before = self._phases.pop(key, "")
        if phase:
            self._phases[key] = phase
        if before != phase:
            namespace = self._namespace_label(key[0])
            if before:
                metrics.jobs.labels(before, namespace).dec()
            if phase:
                metrics.jobs.labels(phase, namespace).inc()

    def _namespace_label(self, namespace: str) -> str:
        return namespace if self.label_namespaces else ""


def _sent(decided: Plan) -> tuple[Any, ...]:
    """Return what a plan sends to the job's stores, and which stores these are."""
    addresses = decided.store_address, decided.standby_address
    return (*addresses, decided.operator_view, decided.standby_view)


def _creation_records(decided: Plan, created: list[str], memory: JobMemory) -> tuple[EventRecord, ...]:
    """Return one Event for all workers that were created, and one for those that the API server refused."""
    workers = [a.name for a in decided.actions if isinstance(a, CreateWorker)]
    done = [name for name in workers if name in created]
    failed = [name for name in workers if name in memory.refusals]
    records = []
    if done:
        more = f" and {len(done) - 5} more" if len(done) > 5 else ""
        message = f"created {with_noun(len(done), 'pod')}: {', '.join(done[:5])}{more}"
        records.append(EventRecord("SuccessfulCreatePod", message, key="created " + ",".join(done)))
    if failed:
        refusal = memory.refusals[failed[0]]
        records.append(
            EventRecord(
                "FailedCreatePod", describe_refusal(refusal), key=refusal.reason.value, warning=True, repeats=True
            )
        )
    return tuple(records)

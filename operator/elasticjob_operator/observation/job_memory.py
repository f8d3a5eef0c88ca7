"""State kept between reconciles of one job. A restarted operator starts without it: it only saves requests and time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from elasticjob_operator.backoff import doubling_delay
from elasticjob_operator.model.cluster.raw import Raw
from elasticjob_operator.model.job.job_defaults import JobDefaults
from elasticjob_operator.model.job.spec import GangProvider
from elasticjob_operator.model.job.status import BackOff
from elasticjob_operator.model.observed import Children, Job, Policies, Refusal, RefusalReason, Remedy
from elasticjob_operator.observation.start_warnings import StartWarnings
from elasticjob_operator.observation.stop_causes import StopCauses
from elasticjob_operator.watch.lost_nodes import LostNodes
from elasticjob_operator.watch.pod_sightings import PodSightings

FIRST_RETRY = 1.0
"""Seconds until the first retry of a refused creation; each further refusal doubles it."""
FIRST_NAME_RETRY = 0.1
"""The same where another object has the name: the next pod gets another name, and a deleted job's objects end soon."""
LONGEST_RETRY = 20.0
READ_SECONDS = 3600.0
"""Seconds after which a job is read from the API server although nothing is to be done by the watches: Services are not
watched. Nodes that do not find them any more lose their links, and that is noticed at once."""
LONGEST_OPTIONAL_RETRY = 300.0
"""The same for a standby store and for policies, without which the job runs as well."""


@dataclass
class JobMemory:
    """State kept between reconciles of one job, keyed by UID. Times are Unix seconds."""

    uid: str
    read_at: float | None = None
    """When the job and its pods were last read from the API server; None: read them at the next reconcile."""
    parsed: tuple[Raw, JobDefaults, Job] | None = None
    """The job as last parsed: the object, the defaults of its namespace, and what they gave."""
    sent: tuple[Any, ...] = ()
    """What was last sent to the job's stores, and which stores these are."""
    children: Children | None = None
    """Services as last read, created or changed; None: unknown, and read before anything is done."""
    children_at: float = 0.0
    """When `children` was read."""
    children_of: tuple[int, GangProvider] | None = None
    """The execution attempt and the gang provider that `children` was read for: each has objects of its own."""
    workload: dict[str, Any] | None = None
    """The Workload that counts (`QueueView.workload`), as last read from the API server; None if there is none. It is
    an earlier one, if any is known, while it cannot be read (`QueueView.unknown`)."""
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The Workloads of the job's steps in its queue, as last read from the API server, by their names."""
    policies: Policies | None = None
    """The job's policies as last read, created or changed; None: unknown, and read before anything is done."""
    policies_at: float = 0.0
    """When `policies` was read."""
    write_at: float | None = None
    """When a minor status change that waits is written at the latest; None: none waits."""
    refusals: dict[str, Refusal] = field(default_factory=dict)
    """Refused creations by child: the name of a pod, else `Kind/name`."""
    withheld: frozenset[str] = frozenset()
    """Worker pods that status names and that are created later (`Plan.withheld`)."""
    retry_at: float | None = None
    """When actions that failed without a refusal are planned again; None: none failed."""
    terminating_since: float | None = None
    """Since when the job waits for the deletion of objects that have the names of its Services."""
    older_store_at: float | None = None
    """When the operator last saw a store that has a successor; before it sees one, when it first observed the job."""
    serving_store: tuple[int | None, float] = (None, 0.0)
    """`status.rendezvous.incarnation` as last read, and when this operator first read that number."""
    standby_store_at: float | None = None
    """When the operator last saw a newer store that has not confirmed its retirement; before that, as above."""
    end_seen: float | None = None
    """`Observed.end_seen`"""
    outcome_seen: float | None = None
    """When the operator first read a status that declares the job's outcome; None: it has not."""
    failed_starts: tuple[int, float | None] = (0, None)
    """`status.failedStarts` as last read, and when this operator first read that number."""
    back_off: tuple[BackOff | None, float | None] = (None, None)
    """`status.backOff` as last read, and when this operator first read it."""
    pods: PodSightings = field(default_factory=PodSightings)
    lost_nodes: LostNodes = field(default_factory=LostNodes)
    start_warnings: StartWarnings = field(default_factory=StartWarnings)
    stop_causes: StopCauses = field(default_factory=StopCauses)
    _attempts: dict[str, int] = field(default_factory=dict)
    _failed_executions: int = 0

    def parsed_as(self, raw: Raw, defaults: JobDefaults) -> Job | None:
        """Return what a watched object was parsed as; None if this version of it has not been. No version changes."""
        if self.parsed is None or self.parsed[0] is not raw or self.parsed[1] is not defaults:
            return None
        return self.parsed[2]

    def begin(self, now: float, children_of: tuple[int, GangProvider]) -> None:
        """Begin with a job that has no status yet: nothing has been created for it."""
        self.read_at = self.children_at = self.policies_at = now
        self.children, self.children_of, self.policies = Children(), children_of, Policies()

    def adopt(self, now: float, read_after: float) -> None:
        """Begin with a job that has trained under another operator, and that needs nothing now: it is read after so
        many seconds."""
        self.read_at = now + read_after - READ_SECONDS

    def record_refusal(
        self,
        child: str,
        reason: RefusalReason,
        message: str,
        now: float,
        longest: float = LONGEST_RETRY,
        remedy: Remedy = Remedy.WAIT,
    ) -> Refusal:
        """Record that the API server refused to create a child; the delay before the next try doubles each time."""
        count = self._attempts[child] = self._attempts.get(child, 0) + 1
        first = FIRST_NAME_RETRY if reason is RefusalReason.NAME_TAKEN else FIRST_RETRY
        before = self.refusals.get(child)
        retry_at = now + doubling_delay(first, longest, count)
        since = now if before is None or before.skipped else before.since
        refusal = self.refusals[child] = Refusal(reason, message, retry_at, since, remedy)
        return refusal

    def record_skipped(self, child: str, message: str, now: float, cause: Refusal | None = None) -> None:
        """Record that a child was not tried, because the creation of one of its prerequisites failed; `cause`: the
        refusal of the prerequisite, None where the API server did not refuse it."""
        reason, remedy = (cause.reason, cause.remedy) if cause else (RefusalReason.POD_CREATION_FAILED, Remedy.WAIT)
        if reason is RefusalReason.NAME_TAKEN:
            reason = RefusalReason.POD_CREATION_FAILED  # the name of this child may be free
        new = Refusal(reason, message, now + FIRST_RETRY, now, remedy, skipped=True)
        before = self.refusals.setdefault(child, new)
        if before.skipped:
            self.refusals[child] = replace(new, retry_at=before.retry_at, since=before.since)

    def record_created(self, child: str) -> None:
        """Record that a child may exist: from now on the plan counts a missing one as lost."""
        self.refusals.pop(child, None)
        self._attempts.pop(child, None)

    def record_execution(self, *, failed: bool, now: float) -> None:
        """Record whether an action got an error other than a refusal. Each doubles the delay before the next try."""
        self._failed_executions = self._failed_executions + 1 if failed else 0
        delay = doubling_delay(FIRST_RETRY, LONGEST_RETRY, self._failed_executions)
        self.retry_at = now + delay if failed else None

    def next_retry(self, since: float) -> float | None:
        """Return when the first action that failed at `since` or later is due again, Unix seconds; None: none failed.

        A refusal stays in memory after its retry is due, for its message; it must not cause further reconciles.
        """
        times = [refusal.retry_at for refusal in self.refusals.values()]
        times += [self.retry_at] if self.retry_at is not None else []
        return min((at for at in times if at > since), default=None)

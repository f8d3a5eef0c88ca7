"""The inputs of a reconcile and all that was decided: what the next status and the Events are derived from."""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob_operator.model.cluster.pods import Pod
from elasticjob_operator.plan.context import ReconcileContext
from elasticjob_operator.plan.failure_policy.budget import Budget
from elasticjob_operator.plan.life_cycle.job_end import JobOutcome
from elasticjob_operator.plan.life_cycle.suspension import is_suspended, resumes
from elasticjob_operator.plan.pods.capacity import Capacity
from elasticjob_operator.plan.pods.pod_decisions import PodDecision, ReplacePod, starts_execution
from elasticjob_operator.plan.pods.start_attempts import StartAttempts
from elasticjob_operator.plan.pods.workers import WorkersPlan
from elasticjob_operator.plan.store_pods.stores import StorePlan
from elasticjob_operator.plan.training_state import TrainingState


@dataclass(frozen=True)
class Decisions:
    """The inputs of one reconcile and all decisions on the job; status and Events are derived from it."""

    inputs: ReconcileContext
    pod_decisions: tuple[PodDecision, ...]
    workers: WorkersPlan
    store: StorePlan
    training: TrainingState
    budget: Budget
    start_attempts: StartAttempts
    capacity: Capacity
    outcome: JobOutcome | None = None
    """None while the job goes on."""

    @property
    def suspended(self) -> bool:
        """Whether the job is suspended, or resumes only with the next reconcile."""
        return self.outcome is None and (is_suspended(self.inputs) or resumes(self.inputs))

    @property
    def resumes(self) -> bool:
        """Whether the next execution begins with this reconcile."""
        return self.outcome is None and resumes(self.inputs)

    @property
    def trained(self) -> bool:
        """Whether a round has formed since the job was started or resumed."""
        return self.training.rounds > 0 and not (starts_execution(self.inputs) and self.training.last_round is None)

    @property
    def kept_pods(self) -> list[Pod]:
        """Pods that are not replaced."""
        return [d.pod for d in self.pod_decisions if d.pod is not None and not isinstance(d.action, ReplacePod)]

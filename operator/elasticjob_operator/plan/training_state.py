"""The state of training: from the coordinator's report, or from the last status while the store is unavailable."""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob._runtime.contract.messages import Outcome, Report, RoundPhase
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.contract.text import with_noun
from elasticjob_operator.model.cluster.raw import integer, text
from elasticjob_operator.model.job.status import ConditionType
from elasticjob_operator.plan.context import ReconcileContext


@dataclass(frozen=True)
class TrainingState:
    """The state of training."""

    formed: bool
    """Whether all workers of the round have started and run."""
    active: int
    """Worker pods in the running round."""
    ready: int
    """Worker pods that could start workers at once."""
    standby: int
    """Worker pods with a connected agent outside the running round."""
    size: int
    """Workers in the running round (the world size)."""
    rounds: int
    """Rounds formed in the job's life."""
    last_round: RoundId | None
    """The newest round that has formed; None before the first."""
    formed_at: float
    """When the newest round formed, Unix seconds of its store; 0 before the first."""
    is_new_round: bool
    """Whether status does not include the newest round yet."""
    outcome: Outcome | None
    """SUCCEEDED or FAILED once declared."""
    outcome_pod: str
    """The pod whose termination message declares the outcome; empty if the coordinator declared it."""
    reason: str
    """The coordinator's explanation of its phase; empty while it is unavailable."""
    starts: bool = False
    """Whether the workers of a round are starting."""
    warm_fork: str = ""
    """`status.warmFork`: why workers start by exec; empty while they are forked."""
    hang_guard: str = ""
    """`status.hangGuard`: what ends a hang without a hangPolicy; with one, that it has no steps to watch. Or empty."""


def read_training_state(ctx: ReconcileContext) -> TrainingState:
    """Return the state of training. The last status is used where the coordinator still recovers: it knows more."""
    report = ctx.report
    if report is None or report.phase in (RoundPhase.RECOVERING, RoundPhase.STANDBY):
        return _from_status(ctx, report)
    formed = report.phase is RoundPhase.RUNNING and report.formed_at > 0
    starts = report.phase is RoundPhase.RUNNING and not formed
    # Not by `formed_at`: stores on two hosts have two clocks, and a successor that restores a round starts it again.
    is_new = (
        report.round is not None
        and report.formed_at > 0
        and (ctx.status.last_round is None or report.round > ctx.status.last_round)
    )
    last_round = report.round if is_new else ctx.status.last_round
    rounds = ctx.status.rounds
    outcome, outcome_pod = _outcome(ctx, report)
    return TrainingState(
        formed=formed,
        active=report.active if formed else 0,
        # While a replaced pod's workers save, its agent and its successor's are both connected: count indices.
        ready=len({agent.index for agent in report.nodes if agent.ready}),
        standby=sum(not agent.member for agent in report.nodes) if formed else 0,
        size=report.world_size if formed else 0,
        # A round that ended at once may never have been reported as running; the store's count includes it.
        rounds=max(rounds + is_new, report.rounds if is_new or report.phase is RoundPhase.FINISHED else 0),
        last_round=last_round,
        formed_at=report.formed_at if is_new else ctx.status.last_rendezvous,
        is_new_round=is_new,
        outcome=outcome,
        outcome_pod=outcome_pod,
        # The store reports agents as training from the moment at which it starts their workers.
        reason=f"the workers of {with_noun(report.active, 'pod')} are starting" if starts else report.reason,
        starts=starts,
        warm_fork=_warm_fork(report) if formed else text(ctx.status.raw, "warmFork"),
        hang_guard=report.hang_guard if formed else text(ctx.status.raw, "hangGuard"),
    )


def _warm_fork(report: Report) -> str:
    if not report.fork_disabled_reason:
        return ""
    return f"off on {report.fork_disabled_nodes} of {with_noun(report.active, 'pod')}: {report.fork_disabled_reason}"


def _from_status(ctx: ReconcileContext, report: Report | None) -> TrainingState:
    raw = ctx.status.raw
    running = sum(pod.running for pod in ctx.observed.workers)
    formed = ctx.status.is_true(ConditionType.RUNNING) and running > 0
    outcome, outcome_pod = _outcome(ctx, report)
    return TrainingState(
        formed=formed,
        active=min(integer(raw, "active"), running) if formed else 0,
        ready=_ready_pods(ctx),
        standby=integer(raw, "standby") if formed else 0,
        size=integer(raw, "worldSize") if formed else 0,
        rounds=ctx.status.rounds,
        last_round=ctx.status.last_round,
        formed_at=ctx.status.last_rendezvous,
        is_new_round=False,
        outcome=outcome,
        outcome_pod=outcome_pod,
        reason=report.reason if report else "",
        warm_fork=text(raw, "warmFork"),
        hang_guard=text(raw, "hangGuard"),
    )


def _ready_pods(ctx: ReconcileContext) -> int:
    """Return how many worker pods are ready. Kubernetes counts a pod as Ready that still imports: before the first
    round the number does not grow without a report."""
    ready = len({pod.index for pod in ctx.observed.workers if pod.ready and pod.live})
    return min(ready, integer(ctx.status.raw, "ready")) if ctx.status.last_round is None else ready


def _outcome(ctx: ReconcileContext, report: Report | None) -> tuple[Outcome | None, str]:
    """Return the outcome, and the pod whose termination message declares it; "" if the coordinator declared it."""
    if report is not None and report.outcome is not None:
        return report.outcome, ""
    if ctx.now < ctx.report_due:
        return None, ""
    declared = {pod.end.outcome: pod.name for pod in ctx.observed.workers if pod.end is not None}
    return next(((o, declared[o]) for o in (Outcome.SUCCEEDED, Outcome.FAILED) if o in declared), (None, ""))

"""What is known of the training itself: the coordinator's report, or status while nobody can be asked."""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob.contract.messages import Outcome, Report, RoundPhase
from elasticjob_operator.model.raw import integer, text
from elasticjob_operator.model.status import ConditionType
from elasticjob_operator.plan.context import ReconcileContext


@dataclass(frozen=True)
class World:
    """`formed`: the workers of a round have all started and run."""

    formed: bool
    active: int
    """Nodes in the running round."""
    ready: int
    standby: int
    size: int
    """Workers in the running round."""
    rounds: int
    """Rounds formed in the job's life."""
    formed_at: float
    """When the newest one was formed, Unix seconds; 0: never."""
    is_new_round: bool
    """Whether the newest one is new to status."""
    outcome: Outcome | None
    outcome_pod: str
    """The pod whose termination message tells the outcome; empty where the coordinator tells it."""
    reason: str
    """The coordinator's own words; empty while it cannot be asked."""
    warm_fork: str = ""
    """What status says of it: nothing while all is well."""


def read_world(ctx: ReconcileContext) -> World:
    """A coordinator that still recovers knows less than status does."""
    report = ctx.report
    if report is None or report.phase is RoundPhase.RECOVERING:
        return _remembered(ctx, report)
    formed = report.phase is RoundPhase.RUNNING and report.formed_at > 0
    # A successor store restores the round it finds: the same one, though its time is that of the restoring.
    restored = (
        report.round is not None and report.round.store_incarnation != report.incarnation and ctx.status.rounds > 0
    )
    fresh = not restored and report.formed_at > ctx.status.last_rendezvous + 0.001
    rounds = ctx.status.rounds
    outcome, witness = _outcome(ctx, report)
    return World(
        formed=formed,
        active=report.active if formed else 0,
        ready=sum(node.ready for node in report.nodes),
        standby=sum(not node.member for node in report.nodes) if formed else 0,
        size=report.world_size if formed else 0,
        rounds=max(rounds + 1, report.rounds) if fresh else rounds,
        formed_at=report.formed_at if fresh else ctx.status.last_rendezvous,
        is_new_round=fresh,
        outcome=outcome,
        outcome_pod=witness,
        reason=report.reason,
        warm_fork=_warm_fork(report) if formed else text(ctx.status.raw, "warmFork"),
    )


def _warm_fork(report: Report) -> str:
    if not report.fork_disabled_reason:
        return ""
    return f"off on {report.fork_disabled_nodes} of {report.active} nodes: {report.fork_disabled_reason}"


def _remembered(ctx: ReconcileContext, report: Report | None) -> World:
    raw = ctx.status.raw
    live = sum(pod.running for pod in ctx.observed.workers)
    formed = ctx.status.is_true(ConditionType.RUNNING) and live > 0
    outcome, witness = _outcome(ctx, report)
    return World(
        formed=formed,
        active=min(integer(raw, "active"), live) if formed else 0,
        ready=sum(pod.ready and pod.live for pod in ctx.observed.workers),
        standby=integer(raw, "standby") if formed else 0,
        size=integer(raw, "worldSize") if formed else 0,
        rounds=ctx.status.rounds,
        formed_at=ctx.status.last_rendezvous,
        is_new_round=False,
        outcome=outcome,
        outcome_pod=witness,
        reason=report.reason if report else "",
        warm_fork=text(raw, "warmFork"),
    )


def _outcome(ctx: ReconcileContext, report: Report | None) -> tuple[Outcome | None, str]:
    """Declared by the coordinator, or proved by the termination message of one pod; and which one."""
    if report is not None and report.outcome is not None:
        return report.outcome, ""
    said = {pod.end.outcome: pod.name for pod in ctx.observed.workers if pod.end is not None}
    return next(((o, said[o]) for o in (Outcome.SUCCEEDED, Outcome.FAILED) if o in said), (None, ""))

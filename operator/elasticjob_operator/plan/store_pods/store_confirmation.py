"""When the operator confirms a store as the job's only one. It never does so while another store may run a round.

It excludes older stores, the standby store, and the agents themselves, which may write without a store while more
than half of a round's members are together (docs/contribute/store-loss.md, "The standby store" and "When a
store is replaced"; docs/contribute/design.md, "Which workers may write").
"""

from __future__ import annotations

from collections.abc import Collection

from elasticjob._runtime.contract.messages import Report
from elasticjob_operator.model.observed import has_retired
from elasticjob_operator.plan.context import AGENTS_SWITCH_SECONDS, ReconcileContext


def confirmable_request(
    report: Report, before: Report | None, *, older: bool, live: Collection[str], standby: bool = False
) -> float:
    """Return the request of the current store that the operator may confirm ("you are the only store"); else 0.

    `live`: worker pods that run, as far as their kubelets report. None of them may be one that can go on with an
    earlier round: more than half of a round's members may write without a coordinator.

    `standby`: a standby store may be active, or become so, unknown to the operator. It needs more than half of the last
    round, so the store may be confirmed if exactly half is missing there, as long as no more is
    (`OperatorView.confirmed_half`).

    `older`: an older store pod may still be alive, or agents may still be on their way here from it. Then one case is
    safe: exactly half of the last round is missing here, and the older store holds no confirmation, without which it
    cannot continue with the other half. It holds none if its last report (`before`) names a round: a store asks only
    while it has no round, starting one uses the confirmation up, and the operator sends it no more. That round must not
    be newer than `report.half_missing_round`, or the older store has continued without the agents that are here. The
    older store must be the direct predecessor, because the operator keeps no other's last report.
    """
    if _others_may_write(report, live) or (standby and _half_is_exceeded(report)):
        return 0.0
    if not older:
        return report.confirmation_request
    if before is None or before.round is None or before.incarnation + 1 != report.incarnation:
        return 0.0
    if report.half_missing_round is None or before.round > report.half_missing_round:
        return 0.0
    return report.confirmation_request


def _others_may_write(report: Report, live: Collection[str]) -> bool:
    """Return whether a live pod may go on with an earlier round without this store."""
    connected = {agent.pod for agent in report.nodes}
    may_write = set(live) - connected if report.pods_that_may_write is None else report.pods_that_may_write
    return not set(live).isdisjoint(may_write)


def _half_is_exceeded(report: Report) -> bool:
    """Return whether more than half of the last round is missing: it may be, or come, to a standby store."""
    return report.confirmation_request > 0 and report.half_missing_round is None


def must_retire(report: Report, live: Collection[str]) -> bool:
    """Return whether a standby store must be retired now, so that the store with this report can be confirmed.

    While missing members may write, no store is confirmed: they may still come to the standby store, which then takes
    over.
    """
    return _half_is_exceeded(report) and not _others_may_write(report, live)


def confirmed_request(ctx: ReconcileContext) -> float:
    """Return the request that the operator confirms to the current store (`OperatorView.confirmed_request`)."""
    if ctx.report is None:
        return 0.0
    return confirmable_request(
        ctx.report,
        ctx.observed.link.previous_report,
        older=ctx.now < ctx.observed.older_store_at + AGENTS_SWITCH_SECONDS,
        live=live_workers(ctx),
        standby=_standby_may_act(ctx),
    )


def awaits_confirmation(ctx: ReconcileContext) -> bool:
    """Return whether the current store asks for a confirmation that the operator may not give yet."""
    return ctx.report is not None and ctx.report.confirmation_request > 0 and not confirmed_request(ctx)


def live_workers(ctx: ReconcileContext) -> frozenset[str]:
    """Return the worker pods that run, and those that end, as far as their kubelets report.

    A kubelet that is silent for LEASE_LATE_SECONDS reports nothing: its pods are taken for dead.
    """
    return frozenset(
        p.name for p in ctx.observed.workers if p.end is None and p.phase == "Running" and not ctx.lease_late(p.node)
    )


def _standby_may_act(ctx: ReconcileContext) -> bool:
    """Return whether a standby store may be active, or become so.

    Status names one; or one has not confirmed its retirement; or one has ended without that so recently that its
    agents may be on their way here.
    """
    waiting = ctx.now < ctx.observed.standby_store_at + AGENTS_SWITCH_SECONDS
    retired = all(has_retired(p, ctx.observed.standby_link) for p in ctx.newer_stores)
    return ctx.status.standby_store is not None or waiting or not retired

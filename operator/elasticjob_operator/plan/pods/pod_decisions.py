"""For each index of the job: keep its worker pod, create it, or replace it. Level-triggered: no history is needed.

The pod of an index is the one with the incarnation that status names; pods of older incarnations are ignored, even if
they still run. A pod is replaced under the next incarnation: at once if it is missing, is being deleted, failed through
its own fault or must leave its node, LOST_GRACE_SECONDS after its agent was lost, and no sooner than MIN_POD_LIFETIME
after its first sighting if it ended for another reason before its container ran as long. A pod that did not start is
replaced after a delay that grows with each attempt (`starts`).

With podReplacementPolicy Failed, status names the next incarnation as early, but its pod is created only once all older
pods of the index have ended (`terminations`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from elasticjob._runtime.contract.failures.failure_rules import REPLACING_ACTIONS, UNCOUNTED_ACTIONS
from elasticjob._runtime.contract.messages import Failure, FailureClass, Outcome, RoundPhase
from elasticjob._runtime.contract.names import ExitCode
from elasticjob_operator.backoff import growing_interval
from elasticjob_operator.manifests.names import attempt, worker_pod
from elasticjob_operator.model.cluster.pods import CONTAINER_LOST, Pod, TrainerEnd
from elasticjob_operator.model.job.status import AvoidedNode, ConditionType
from elasticjob_operator.model.observed import RefusalReason
from elasticjob_operator.plan.context import LONGEST_POLL_SECONDS, LOST_GRACE_SECONDS, ReconcileContext
from elasticjob_operator.plan.pods.node_warnings import describe_request_to_leave, pods_to_drain
from elasticjob_operator.plan.pods.terminations import pods_to_await

UNCHARGED_EXITS = (ExitCode.LEFT, ExitCode.SUPERSEDED, ExitCode.UNAVAILABLE)
"""Exit codes that are not a failure of the pod: its agent left, was superseded, or never reached the store. FAILED (1)
is not among them, because any program that breaks may exit with 1."""
UNCHARGED_OUTCOMES = (Outcome.SUCCEEDED, Outcome.FAILED, Outcome.LEFT, Outcome.SUPERSEDED)
"""Outcomes in a termination message that are not a further failure of the pod. For FAILED the coordinator has charged
the cause already."""
MIN_POD_LIFETIME = 10.0
"""Seconds, from when the operator first saw it, for which a pod that ended without a failure of its own is kept."""
MISPLACED_POD_LIFETIME = 60.0
"""The same for a pod that was placed on the unhealthy Node that it should avoid: its successor may be placed there
too."""


@dataclass(frozen=True)
class KeepPod:
    """Leave the index as it is. If `until` (Unix seconds) is set, the decision may change then."""

    until: float | None = None


@dataclass(frozen=True)
class CreatePod:
    """Create the pod of this incarnation; it never existed."""

    incarnation: int


@dataclass(frozen=True)
class ReplacePod:
    """Create a pod of the next incarnation. `charged`: the old pod failed by itself, which counts as a restart."""

    reason: str
    charged: bool = False
    lost_at: float | None = None
    """When the pod was lost together with its node, Unix seconds; None if it was not."""
    unhealthy: Failure | None = None
    """Why the node of the pod is unhealthy; None if it is not."""
    noticed: bool = False
    """Whether the end of the pod's node is announced, or a drain is asked for."""
    asked: bool = False
    """Whether an Eviction asks the pod to leave."""


@dataclass(frozen=True)
class AwaitEnd:
    """Create the pod of this index only once the older ones have ended (podReplacementPolicy Failed)."""

    older: tuple[Pod, ...]


@dataclass(frozen=True)
class PodDecision:
    """The decision on one index."""

    index: int
    incarnation: int | None
    """The incarnation that status names; None if the index was never used."""
    pod: Pod | None
    """The pod of this incarnation; None if it does not exist."""
    action: KeepPod | CreatePod | ReplacePod | AwaitEnd


def decide_pods(ctx: ReconcileContext, start_retry_at: float) -> tuple[PodDecision, ...]:
    """Return a decision for each index that the job should have.

    Pods that did not start are replaced at `start_retry_at`, Unix seconds.
    """
    pods = {(p.index, p.incarnation): p for p in ctx.observed.workers}
    decisions, may_leave = [], pods_to_drain(ctx)
    for index in ctx.indices:
        known = ctx.status.incarnations
        incarnation = known[index] if index < len(known) else None
        pod = None if incarnation is None else pods.get((index, incarnation))
        decisions.append(
            PodDecision(index, incarnation, pod, _decide(ctx, index, incarnation, pod, start_retry_at, may_leave))
        )
    return tuple(decisions)


def _decide(
    ctx: ReconcileContext,
    index: int,
    incarnation: int | None,
    pod: Pod | None,
    start_retry_at: float,
    may_leave: frozenset[str],
) -> KeepPod | CreatePod | ReplacePod | AwaitEnd:
    if incarnation is None:
        return CreatePod(0)
    if pod is None:
        return _decide_missing(ctx, index, incarnation)
    if (failure := _unhealthy_node(ctx, pod)) is not None:
        if pod.node in pod.avoided_nodes and ctx.now < pod.seen + MISPLACED_POD_LIFETIME:
            return KeepPod(pod.seen + MISPLACED_POD_LIFETIME)
        return ReplacePod(f"{pod.name} is on an unhealthy node, {pod.node}: {failure.message}", unhealthy=failure)
    if pod.deleting is not None:
        return ReplacePod(f"{pod.name} is being deleted")
    if pod.end is not None and _is_of_the_past(ctx, pod):
        return CreatePod(incarnation + 1)
    if pod.end is not None:
        if did_not_start(pod) and ctx.now < start_retry_at:
            return KeepPod(start_retry_at)
        return _decide_ended(ctx, pod)
    if rule := _replacing_rule(ctx, pod):
        return ReplacePod(f"failurePolicy rule {rule} matched a failure in {pod.name}")
    if pod.unschedulable and pod.avoided_nodes - avoided_names(ctx):
        return ReplacePod(f"{pod.name} no longer needs to avoid {', '.join(sorted(pod.avoided_nodes))}")
    return _decide_live(ctx, pod, may_leave)


def _is_of_the_past(ctx: ReconcileContext, pod: Pod) -> bool:
    """Return whether an ended pod is of an earlier execution, or of an index that the job did without: it stays for its
    log, and its failure was of no consequence."""
    return pod.index not in ctx.last_indices or pod.execution not in (0, attempt(ctx.job))


def starts_execution(ctx: ReconcileContext) -> bool:
    """Return whether a resumed job has not trained yet: the pods of the execution before were deleted on purpose."""
    return ConditionType.SUSPENDED in ctx.status.conditions and ctx.status.last_round is None


def was_never_created(ctx: ReconcileContext) -> bool:
    """Return whether the job has never trained and has no pod: the operator that wrote its first status ended then."""
    return not (ctx.status.rounds or ctx.observed.workers or ctx.observed.stores)


def _unhealthy_node(ctx: ReconcileContext, pod: Pod) -> Failure | None:
    """Return why the pod's agent asked for a replacement on another node: over the link or by termination message."""
    reported = next((f for f in (ctx.report.unhealthy if ctx.report else ()) if f.pod == pod.name), None)
    if reported is not None:
        return reported
    termination = pod.end.termination if pod.end else None
    if termination is None or termination.outcome is not Outcome.LEFT or termination.failure is None:
        return None
    return termination.failure if termination.failure.kind is FailureClass.DEVICE_UNHEALTHY else None


def _replacing_rule(ctx: ReconcileContext, pod: Pod) -> str:
    """Return the failurePolicy rule that replaces this pod because a worker in it failed; "" if none.

    The status write that includes the round names the pod's successor. If it cannot, the agent ends all the same, and
    the pod is replaced then.
    """
    matched = ((e.rule, e.failure) for e in ctx.new_rounds if e.action in REPLACING_ACTIONS)
    return next((rule for rule, failure in matched if failure is not None and failure.pod == pod.name), "")


def _decide_missing(ctx: ReconcileContext, index: int, incarnation: int) -> KeepPod | CreatePod | ReplacePod | AwaitEnd:
    name = worker_pod(ctx.job.name, index, incarnation)
    if index in ctx.status.withdrawn or index not in ctx.last_indices:
        return CreatePod(incarnation + 1)
    older = pods_to_await(ctx, index)
    if name in ctx.observed.withheld:
        return AwaitEnd(older) if older else CreatePod(incarnation)
    refusal = ctx.observed.refusals.get(name)
    if refusal is None and (starts_execution(ctx) or was_never_created(ctx)):
        return CreatePod(incarnation + 1)
    if refusal is None:
        # While older pods of the index exist, the missing one was probably withheld by an operator before this one.
        return AwaitEnd(older) if older else ReplacePod(f"{name} no longer exists")
    if refusal.reason is RefusalReason.NAME_TAKEN:
        return ReplacePod(f"the name {name} belongs to a pod of another owner")
    return CreatePod(incarnation) if ctx.now >= refusal.retry_at else KeepPod(refusal.retry_at)


def _decide_ended(ctx: ReconcileContext, pod: Pod) -> KeepPod | ReplacePod:
    """The budget bounds how often failed pods are replaced. `MIN_POD_LIFETIME` bounds it for all other ends, because
    a node may reject each pod as soon as it is created, and for a job with rules by which failures do not count."""
    if ctx.now < ctx.report_due:
        return KeepPod(ctx.report_due)
    charged = is_own_failure(pod)
    bounded = charged and not any(rule.action in UNCOUNTED_ACTIONS for rule in ctx.spec.failure_rules)
    ran = pod.end.seconds if pod.end else 0.0
    if not bounded and ran < MIN_POD_LIFETIME and ctx.now < pod.seen + MIN_POD_LIFETIME:
        return KeepPod(pod.seen + MIN_POD_LIFETIME)
    lost_at = ctx.now if pod.end is not None and pod.end.reason == CONTAINER_LOST else None
    return ReplacePod(f"{pod.name} ended: {describe_end(pod)}", charged, lost_at)


def _decide_live(ctx: ReconcileContext, pod: Pod, may_leave: frozenset[str]) -> KeepPod | ReplacePod:
    """Kubernetes reports this pod as live, but its Node may be down, or about to end. `may_leave`: names of pods that
    may leave a Node that is to be drained, or that an Eviction asks to leave (`pods_to_drain`)."""
    link = ctx.observed.link
    if pod.name in may_leave and pod.uid in ctx.evictions and not ctx.must_leave(pod):
        return ReplacePod(describe_request_to_leave(ctx.evictions[pod.uid]), asked=True)
    if ctx.must_leave(pod) or pod.name in may_leave:
        reason = f"{pod.name} is on {pod.node}, which has the {ctx.nodes_to_leave[pod.node]}"
        return ReplacePod(reason, noticed=True)
    # A pod that was placed there although it avoids the node would be placed there again.
    if pod.node in avoided_names(ctx) - pod.avoided_nodes and not pod.running:
        return ReplacePod(f"{pod.name} was scheduled to {pod.node}, which is avoided")
    lost_since = link.lost_pods.get(pod.name)
    if link.connected and lost_since is not None:
        if ctx.now >= lost_since + LOST_GRACE_SECONDS:
            return ReplacePod(f"the agent of {pod.name} on {pod.node} is lost", lost_at=lost_since)
        return KeepPod(lost_since + LOST_GRACE_SECONDS)
    if pod in unconnected_pods(ctx):
        if ctx.lease_late(pod.node):
            return ReplacePod(f"neither {pod.name} nor the kubelet of {pod.node} responds", lost_at=ctx.now)
        if (
            _others_connected(ctx)
            and is_lost(pod.node, still_avoided(ctx))
            and ctx.now >= link.since + LOST_GRACE_SECONDS
        ):
            return ReplacePod(f"{pod.name} has not reconnected since {pod.node} was lost", lost_at=ctx.now)
        waited = ctx.now - max(link.since, pod.seen)
        return KeepPod(ctx.now + growing_interval(waited, LOST_GRACE_SECONDS, LONGEST_POLL_SECONDS))
    return KeepPod()


def unconnected_pods(ctx: ReconcileContext) -> tuple[Pod, ...]:
    """Return the running pods that are not connected to the store; none while the operator has no link to the store."""
    if ctx.report is None or not ctx.observed.link.connected:
        return ()
    connected = {agent.pod for agent in ctx.report.nodes}
    return tuple(p for p in ctx.observed.workers if p.running and p.name not in connected)


def _others_connected(ctx: ReconcileContext) -> bool:
    """Return whether the store has recovered and has agents: no live agent is then still connected to an older one."""
    waiting = (RoundPhase.RECOVERING, RoundPhase.STANDBY)
    return ctx.report is not None and bool(ctx.report.nodes) and ctx.report.phase not in waiting


def is_own_failure(pod: Pod) -> bool:
    """Return whether an ended pod failed by itself, which counts as a restart.

    An end that the coordinator declared, or that Kubernetes caused for another reason than the pod itself, does not
    count. That takes evidence: a pod which is deleted has a deletionTimestamp, one that is evicted or whose node shuts
    down a condition or a reason in its status. A pod that leaves after SIGTERM without any was stopped for its own
    fault: a livenessProbe or a postStart hook failed, or it ran for the activeDeadlineSeconds of the template. Such an
    end comes again, so the budget must bound it.
    """
    end = pod.end
    if end is None or pod.deleting is not None or pod.disrupted or end.start_failure:
        return False
    if end.left_on_signal or (end.own_fault and end.outcome is None):
        return True
    if end.exit_code is None:
        return False
    return end.exit_code not in UNCHARGED_EXITS and end.outcome not in UNCHARGED_OUTCOMES


def did_not_start(pod: Pod) -> bool:
    """Return whether an init container failed, or the kubelet ended the pod for its own use or its deadline before it
    started: it is replaced after a delay."""
    return pod.end is not None and bool(pod.end.start_failure) and pod.deleting is None


def describe_end(pod: Pod) -> str:
    """Return how the pod ended, for messages."""
    end = pod.end or TrainerEnd(None, "", "", 0.0)
    if end.start_failure:
        return end.start_failure
    if pod.disrupted:
        return f"disrupted ({pod.disrupted})"
    if end.own_fault:
        return f"{end.own_fault}: {end.message}"
    if end.termination is not None:
        return f"{end.termination.outcome.value} ({end.termination.reason})"
    if end.exit_code is None:
        return f"{end.reason} {end.message}".strip()
    code = end.signal or f"exit code {end.exit_code}"
    return f"{end.reason}, {code}" if end.reason not in ("", "Error") else code


def avoided_names(ctx: ReconcileContext) -> frozenset[str]:
    """Return the names of the nodes that are avoided now, and of those whose end is announced or asked for."""
    return frozenset((*(node.name for node in still_avoided(ctx)), *ctx.nodes_to_leave))


def is_lost(node: str, avoided: Iterable[AvoidedNode]) -> bool:
    """Return whether the node is avoided because it was lost."""
    return any(n.name == node and n.lost for n in avoided)


def still_avoided(ctx: ReconcileContext) -> tuple[AvoidedNode, ...]:
    """Return the nodes in status that are still avoided.

    A lost node is avoided until its kubelet renews its lease after the loss, any other one for
    failurePolicy.avoidNodeSeconds.
    """
    return tuple(
        node
        for node in ctx.status.avoided
        if ctx.now < node.until and not (node.lost and node.name in ctx.observed.returned_nodes)
    )

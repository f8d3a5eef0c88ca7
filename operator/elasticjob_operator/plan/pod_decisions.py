"""Worker pods: what each decision has, and the verdict on it. Level-triggered: it depends on what is there now.

A decision's pod is the one with the incarnation that status names; older ones are dead to the job. A pod that is gone,
ended, lost or being deleted has a successor at once, under the next incarnation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from elasticjob.contract.messages import Failure, FailureClass, Outcome, RoundPhase
from elasticjob.contract.names import ExitCode
from elasticjob_operator.manifests.names import worker_pod
from elasticjob_operator.model.observed import RefusalReason
from elasticjob_operator.model.pods import Pod, TrainerEnd
from elasticjob_operator.model.status import DEVICE_UNHEALTHY, NODE_LOST, AvoidedNode
from elasticjob_operator.plan.context import LEASE_LATE_SECONDS, LOST_GRACE_SECONDS, ReconcileContext

UNCHARGED_EXITS = (ExitCode.LEFT, ExitCode.SUPERSEDED, ExitCode.UNAVAILABLE, ExitCode.JOIN_TIMEOUT)
"""The node was told to go, or the job had no place for it: no failure of the pod's own. What a coordinator judged
(exit code 1) is known by the termination message: any program that breaks may end with 1."""
MIN_POD_LIFETIME = 10.0
"""Seconds from a pod's creation before which it is not replaced, where it ended through no failure of its own."""
UNCHARGED_OUTCOMES = (Outcome.SUCCEEDED, Outcome.FAILED, Outcome.LEFT, Outcome.SUPERSEDED)


@dataclass(frozen=True)
class KeepPod:
    """Nothing to do before `until`, if that is set."""

    until: float | None = None


@dataclass(frozen=True)
class CreatePod:
    """The pod of this incarnation was never made."""

    incarnation: int


@dataclass(frozen=True)
class ReplacePod:
    """The decision needs a new pod. `charged`: the old one failed by itself."""

    reason: str
    charged: bool = False
    lost_at: float | None = None
    """When its node was lost with it."""
    unhealthy: Failure | None = None
    """Why its node must not train."""


@dataclass(frozen=True)
class PodDecision:
    index: int
    incarnation: int | None
    """None: the decision has never been used."""
    pod: Pod | None
    action: KeepPod | CreatePod | ReplacePod


def decide_pods(ctx: ReconcileContext) -> tuple[PodDecision, ...]:
    """A verdict for each decision that the job should have."""
    pods = {(p.index, p.incarnation): p for p in ctx.observed.workers}
    decisions = []
    for index in range(ctx.spec.settings.desired_pods):
        known = ctx.status.incarnations
        incarnation = known[index] if index < len(known) else None
        pod = None if incarnation is None else pods.get((index, incarnation))
        decisions.append(PodDecision(index, incarnation, pod, _judge(ctx, index, incarnation, pod)))
    return tuple(decisions)


def _judge(
    ctx: ReconcileContext, index: int, incarnation: int | None, pod: Pod | None
) -> KeepPod | CreatePod | ReplacePod:
    if incarnation is None:
        return CreatePod(0)
    if pod is None:
        return _judge_absent(ctx, index, incarnation)
    if (unfit := _unfit(ctx, pod)) is not None:
        return ReplacePod(f"{pod.name} on {pod.node} is not fit to train: {unfit.message}", unhealthy=unfit)
    if pod.deleting is not None:
        return ReplacePod(f"{pod.name} is being deleted")
    if pod.end is not None:
        return _judge_end(ctx, pod)
    if pod.unschedulable and pod.avoided_nodes - avoided_names(ctx):
        return ReplacePod(f"{pod.name} no longer needs to avoid {', '.join(sorted(pod.avoided_nodes))}")
    return _judge_node(ctx, pod)


def _unfit(ctx: ReconcileContext, pod: Pod) -> Failure | None:
    """Its agent asked for a successor on another node: by the coordinator, or in its last words."""
    told = next((f for f in (ctx.report.unhealthy if ctx.report else ()) if f.pod == pod.name), None)
    said = pod.end.termination.failure if pod.end and pod.end.outcome is Outcome.LEFT and pod.end.termination else None
    return told or (said if said is not None and said.kind is FailureClass.DEVICE_UNHEALTHY else None)


def _judge_absent(ctx: ReconcileContext, index: int, incarnation: int) -> KeepPod | CreatePod | ReplacePod:
    name = worker_pod(ctx.job.name, index, incarnation)
    refusal = ctx.observed.refusals.get(name)
    if refusal is None:
        return ReplacePod(f"{name} is gone")
    if refusal.reason is RefusalReason.NAME_TAKEN:
        return ReplacePod(f"the name {name} belongs to a pod of somebody else")
    return CreatePod(incarnation) if ctx.now >= refusal.retry_at else KeepPod(refusal.retry_at)


def _judge_end(ctx: ReconcileContext, pod: Pod) -> KeepPod | ReplacePod:
    """The budget bounds failures; patience bounds other ends: a node may turn pods away as fast as they come."""
    charged = is_own_failure(pod)
    if not charged and ctx.now < pod.created + MIN_POD_LIFETIME:
        return KeepPod(pod.created + MIN_POD_LIFETIME)
    return ReplacePod(f"{pod.name} ended: {describe_end(pod)}", charged)


def _judge_node(ctx: ReconcileContext, pod: Pod) -> KeepPod | ReplacePod:
    """A pod that Kubernetes calls fine may be on a node that is gone."""
    link = ctx.observed.link
    if pod.node in avoided_names(ctx) and not pod.running:
        return ReplacePod(f"{pod.name} was to start on {pod.node}, which is avoided")
    since = link.lost_pods.get(pod.name)
    if link.connected and since is not None:
        if ctx.now >= since + LOST_GRACE_SECONDS:
            return ReplacePod(f"the agent of {pod.name} on {pod.node} is lost", lost_at=since)
        return KeepPod(since + LOST_GRACE_SECONDS)
    if pod in unconnected_pods(ctx):
        age = ctx.lease_age(pod.node)
        if age is not None and age >= LEASE_LATE_SECONDS:
            return ReplacePod(f"neither {pod.name} nor the kubelet of {pod.node} is heard of", lost_at=ctx.now)
        if _others_came(ctx) and is_lost(pod.node, still_avoided(ctx)) and ctx.now >= link.since + LOST_GRACE_SECONDS:
            return ReplacePod(f"{pod.name} is not heard of since {pod.node} was lost", lost_at=ctx.now)
        return KeepPod(ctx.now + LOST_GRACE_SECONDS)
    return KeepPod()


def unconnected_pods(ctx: ReconcileContext) -> tuple[Pod, ...]:
    """Running pods that the store, which we can hear, does not hear."""
    if ctx.report is None or not ctx.observed.link.connected:
        return ()
    here = {node.pod for node in ctx.report.nodes}
    return tuple(p for p in ctx.observed.workers if p.running and p.name not in here)


def _others_came(ctx: ReconcileContext) -> bool:
    """The store knows what became of the last round: who lives is at no other store."""
    return ctx.report is not None and bool(ctx.report.nodes) and ctx.report.phase is not RoundPhase.RECOVERING


def is_own_failure(pod: Pod) -> bool:
    """Whether an ended pod counts as a restart. What its coordinator has judged, or Kubernetes did to it, does not."""
    end = pod.end
    if end is None or pod.deleting is not None or pod.disrupted or end.exit_code is None:
        return False
    return end.exit_code not in UNCHARGED_EXITS and end.outcome not in UNCHARGED_OUTCOMES


def describe_end(pod: Pod) -> str:
    """For people."""
    end = pod.end or TrainerEnd(None, "", "", 0.0)
    if pod.disrupted:
        return f"disrupted ({pod.disrupted})"
    if end.termination is not None:
        return f"{end.termination.outcome.value} ({end.termination.reason})"
    if end.exit_code is None:
        return f"{end.reason} {end.message}".strip()
    code = end.signal or f"exit code {end.exit_code}"
    return f"{end.reason}, {code}" if end.reason not in ("", "Error") else code


def avoided_names(ctx: ReconcileContext) -> frozenset[str]:
    """Nodes that are avoided now, by what status and leases say."""
    return frozenset(node.name for node in still_avoided(ctx))


def is_lost(node: str, avoided: Iterable[AvoidedNode]) -> bool:
    """Whether it is one of those that nobody has heard of since."""
    return any(n.name == node and n.reason == NODE_LOST for n in avoided)


def still_avoided(ctx: ReconcileContext) -> tuple[AvoidedNode, ...]:
    """A lost node is avoided until its kubelet has renewed its lease after the loss, one that is not fit for
    failurePolicy.avoidNodeSeconds."""
    return tuple(
        node
        for node in ctx.status.avoided
        if ctx.now < node.until
        and (node.reason == DEVICE_UNHEALTHY or ctx.observed.leases.get(node.name, 0.0) <= node.since)
    )

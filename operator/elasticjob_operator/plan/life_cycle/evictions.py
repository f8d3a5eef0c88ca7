"""What the operator reports to the Evictions of a job's pods whose responder it is (`model.cluster.evictions`).

`pods.node_warnings` decides when such a pod leaves: as in a drain of its Node.
"""

from __future__ import annotations

from elasticjob_operator.actions import AnswerEviction, EventRecord
from elasticjob_operator.model.cluster.pods import Pod
from elasticjob_operator.plan.context import Actions, ReconcileContext
from elasticjob_operator.plan.pods.node_warnings import EVICTION_REQUESTED, describe_request_to_leave
from elasticjob_operator.plan.pods.pod_decisions import PodDecision, ReplacePod

HEARTBEAT_SECONDS = 60.0
"""Seconds between two reports. The API asks for 20 at least, and gives up a responder after 20 minutes."""


def answer_evictions(ctx: ReconcileContext, decisions: tuple[PodDecision, ...]) -> Actions:
    """Return the reports that are due, and when the next ones are. `decisions`: those on the pods, as of now."""
    pods = {pod.uid: pod for pod in ctx.observed.workers}
    leaving = {d.pod.uid for d in decisions if d.pod is not None and isinstance(d.action, ReplacePod)}
    actions = Actions()
    for eviction in ctx.observed.evictions:
        pod = pods.get(eviction.pod_uid)
        if pod is None or pod.finished:
            actions += Actions((AnswerEviction(eviction, f"{eviction.pod} has ended", completed=True),))
            continue
        if eviction.heartbeat <= 0:
            record = EventRecord(EVICTION_REQUESTED, describe_request_to_leave(eviction), key=eviction.uid)
            actions += Actions(event_records=(record,))
        next_at = eviction.heartbeat + HEARTBEAT_SECONDS
        if ctx.now >= next_at:
            answer = AnswerEviction(eviction, _describe(ctx, pod, leaving=pod.uid in leaving))
            actions, next_at = actions + Actions((answer,)), ctx.now + HEARTBEAT_SECONDS
        actions += Actions(requeue_at=(next_at,))
    return actions


def _describe(ctx: ReconcileContext, pod: Pod, *, leaving: bool) -> str:
    if leaving or pod.deleting is not None or pod.end is not None:
        return f"{pod.name} ends: its workers save, and another pod of job {ctx.job.name} takes over"
    others = ctx.spec.min_replicas
    return f"{pod.name} ends as soon as {others} other pods of job {ctx.job.name} are ready to train"

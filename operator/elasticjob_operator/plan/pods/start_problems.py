"""Why pods are missing or do not start, and what the user can do about it: reasons and messages for conditions and
Events. A message says which change the API server accepts, because the template may not change while the job runs.
"""

from __future__ import annotations

from collections.abc import Iterable

from elasticjob_operator.model.cluster.pods import Pod
from elasticjob_operator.model.job.status import Condition
from elasticjob_operator.model.observed import Refusal, RefusalReason, Remedy

IMAGE_PULL_FAILED = "ImagePullFailed"
POD_START_FAILED = "PodStartFailed"
UNSCHEDULABLE = "Unschedulable"
INSUFFICIENT_CAPACITY = "InsufficientCapacity"

_DOES_NOT_START = " does not start: "
"""Part of the message about a container that its kubelet cannot start."""

_NO_ROOM = (
    "Insufficient ", "Too many pods", "free ports", "max volume count", "cannot allocate all claims",
    "were unschedulable", "not-ready", "unreachable", "anti-affinity", "topology spread", "no nodes available",
)  # fmt: skip
"""Parts of the scheduler's messages about nodes that would fit the pod if they were ready, and neither full nor
cordoned."""


CHANGE = "set suspend to true in the same change, and to false once the job is suspended"
"""How to change a field that may not change while the job runs."""


def describe_refusal(refusal: Refusal, field: str = "the template") -> str:
    """Return why the API server refused a child, and what to do; the child is made from this field of the spec."""
    message = refusal.message.rstrip(". ")
    if refusal.skipped:
        field = "rendezvous.store"  # of what comes before workers, only the store is made from a field of the spec
    if refusal.reason is RefusalReason.QUOTA_EXCEEDED:
        return f"{message}. The operator tries again until the quota has room"
    match refusal.remedy:
        case Remedy.CORRECT_SPEC:
            return f"{message}. Correct {field}: {CHANGE}"
        case Remedy.EITHER:
            return f"{message}. The operator tries again. If {field} is wrong, correct it: {CHANGE}"
        case Remedy.WAIT:
            return f"{message}. The operator retries automatically"


def refusal_reason(refusal: Refusal) -> str:
    """Return the reason of a refused pod for FullyScaled."""
    return INSUFFICIENT_CAPACITY if refusal.reason is RefusalReason.QUOTA_EXCEEDED else refusal.reason.value


def describe_waiting(pods: Iterable[Pod]) -> tuple[str, str] | None:
    """Return the reason and the message of the first pod whose kubelet cannot start a container; None without one."""
    pods = tuple(pods)
    if (pod := next((p for p in pods if p.image_error), None)) is not None:
        problem = f"{pod.name} cannot pull image {pod.image_error.rstrip('. ')}"
        remedy = "Push the image, or correct its name or imagePullSecrets in the template"
        return IMAGE_PULL_FAILED, f"{problem}. {remedy}: {CHANGE}"
    if (pod := next((p for p in pods if p.stuck), None)) is not None:
        problem = f"{pod.name}{_DOES_NOT_START}{pod.stuck.rstrip('. ')}"
        return POD_START_FAILED, f"{problem}. Create what is missing, or correct the template: {CHANGE}"
    return None


def is_waiting(condition: Condition) -> bool:
    """Return whether the condition is about a container that its kubelet cannot start.

    The reason is the same where an init container failed.
    """
    return condition.reason == POD_START_FAILED and _DOES_NOT_START in condition.message


def unschedulable_reason(pod: Pod) -> str:
    """Return the reason of an unschedulable pod for FullyScaled."""
    return INSUFFICIENT_CAPACITY if lacks_room(pod) else UNSCHEDULABLE


def describe_unschedulable(pod: Pod) -> str:
    """Return the scheduler's message about the pod. If the cluster has room, say how to correct the template."""
    problem = f"{pod.name} is unschedulable: {pod.unschedulable.rstrip('. ')}"
    if lacks_room(pod):
        return problem
    return (
        f"{problem}. The job continues once a node that fits joins the cluster. If the template asks for the wrong "
        f"thing, correct it: {CHANGE}"
    )


def lacks_room(pod: Pod) -> bool:
    """Return whether nodes would fit an unschedulable pod if they were ready, and neither full nor cordoned."""
    return any(part in pod.unschedulable for part in _NO_ROOM)

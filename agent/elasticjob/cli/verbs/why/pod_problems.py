"""Why pods of a job do not start, wait or do not go away: by their own status and their Events. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from elasticjob._runtime.contract.text import with_noun
from elasticjob.cli.cluster.resources import KubeObject
from elasticjob.cli.objects.pods import is_active, main_container, pod_condition, pod_name, pod_state
from elasticjob.cli.verbs.events import last_seen
from elasticjob.cli.verbs.why.circumstances import Circumstances, Finding, finding
from elasticjob.cli.views.times import parse_time, short_duration

_IMAGE_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_MOUNT_REASONS = ("FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox")
STUCK_SECONDS = 30.0
"""Seconds past its grace period after which a pod that is being deleted is stuck."""


def pod_problems(seen: Circumstances) -> Iterator[Finding]:
    """Yield what keeps pods from running, the stores' first: without a store nothing trains."""
    yield from _not_scheduled(seen)
    yield from _images(seen)
    yield from _containers(seen)
    yield from _volumes(seen)
    yield from _stuck(seen)


def _not_scheduled(seen: Circumstances) -> Iterator[Finding]:
    waiting = [p for p in seen.pods if is_active(p) and pod_condition(p, "PodScheduled").get("status") == "False"]
    if not waiting:
        return
    message = str(pod_condition(waiting[0], "PodScheduled").get("message", ""))
    yield finding(
        f"the scheduler finds no Node for {_named(waiting)}",
        f"{message} {describe_nodes(seen.nodes)}",
        _advice_on_scheduling(message, pod_name(waiting[0])),
    )


def _advice_on_scheduling(message: str, pod: str) -> str:
    if "Insufficient nvidia.com/gpu" in message:
        return "free GPUs or add Nodes: kubectl describe nodes | grep -A8 'Allocated resources'"
    if "Insufficient" in message:
        return "ask for less in the template's resources, scale the job down, or add Nodes: kubectl describe nodes"
    if "taint" in message:
        return "add the template a toleration of the taint that the message names, or remove the taint from the Node"
    if "affinity" in message or "selector" in message:
        return "compare the template's nodeSelector and affinity with: kubectl get nodes --show-labels"
    if "persistentvolumeclaim" in message.lower():
        return "create the claim that the template names: kubectl get pvc"
    return f"kubectl describe pod {pod}"


def _images(seen: Circumstances) -> Iterator[Finding]:
    for pod in seen.pods:
        state, message = pod_state(pod)
        if is_active(pod) and state.removeprefix("Init:") in _IMAGE_REASONS:
            init = state.startswith("Init:")
            what = "elasticjob's image" if init else "its image"
            change = "the chart's value image.repository, or imagePullSecrets" if init else "image or imagePullSecrets"
            yield finding(
                f"pod {pod_name(pod)} cannot pull {what}", message,
                f"push the image, or correct {change} (suspend the job for a change of the template)",
            )  # fmt: skip
            return


def _containers(seen: Circumstances) -> Iterator[Finding]:
    for pod in seen.pods:
        state, message = pod_state(pod)
        known = state.removeprefix("Init:")
        if not is_active(pod) or known in _IMAGE_REASONS:
            continue
        if state.startswith("Init:"):
            yield finding(
                f"an init container of pod {pod_name(pod)} does not succeed ({known})", message,
                f"kubectl logs {pod_name(pod)} --all-containers --tail=20",
            )  # fmt: skip
            return
        if known in ("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "CrashLoopBackOff"):
            yield finding(
                f"the container {main_container(pod)} of pod {pod_name(pod)} cannot start ({known})", message,
                "create the ConfigMap, Secret or volume that the message names; the kubelet tries again by itself",
            )  # fmt: skip
            return


def _volumes(seen: Circumstances) -> Iterator[Finding]:
    """Yield what kubelets say only in Events: while a volume is missing the pod just is ContainerCreating."""
    pending = {pod_name(p) for p in seen.pods if is_active(p) and p.get("status", {}).get("phase") == "Pending"}
    about = [e for e in seen.events if (e.get("involvedObject") or {}).get("name") in pending]
    found = sorted((e for e in about if e.get("reason") in _MOUNT_REASONS), key=last_seen)
    if found:
        pod = found[-1]["involvedObject"]["name"]
        text = str(found[-1].get("message", ""))
        yield finding(
            f"pod {pod} gets no volume or address ({found[-1]['reason']})", text, f"kubectl describe pod {pod}"
        )


def _stuck(seen: Circumstances) -> Iterator[Finding]:
    for pod in seen.pods:
        # The deletionTimestamp is when the grace period ends.
        due = parse_time(pod["metadata"].get("deletionTimestamp"))
        if due is not None and seen.now - due > STUCK_SECONDS:
            node = pod.get("spec", {}).get("nodeName", "-")
            yield finding(
                f"pod {pod_name(pod)} should have ended {short_duration(seen.now - due)} ago:"
                f" the kubelet of Node {node} does not confirm its end",
                describe_nodes([n for n in seen.nodes if n["metadata"]["name"] == node]),
                f"if the Node is down for good: kubectl taint node {node}"
                " node.kubernetes.io/out-of-service=nodeshutdown:NoExecute",
            )
            return


def describe_nodes(nodes: Sequence[KubeObject]) -> str:
    """Return which Nodes are not ready or cordoned; empty if all take pods."""
    down = [n["metadata"]["name"] for n in nodes if pod_condition(n, "Ready").get("status") != "True"]
    cordoned = [n["metadata"]["name"] for n in nodes if n.get("spec", {}).get("unschedulable")]
    parts = [f"not ready: {_few(down)}"] if down else []
    parts += [f"cordoned: {_few(cordoned)}"] if cordoned else []
    return f"(Nodes {'; '.join(parts)})" if parts else ""


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _named(pods: Sequence[KubeObject]) -> str:
    return f"{with_noun(len(pods), 'pod')} of the job ({_few([pod_name(pod) for pod in pods])})"

"""Fields that the jobs of all kinds have in common: life cycle, template, metrics of an autoscaler. Pure."""

from __future__ import annotations

from typing import Any

from elasticjob._runtime.contract.names import KIND
from elasticjob.convert.draft import API_VERSION, JobDraft
from elasticjob.convert.parts.fields import InputObject, JsonObject, Notes

_MULTIKUEUE = "kueue.x-k8s.io/multikueue"
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_NO_COUNTERPART = "is left out: an ElasticJob has no such field"


def put_life_cycle(draft: JobDraft, policy: InputObject, own_controllers: tuple[str, ...]) -> None:
    """Write suspend, managedBy, activeDeadlineSeconds, ttlSecondsAfterFinished and cleanPodPolicy.

    `own_controllers`: values of managedBy that name Kubeflow's own controller.
    """
    if policy.take_switch("suspend"):
        _put_suspend(draft, policy.at("suspend"))
    manager = policy.take_text("managedBy")
    if manager is not None and manager not in own_controllers:
        _put_manager(draft, manager, policy.at("managedBy"))
    if (seconds := policy.take_integer("activeDeadlineSeconds")) is not None:
        effect = "the job has no time limit"
        draft.put_if_supported("activeDeadlineSeconds", seconds, policy.at("activeDeadlineSeconds"), effect)
    if (seconds := policy.take_integer("ttlSecondsAfterFinished")) is not None:
        effect = "the finished job stays until you delete it"
        draft.put_if_supported("ttlSecondsAfterFinished", seconds, policy.at("ttlSecondsAfterFinished"), effect)
    if pods := policy.take_text("cleanPodPolicy"):
        effect = "pods that have ended stay until you delete the job, others end with it"
        draft.put_if_supported("cleanPodPolicy", pods, policy.at("cleanPodPolicy"), effect)


def _put_suspend(draft: JobDraft, source: str) -> None:
    """Kueue suspends a job of a queue until it admits it, and the operator does so by itself."""
    if queue := (draft.metadata.get("labels") or {}).get(_QUEUE_LABEL):
        draft.notes.add(source, f"is left out: the job waits in the queue {queue} by its label, behind the jobs that"
                                " wait there already")  # fmt: skip
    else:
        draft.put_if_supported("suspend", True, source, "the job starts when you apply it")


def _put_manager(draft: JobDraft, manager: str, source: str) -> None:
    if manager == _MULTIKUEUE:
        draft.put_if_supported("managedBy", manager, source, "the operator of this cluster runs the job")
    else:
        draft.notes.add(source, f"{manager} is left out: another controller cannot run an ElasticJob")


def put_queue(draft: JobDraft, queue: str | None, source: str) -> None:
    """Write the label of a Kueue LocalQueue. `queue`: name of a queue in the input, if it has one."""
    labels = draft.metadata.get("labels") or {}
    path = f"metadata.labels[{_QUEUE_LABEL}]"
    if queue and _QUEUE_LABEL not in labels:
        draft.metadata["labels"] = {**labels, _QUEUE_LABEL: queue}
        draft.notes.add(source, f"the label {_QUEUE_LABEL} replaces it: create a LocalQueue of Kueue named {queue}")
    elif queue:
        draft.notes.add(source, f"{queue} has no effect: {path} names the queue")


def autoscaler(draft: JobDraft, metrics: Any, source: str) -> list[JsonObject]:
    """Return a HorizontalPodAutoscaler with these metrics; [] without metrics, or if it cannot name the job."""
    if not metrics:
        return []
    if draft.name is None:
        draft.notes.add(source, "is left out: a HorizontalPodAutoscaler needs metadata.name, and not generateName")
        return []
    if draft.get("elasticPolicy") is None:
        draft.notes.add(source, "is left out: the job has a fixed size; set minReplicas and maxReplicas")
        return []
    draft.notes.add(source, "a HorizontalPodAutoscaler of its own replaces it: delete it together with the job")
    kept = {name: value for name, value in draft.metadata.items() if name in ("name", "namespace")}
    target = {"apiVersion": API_VERSION, "kind": KIND, "name": draft.name}
    low, high = draft.get("elasticPolicy.minReplicas"), draft.get("elasticPolicy.maxReplicas")
    spec = {"scaleTargetRef": target, "minReplicas": low, "maxReplicas": high, "metrics": metrics}
    return [{"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": kept, "spec": spec}]


def put_template(draft: JobDraft, template: JsonObject) -> None:
    """Write the pod template. The pods of the store get its priority: the job trains no longer than they run."""
    draft.put("template", template)
    if priority := template["spec"].get("priorityClassName"):
        draft.put("rendezvous.store.priorityClassName", priority)


def note_unknown(fields: InputObject, notes: Notes) -> None:
    """Add a note for each field that has no counterpart."""
    fields.note_rest(notes, _NO_COUNTERPART)

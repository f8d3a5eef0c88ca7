"""Changes that a TrainJob makes to the pod template of its runtime. Pure.

Each version of the API has another form of them: podSpecOverrides, podTemplateOverrides, templateOverrides and
runtimePatches. All become `PodPatch`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elasticjob.convert.parts.fields import InputObject, JsonObject, Notes

_KEYS = {"volumeMounts": "mountPath", "tolerations": None}
"""Fields that identify the items of a list; None: the list is replaced. Without an entry: `name`."""


@dataclass(frozen=True)
class PodPatch:
    """A change of the pod template of some of a runtime's jobs."""

    path: str
    jobs: tuple[str, ...]
    template: JsonObject
    """Metadata and spec that are merged into the template."""


def take_patches(spec: InputObject, notes: Notes) -> list[PodPatch]:
    """Return the changes in a TrainJob's spec; later ones win."""
    patches = [
        PodPatch(item.path, _targets(item), {"spec": item.rest()}) for item in spec.take_objects("podSpecOverrides")
    ]
    patches += [_override(item) for item in spec.take_objects("podTemplateOverrides")]
    for owner in spec.take_objects("templateOverrides"):
        owner.drop("manager")
        patches += [_override(item) for item in owner.take_objects("pod")]
        owner.note_rest(notes, "is left out: an ElasticJob has pods, and no Job or JobSet")
    for owner in spec.take_objects("runtimePatches"):
        patches += _runtime_patches(owner, notes)
    return patches


def _override(item: InputObject) -> PodPatch:
    item.drop("time")
    return PodPatch(item.path, _targets(item), item.rest())


def _targets(item: InputObject) -> tuple[str, ...]:
    return tuple(str(job.take("name")) for job in item.take_objects("targetJobs"))


def _runtime_patches(owner: InputObject, notes: Notes) -> list[PodPatch]:
    owner.drop("manager", "time")
    runtime = owner.take_object("trainingRuntimeSpec")
    template = runtime.take_object("template")
    job_set = template.take_object("spec")
    patches = []
    for job in job_set.take_objects("replicatedJobs"):
        name = str(job.take("name"))
        job_template = job.take_object("template")
        job_spec = job_template.take_object("spec")
        pod = job_spec.take_object("template")
        patches.append(PodPatch(pod.path, (name,), pod.rest()))
        for rest in (job_spec, job_template, job):
            _note_job_set(rest, notes)
    for rest in (job_set, template, runtime, owner):
        _note_job_set(rest, notes)
    return patches


def _note_job_set(fields: InputObject, notes: Notes) -> None:
    fields.note_rest(notes, "is left out: an ElasticJob has pods, and no Job or JobSet")


def merge_template(base: Any, patch: Any, field: str = "") -> Any:
    """Return `base` changed by `patch` as Kubernetes merges pod templates. `field`: the name of the field."""
    if isinstance(base, dict) and isinstance(patch, dict):
        merged = {**base}
        for name, value in patch.items():
            merged[name] = merge_template(base[name], value, name) if name in base else value
        return merged
    key = _KEYS.get(field, "name")
    if key is None or not (_has_key(base, key) and _has_key(patch, key)):
        return patch
    items = {item[key]: item for item in base}
    for item in patch:
        items[item[key]] = merge_template(items[item[key]], item) if item[key] in items else item
    return list(items.values())


def _has_key(value: Any, key: str) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) and isinstance(item.get(key), str) for item in value)

"""The ElasticJob that a conversion writes: only fields that this version's CRD has, in the order of the CRD. Pure."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

from elasticjob._runtime.contract.commands.torchrun_command import CommandError
from elasticjob._runtime.contract.commands.worker_count import count_workers, requested_devices
from elasticjob._runtime.contract.names import GROUP, KIND, VERSION, Backend
from elasticjob._runtime.local.manifest.job_schema import Schema, find_problems, job_schema
from elasticjob.convert.parts.fields import ConvertError, InputObject, JsonObject, Notes

API_VERSION = f"{GROUP}/{VERSION}"
MAX_NAME = 50
"""Most characters of a job's name, as in the CRD."""
_HASH = 8
_SERVER_METADATA = (
    "creationTimestamp", "deletionGracePeriodSeconds", "deletionTimestamp", "generation", "managedFields",
    "resourceVersion", "selfLink", "uid",
)  # fmt: skip
_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


class JobDraft:
    """An ElasticJob under construction."""

    def __init__(self, metadata: InputObject, notes: Notes) -> None:
        self.notes = notes
        self._spec_schema: Schema = job_schema()["properties"]["spec"]
        self._spec: JsonObject = {}
        self.metadata = _metadata(metadata, notes)

    @property
    def name(self) -> str | None:
        """The job's name; None if the API server generates it."""
        return self.metadata.get("name")

    def supports(self, path: str) -> bool:
        """Return whether the CRD has a field, by its path in the spec."""
        return self._find(path) is not None

    def put(self, path: str, value: Any) -> None:
        """Write a field, by its path in the spec."""
        *parents, name = path.split(".")
        target = self._spec
        for parent in parents:
            target = target.setdefault(parent, {})
        target[name] = value

    def get(self, path: str) -> Any:
        """Return a field that was written, by its path in the spec; None if it was not."""
        value: Any = self._spec
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def put_number(self, path: str, value: int, source: str) -> None:
        """Write a number, at most and at least what the CRD allows."""
        schema = self._find(path) or {}
        allowed = min(max(value, schema.get("minimum", value)), schema.get("maximum", value))
        if allowed != value:
            self.notes.add(source, f"{value} is not allowed: spec.{path} is {allowed}, the nearest number")
        self.put(path, allowed)

    def put_if_supported(self, path: str, value: Any, source: str, effect: str) -> None:
        """Write a field if the CRD has it, else add a note with the effect of its absence."""
        if not self.supports(path):
            self.notes.add(source, f"not supported yet: {effect}")
        elif isinstance(value, int) and not isinstance(value, bool):
            self.put_number(path, value, source)
        else:
            self.put(path, value)

    def finish(self) -> JsonObject:
        """Return the manifest. ConvertError: a cluster would refuse it; the message is the cluster's."""
        spec = in_schema_order(self._spec_schema, self._spec)
        job = {"apiVersion": API_VERSION, "kind": KIND, "metadata": self.metadata, "spec": spec}
        checked = {**job, "metadata": {**self.metadata, "name": self._checked_name()}}
        if problems := find_problems(checked):
            raise ConvertError("the ElasticJob would be refused:\n  " + "\n  ".join(problems))
        _check_worker_count(spec)
        return copy.deepcopy(job)

    def _checked_name(self) -> str:
        """Return the name that the CRD's rules check: the API server adds five characters to generateName."""
        if name := self.name:
            return name
        if prefix := self.metadata.get("generateName"):
            return f"{prefix}xxxxx"
        raise ConvertError("metadata.name: is required")

    def _find(self, path: str) -> Schema | None:
        schema: Schema | None = self._spec_schema
        for name in path.split("."):
            schema = (schema or {}).get("properties", {}).get(name)
        return schema


def _metadata(metadata: InputObject, notes: Notes) -> JsonObject:
    kept: JsonObject = {name: metadata.take_text(name) for name in ("name", "generateName", "namespace")}
    kept["labels"] = metadata.take_object("labels").rest()
    annotations = metadata.take_object("annotations")
    annotations.drop(_APPLIED)
    kept["annotations"] = annotations.rest()
    kept = {name: value for name, value in kept.items() if value}
    name = kept.get("name")
    if name and len(name) > MAX_NAME:
        kept["name"] = _short_name(name)
        notes.add(metadata.at("name"), f"the job's name is {kept['name']}: at most {MAX_NAME} characters are allowed")
    if name:
        kept.pop("generateName", None)
    metadata.drop(*_SERVER_METADATA)
    metadata.note_rest(notes, "is left out: only name, namespace, labels and annotations are converted")
    return kept


def _short_name(name: str) -> str:
    """Return a name of MAX_NAME characters at most; different names stay different."""
    digest = hashlib.sha256(name.encode()).hexdigest()[:_HASH]
    return f"{name[: MAX_NAME - _HASH - 1].rstrip('-')}-{digest}"


def in_schema_order(schema: Schema, value: JsonObject) -> JsonObject:
    """Return the fields in the schema's order. The pod template keeps the order of the input."""
    known = schema.get("properties", {})
    ordered: JsonObject = {}
    for name in [name for name in known if name in value] + [name for name in value if name not in known]:
        item = value[name]
        nested = isinstance(item, dict) and name != "template" and name in known
        ordered[name] = in_schema_order(known[name], item) if nested else item
    return ordered


def _check_worker_count(spec: JsonObject) -> None:
    """Raise ConvertError if the operator would report the job's number of workers as an error."""
    container = spec["template"]["spec"]["containers"][0]
    resources = container.get("resources") or {}
    env = {item["name"]: item["value"] for item in container.get("env") or () if isinstance(item.get("value"), str)}
    command = [*(container.get("command") or ()), *(container.get("args") or ())]
    devices = requested_devices(resources.get("requests") or {}, resources.get("limits") or {})
    backend = Backend((spec.get("rendezvous") or {}).get("backend", Backend.ELASTICJOB))
    try:
        count_workers(spec.get("nprocPerNode"), command, env, devices, backend)
    except CommandError as error:
        raise ConvertError(str(error)) from None

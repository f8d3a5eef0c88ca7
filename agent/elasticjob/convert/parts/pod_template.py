"""The pod template of a job: what elasticjob sets itself is removed, and the training container comes first. Pure."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from elasticjob._runtime.contract.commands.python_command import expand_variables
from elasticjob._runtime.contract.commands.reserved_variables import RESERVED_PREFIX, is_reserved_variable
from elasticjob._runtime.contract.commands.worker_count import Devices, requested_devices
from elasticjob.convert.parts.fields import ConvertError, InputObject, JsonObject, Notes
from elasticjob.convert.parts.training_command import TrainingCommand, read_command

_REPLACED_BY = {
    "PET_NPROC_PER_NODE": "spec.nprocPerNode",
    "PET_NNODES": "spec.replicas and spec.elasticPolicy",
    "PET_MAX_RESTARTS": "spec.failurePolicy.maxRestarts",
}
_SET_BY_KUBEFLOW = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PET_VARIABLE = re.compile(r"\$[{(]?(PET_[A-Z0-9_]+)")
_COMMAND_PORT = re.compile(r"(?:master[-_]port[=\s]+|rdzv[-_]endpoint[=\s]+\S*:)([0-9]+)")
_OWN_LABELS = tuple(f"app.kubernetes.io/{name}" for name in ("component", "instance", "managed-by", "name"))
_OPERATOR_SETS = "is left out: elasticjob sets it for each pod"
_PORT_NAME, _PORT = "pytorchjob-port", 23456


@dataclass(frozen=True)
class TrainingTemplate:
    """A pod template that elasticjob accepts, and what it says about the workers."""

    template: JsonObject
    command: TrainingCommand
    devices: Devices
    env: Mapping[str, str]
    """The training container's variables before any is removed, as far as the manifest has their values."""
    path: str
    """Path of the training container in the input."""


def read_template(template: InputObject, trainer: str | None, notes: Notes) -> TrainingTemplate:
    """Return the template of a job. `trainer`: name of the training container in the input; None: it is the first."""
    metadata = template.take_object("metadata")
    kept = {name: metadata.take_object(name).rest() for name in ("labels", "annotations")}
    for name in _OWN_LABELS:
        if kept["labels"].pop(name, None) is not None:
            notes.add(f"{metadata.at('labels')}[{name}]", _OPERATOR_SETS)
    metadata.drop("creationTimestamp")
    metadata.note_rest(notes, "is left out: only labels and annotations of pods are converted")
    spec = template.take_object("spec")
    for name in ("hostname", "subdomain"):
        if spec.take(name):
            notes.add(spec.at(name), _OPERATOR_SETS)
    if spec.take("ephemeralContainers"):
        notes.add(spec.at("ephemeralContainers"), "is left out: a pod template cannot have it")
    spec.drop("restartPolicy")
    containers = _containers(spec, trainer, notes)
    init_containers = [checked_container(item) for item in spec.take_objects("initContainers")]
    pod: JsonObject = {}
    if init_containers:
        pod["initContainers"] = [_without_reserved(c, f"{spec.at('initContainers')}[{i}]", notes)
                                 for i, c in enumerate(init_containers)]  # fmt: skip
    path, first = containers[0]
    env = literal_values(first)
    command = read_command(first.get("command"), first.get("args"), env, path, notes)
    trained = _with_command(_without_reserved(first, path, notes), command)
    _note_variables(trained, path, notes)
    others = [_without_reserved(container, at, notes) for at, container in containers[1:]]
    pod = {**pod, "containers": [_without_port(c) for c in (trained, *others)], **spec.rest()}
    resources = first.get("resources") or {}
    _note_what_pods_lack(pod, spec, first, env, notes)
    devices = requested_devices(resources.get("requests") or {}, resources.get("limits") or {})
    template.note_rest(notes, "is left out: it is no field of a pod template")
    found = {name: value for name, value in kept.items() if value}
    written = {"metadata": found, "spec": pod} if found else {"spec": pod}
    return TrainingTemplate(copy.deepcopy(written), command, devices, env, path)


def _note_what_pods_lack(
    pod: JsonObject, spec: InputObject, trained: JsonObject, env: Mapping[str, str], notes: Notes
) -> None:
    """Add notes about what pods of Kubernetes have by default and those of an ElasticJob have not."""
    if pod.get("serviceAccountName") and "automountServiceAccountToken" not in pod:
        notes.add(spec.at("automountServiceAccountToken"), "is false by default: write true if the script calls the"
                                                           " API server of Kubernetes")  # fmt: skip
    rendezvous = {env.get("MASTER_PORT"), *_COMMAND_PORT.findall(" ".join(map(str, _words(trained))))}
    ports = [port for c in pod["containers"] for port in c.get("ports") or () if "containerPort" in port]
    open_ports = sorted({str(port["containerPort"]) for port in ports} - rendezvous)
    if open_ports and not pod.get("hostNetwork"):
        notes.add(spec.at("containers"), f"the NetworkPolicy of an ElasticJob closes port {', '.join(open_ports)} for"
                                         " pods outside the job: add a policy that opens it, or write"
                                         " spec.networkIsolation false")  # fmt: skip


def _words(container: JsonObject) -> list[str]:
    return [*(container.get("command") or ()), *(container.get("args") or ())]


def _containers(spec: InputObject, trainer: str | None, notes: Notes) -> list[tuple[str, JsonObject]]:
    """Return path and fields of each container, the training container first."""
    items = [(item.path, checked_container(item)) for item in spec.take_objects("containers")]
    if not items:
        raise ConvertError(f"{spec.at('containers')}: is empty: write one container with an image and a command")
    found = (i for i, (_, container) in enumerate(items) if trainer is None or container.get("name") == trainer)
    at = next(found, None)
    if at is None:
        at = 0
        notes.add(f"{items[0][0]}.name", f"no container is named {trainer}: the first one is taken for the trainer")
    for i, (path, container) in enumerate(items):
        if container.get("name") == "trainer" and i != at:
            raise ConvertError(f"{path}.name: rename it: elasticjob takes a container named trainer for the trainer")
    first = items[at]
    if not first[1].get("command"):
        image = first[1].get("image") or "IMAGE"
        raise ConvertError(
            f"{first[0]}.command: is missing, and elasticjob cannot read the ENTRYPOINT of {image}: write it as the"
            f" command; `docker image inspect {image}` prints it"
        )
    return [first, *items[:at], *items[at + 1 :]]


def checked_container(item: InputObject) -> JsonObject:
    """Return a container whose fields that are read here have the right types; ConvertError if they have not."""
    container = item.rest()
    read = InputObject(container, item.path)
    for name in ("command", "args"):
        words = read.take(name)
        if words is not None and not (isinstance(words, list) and all(isinstance(word, str) for word in words)):
            raise ConvertError(f"{item.at(name)}: want a list of texts, got {words!r}")
    for name in ("env", "ports"):
        read.take_objects(name)
    resources = read.take_object("resources")
    for name in ("requests", "limits"):
        resources.take_object(name)
    return container


def literal_values(container: JsonObject) -> dict[str, str]:
    """Return the variables whose values the manifest has, expanded as the kubelet does it."""
    values: dict[str, str] = {}
    for item in container.get("env") or ():
        if isinstance(item.get("value"), str):
            values[str(item.get("name"))] = expand_variables(item["value"], values)
    return values


def _with_command(container: JsonObject, command: TrainingCommand) -> JsonObject:
    changed: JsonObject = {}
    for name, value in container.items():
        if name == "command":
            changed["command"] = command.command
        elif name != "args" or command.args is not None:
            changed[name] = value
    return changed


def _without_reserved(container: JsonObject, path: str, notes: Notes) -> JsonObject:
    env = container.get("env")
    if env is None:
        return container
    kept = []
    for i, item in enumerate(env):
        name = str(item.get("name"))
        if name in _REPLACED_BY or is_reserved_variable(name):
            notes.add(f"{path}.env[{i}]", f"{name} is left out: {_instead(name)}")
        else:
            kept.append(item)
    return {key: kept if key == "env" else value for key, value in container.items() if key != "env" or kept}


def _instead(name: str) -> str:
    if name.startswith(RESERVED_PREFIX):
        return "the prefix is elasticjob's"
    if name in _REPLACED_BY:
        return f"{_REPLACED_BY[name]} replaces it"
    return "elasticjob sets it for each worker"


def _note_variables(container: JsonObject, path: str, notes: Notes) -> None:
    """Add a note for each variable that Kubeflow sets for the pod and elasticjob does not, such as `$(RANK)`."""
    for at, text in _texts(container, path):
        for name in _PET_VARIABLE.findall(text):
            notes.add(at, f"uses {name}, which elasticjob does not set: remove the option that has it as its value")
        for name in _SET_BY_KUBEFLOW:
            if f"$({name})" in text:
                notes.add(at, f"$({name}) is not expanded: elasticjob sets {name} for each worker, where the program"
                              " reads it from its environment")  # fmt: skip


def _texts(container: JsonObject, path: str) -> Iterator[tuple[str, str]]:
    for name in ("command", "args"):
        for word in container.get(name) or ():
            yield f"{path}.{name}", str(word)
    for item in container.get("env") or ():
        yield f"{path}.env", str(item.get("value", ""))


def _without_port(container: JsonObject) -> JsonObject:
    """Remove the port of the rendezvous of a PyTorchJob; elasticjob's own needs none in the template."""
    if "ports" not in container:
        return container
    ports = [p for p in container["ports"] if not _is_rendezvous_port(p)]
    return {key: ports if key == "ports" else value for key, value in container.items() if key != "ports" or ports}


def _is_rendezvous_port(port: JsonObject) -> bool:
    return port.get("name") == _PORT_NAME or port.get("containerPort") == _PORT


# ---- differences -----------------------------------------------------------------------------------------------------


def find_differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Return the paths of fields that differ between two templates. Items of lists are matched by their names."""
    form = "{}.{}" if path else "{}{}"
    if _is_named(one) and _is_named(other):
        one, other, form = _by_name(one), _by_name(other), "{}[{}]"
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return [] if one == other else [path]
    names = [*one, *(name for name in other if name not in one)]
    children = ((one.get(name), other.get(name), form.format(path, name)) for name in names)
    return [found for a, b, at in children for found in find_differences(a, b, at)]


def _is_named(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(i, dict) and "name" in i for i in value)


def _by_name(items: list[JsonObject]) -> JsonObject:
    return {str(item["name"]): item for item in items}

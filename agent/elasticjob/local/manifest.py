"""Read an ElasticJob manifest for a local run. Pure, except for `load_manifest`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from elasticjob.contract.messages import HangAction, RoundSettings
from elasticjob.contract.names import GROUP, KIND, VERSION, WORKER_ROLE, Backend

E = TypeVar("E", bound=Enum)

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?$")
_VARIABLE = re.compile(r"\$(\$|\(([^()]*)\))")
_GPU = "nvidia.com/gpu"


class ManifestError(Exception):
    """The manifest is invalid. The message names the field and its allowed values."""


@dataclass(frozen=True)
class LocalJob:
    """The fields of a manifest that a local run uses."""

    name: str
    settings: RoundSettings
    nproc_per_node: int
    backend: Backend
    role: str
    """torch's role of the workers. Empty: `default`."""
    preload: tuple[str, ...]
    command: tuple[str, ...]
    env: Mapping[str, str]
    """Environment variables of the trainer container."""
    working_dir: str | None = None
    gpus: int = 0


def load_manifest(path: str) -> Any:
    """Return the ElasticJob in a YAML file. Raise ManifestError unless the file has exactly one."""
    try:
        import yaml
    except ImportError:
        raise ManifestError("PyYAML is missing: pip install 'elasticjob[cli]'") from None
    try:
        documents = [d for d in yaml.safe_load_all(Path(path).read_text()) if d is not None]
    except OSError as error:
        raise ManifestError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path}: invalid YAML: {error}") from None
    jobs = [d for d in documents if isinstance(d, dict) and d.get("kind") == KIND]
    if len(jobs) != 1:
        raise ManifestError(f"{path}: want one document of kind {KIND}, found {len(jobs)}")
    return jobs[0]


def parse_local_job(raw: Any, *, nodes: int | None = None) -> LocalJob:
    """Check a manifest and return the job. `nodes` replaces spec.replicas. Raise ManifestError for an invalid field."""
    root = _Field(raw, "")
    if (version := root.get("apiVersion").text()) != f"{GROUP}/{VERSION}":
        raise ManifestError(f"apiVersion: want {GROUP}/{VERSION}, got {version!r}")
    name = root.get("metadata").get("name").text()
    if not _NAME.match(name) or len(name) > 50:
        raise ManifestError(f"metadata.name: {name!r}: lower-case letters, digits and '-', at most 50")
    spec = root.get("spec")
    container = _trainer(spec.get("template").get("spec").get("containers"))
    env = _env(container.get("env"))
    command = tuple(_expand(text, env) for text in (*container.get("command").texts(), *container.get("args").texts()))
    if not container.get("command").texts():
        raise container.get("command").error("is required, for example [python, train.py]")
    role = spec.get("template").get("metadata").get("annotations").get(WORKER_ROLE)
    directory = container.get("workingDir")
    return LocalJob(
        name=name,
        settings=_settings(spec, nodes),
        nproc_per_node=_nproc(spec.get("nprocPerNode"), container),
        backend=spec.get("rendezvous").get("backend").choice(Backend, Backend.ELASTICJOB),
        role=role.text() if role.present else "",
        preload=spec.get("preload").texts(("torch", "torch._dynamo")),
        command=command,
        env=env,
        working_dir=directory.text() if directory.present else None,
        gpus=_gpus(container),
    )


@dataclass(frozen=True)
class _Field:
    """A value in the manifest and its path. The value of a missing field is None."""

    value: Any
    path: str

    @property
    def present(self) -> bool:
        return self.value is not None

    def error(self, problem: str) -> ManifestError:
        return ManifestError(f"{self.path or 'manifest'}: {problem}")

    def get(self, name: str) -> _Field:
        if self.value is not None and not isinstance(self.value, dict):
            raise self.error(f"want an object, got {self.value!r}")
        return _Field((self.value or {}).get(name), f"{self.path}.{name}" if self.path else name)

    def items(self) -> list[_Field]:
        if self.value is not None and not isinstance(self.value, list):
            raise self.error(f"want a list, got {self.value!r}")
        return [_Field(item, f"{self.path}[{i}]") for i, item in enumerate(self.value or ())]

    def text(self) -> str:
        if not self.present:
            raise self.error("is required")
        if not isinstance(self.value, str):
            raise self.error(f"want text, got {self.value!r}; put it in quotes")
        return self.value

    def texts(self, default: tuple[str, ...] = ()) -> tuple[str, ...]:
        return tuple(item.text() for item in self.items()) if self.present else default

    def choice(self, kind: type[E], default: E) -> E:
        if not self.present:
            return default
        try:
            return kind(self.value)
        except ValueError:
            raise self.error(f"want {' or '.join(e.value for e in kind)}, got {self.value!r}") from None

    def integer(self, low: int, high: int, default: int | None = None) -> int:
        if not self.present and default is not None:
            return default
        if not self.present:
            raise self.error("is required")
        if type(self.value) is not int or not low <= self.value <= high:
            raise self.error(f"want a whole number from {low} to {high}, got {self.value!r}")
        return self.value

    def seconds(self, low: float, high: float, default: float) -> float:
        if not self.present:
            return default
        value = self.value
        if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
            raise self.error(f"want seconds from {low:g} to {high:g}, got {value!r}")
        return float(value)


def _trainer(containers: _Field) -> _Field:
    items = containers.items()
    if not items:
        raise containers.error("at least one container is required")
    return next((c for c in items if c.get("name").value == "trainer"), items[0])


def _env(field: _Field) -> dict[str, str]:
    env: dict[str, str] = {}
    for item in field.items():
        if item.get("valueFrom").present:
            raise item.get("valueFrom").error("cannot be resolved outside a cluster; use `value`")
        value = item.get("value")
        env[item.get("name").text()] = _expand(value.text(), env) if value.present else ""
    return env


def _expand(text: str, env: Mapping[str, str]) -> str:
    """Expand `$(NAME)` as Kubernetes does: `$$` is a dollar sign, and an unknown name stays unchanged."""
    return _VARIABLE.sub(lambda m: "$" if m[1] == "$" else env.get(m[2], m[0]), text)


def _settings(spec: _Field, nodes: int | None) -> RoundSettings:
    policy, rendezvous = spec.get("elasticPolicy"), spec.get("rendezvous")
    replicas = spec.get("replicas")
    if policy.present:
        low = policy.get("minReplicas").integer(1, 4096)
        high = policy.get("maxReplicas").integer(1, 4096)
        if low > high:
            raise policy.get("minReplicas").error(f"{low} is more than maxReplicas, {high}")
        target = replicas.integer(1, 4096, high)
    else:
        target = replicas.integer(1, 4096, 1)
        low = high = target if nodes is None else nodes
    target = target if nodes is None else nodes
    if not low <= target <= high:
        field = "--nodes" if nodes is not None else replicas.path
        raise ManifestError(f"{field}: {target} must be within minReplicas, {low}, and maxReplicas, {high}")
    return RoundSettings(
        min_nodes=low,
        max_nodes=high,
        target=target,
        spares=policy.get("spares").integer(0, 64, 0),
        max_restarts=spec.get("failurePolicy").get("maxRestarts").integer(0, 10000, 3),
        join_timeout=rendezvous.get("joinTimeoutSeconds").seconds(10, 86400, 600),
        last_call_timeout=rendezvous.get("lastCallTimeoutSeconds").seconds(0, 3600, 30),
        stop_grace=spec.get("stopGraceSeconds").seconds(0, 3600, 1),
        graceful_shutdown=policy.get("gracefulShutdownSeconds").seconds(0, 3600, 120),
        keep_alive_interval=rendezvous.get("keepAliveIntervalSeconds").seconds(1, 300, 1),
        keep_alive_max_attempts=rendezvous.get("keepAliveMaxAttempts").integer(1, 100, 3),
        scale_up_stabilization=policy.get("scaleUpStabilizationSeconds").seconds(0, 3600, 30),
        progress_timeout=spec.get("hangPolicy").get("progressTimeoutSeconds").seconds(1, 86400, 0),
        hang_action=spec.get("hangPolicy").get("action").choice(HangAction, HangAction.RESTART_GROUP),
    )


def _nproc(field: _Field, container: _Field) -> int:
    """Return the number of workers of a node, as on a cluster.

    `auto` and `gpu`: the GPU limit of the trainer, at least 1. `cpu`: 1.
    """
    if field.value in (None, "auto", "gpu", "cpu"):
        return 1 if field.value == "cpu" else max(1, _gpus(container))
    if isinstance(field.value, str) and field.value.isdigit():
        return _Field(int(field.value), field.path).integer(1, 64)
    return field.integer(1, 64)


def _gpus(container: _Field) -> int:
    limit = str(container.get("resources").get("limits").get(_GPU).value)
    return int(limit) if limit.isdigit() else 0

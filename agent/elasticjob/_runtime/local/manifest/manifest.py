"""Read an ElasticJob manifest for a local run. Pure, except for `load_manifest` and the package's own schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from elasticjob._runtime.contract.commands.launchers import check_launcher
from elasticjob._runtime.contract.commands.python_command import expand_variables
from elasticjob._runtime.contract.commands.torchrun_command import CommandError
from elasticjob._runtime.contract.commands.worker_count import WorkerCount, count_workers, requested_devices
from elasticjob._runtime.contract.failures.failure_rules import parse_rules
from elasticjob._runtime.contract.log_rules.rules import LogRule, LogRuleError, decode_log_rules
from elasticjob._runtime.contract.messages import HangAction, RoundSettings, SuccessPolicy, allowed_size
from elasticjob._runtime.contract.names import GROUP, KIND, VERSION, WORKER_ROLE, Backend, TrainerIntegration
from elasticjob._runtime.local.manifest.job_schema import find_problems
from elasticjob._runtime.local.manifest.manifest_yaml import ManifestYamlError, read_yaml_documents

E = TypeVar("E", bound=Enum)

_GPU = "nvidia.com/gpu"
_SHOWN = 80
"""Characters of a value in a message."""
MAX_NODES = 4096
"""Most pods of a job, as in the CRD."""


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
    nproc_is_default: bool = False
    """Whether the manifest leaves the number of workers open (`WorkerCount.is_default`)."""
    trainer_integration: TrainerIntegration = TrainerIntegration.AUTO


def load_manifest(path: str) -> Any:
    """Return the ElasticJob in a YAML file. Raise ManifestError unless the file has exactly one."""
    try:
        documents = read_yaml_documents(Path(path).read_text(encoding="utf-8"))
    except ImportError:
        raise ManifestError("PyYAML is missing: pip install pyyaml") from None
    except OSError as error:
        raise ManifestError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ManifestError(f"{path}: is not YAML: {error}") from None
    except ManifestYamlError as error:
        raise ManifestError(f"{path}: {error}") from None
    jobs = [d for d in documents if isinstance(d, dict) and d.get("kind") == KIND]
    if len(jobs) != 1:
        raise ManifestError(f"{path}: want one document of kind {KIND}, found {len(jobs)}")
    return jobs[0]


def parse_local_job(raw: Any, *, nodes: int | None = None) -> LocalJob:
    """Check a manifest and return the job. `nodes` replaces spec.replicas.

    Raise ManifestError for what a cluster refuses, and for what a local run cannot do.
    """
    root = _Field(raw, "")
    if (version := root.get("apiVersion").text()) != f"{GROUP}/{VERSION}":
        raise ManifestError(f"apiVersion: want {GROUP}/{VERSION}, got {version!r}")
    name = root.get("metadata").get("name").text()
    if problems := find_problems(raw):
        raise ManifestError("\n  ".join(problems))
    spec = root.get("spec")
    if spec.get("suspend").value is True:
        raise spec.get("suspend").error("nothing of a suspended job runs: remove it, or set it to false")
    container = _trainer(spec.get("template").get("spec").get("containers"))
    env = _env(container.get("env"))
    words = (*container.get("command").texts(), *container.get("args").texts())
    command = tuple(expand_variables(word, env) for word in words)
    role = spec.get("template").get("metadata").get("annotations").get(WORKER_ROLE)
    directory = container.get("workingDir")
    backend = spec.get("rendezvous").get("backend").choice(Backend.ELASTICJOB)
    workers = _workers(spec.get("nprocPerNode"), container, command, env, backend)
    return LocalJob(
        name=name,
        settings=_settings(spec, nodes),
        nproc_per_node=workers.number,
        nproc_is_default=workers.is_default,
        backend=backend,
        role=role.text() if role.present else "",
        preload=spec.get("preload").texts(("torch", "torch._dynamo")),
        command=command,
        env=env,
        working_dir=directory.text() if directory.present else None,
        gpus=_gpus(container),
        trainer_integration=spec.get("trainerIntegration").choice(TrainerIntegration.AUTO),
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
        return _Field(self.entries().get(name), f"{self.path}.{name}" if self.path else name)

    def entries(self) -> Mapping[str, Any]:
        if self.value is not None and not isinstance(self.value, dict):
            raise self.error(f"want an object, got {_shown(self.value)}")
        return self.value or {}

    def items(self) -> list[_Field]:
        if self.value is not None and not isinstance(self.value, list):
            raise self.error(f"want a list, got {_shown(self.value)}")
        return [_Field(item, f"{self.path}[{i}]") for i, item in enumerate(self.value or ())]

    def text(self) -> str:
        if not self.present:
            raise self.error("is required")
        if not isinstance(self.value, str):
            raise self.error(f"want text, got {_shown(self.value)}; put it in quotes")
        return self.value

    def texts(self, default: tuple[str, ...] = ()) -> tuple[str, ...]:
        return tuple(item.text() for item in self.items()) if self.present else default

    def choice(self, default: E) -> E:
        return type(default)(self.value) if self.present else default

    def integer(self, default: int) -> int:
        return int(self.value) if self.present else default

    def seconds(self, default: int) -> float:
        return float(self.integer(default))


def _shown(value: Any) -> str:
    """Return a value of the manifest for a message, cut to one line."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _trainer(containers: _Field) -> _Field:
    items = containers.items()
    return next((c for c in items if c.get("name").value == "trainer"), items[0])


def _env(field: _Field) -> dict[str, str]:
    env: dict[str, str] = {}
    for item in field.items():
        if item.get("valueFrom").present:
            raise item.get("valueFrom").error("cannot be resolved outside a cluster; use `value`")
        value = item.get("value")
        env[item.get("name").text()] = expand_variables(value.text(), env) if value.present else ""
    return env


def _settings(spec: _Field, nodes: int | None) -> RoundSettings:
    policy, rendezvous = spec.get("elasticPolicy"), spec.get("rendezvous")
    replicas = spec.get("replicas")
    elastic = policy.get("maxReplicas").present
    if elastic:
        low, high = policy.get("minReplicas").integer(1), policy.get("maxReplicas").integer(1)
        target = replicas.integer(high)
    else:
        target = replicas.integer(1)
        low = high = target if nodes is None else nodes
    target = target if nodes is None else nodes
    if not max(1, low) <= target <= min(high, MAX_NODES):
        bounds = f"minReplicas, {low}, and maxReplicas, {high}" if elastic else f"1 and {MAX_NODES}"
        raise ManifestError(f"--nodes: {target} must be within {bounds}")
    step = policy.get("replicaIncrementStep").integer(1)
    return RoundSettings(
        min_nodes=low,
        max_nodes=high,
        target=allowed_size(target, low, step),
        spares=policy.get("spares").integer(0),
        max_restarts=spec.get("failurePolicy").get("maxRestarts").integer(3),
        join_timeout=rendezvous.get("joinTimeoutSeconds").seconds(600),
        last_call_timeout=rendezvous.get("lastCallTimeoutSeconds").seconds(30),
        stop_grace=spec.get("stopGraceSeconds").seconds(1),
        graceful_shutdown=policy.get("gracefulShutdownSeconds").seconds(120),
        keep_alive_interval=rendezvous.get("keepAliveIntervalSeconds").seconds(1),
        keep_alive_max_attempts=rendezvous.get("keepAliveMaxAttempts").integer(3),
        progress_timeout=spec.get("hangPolicy").get("progressTimeoutSeconds").seconds(0),
        hang_action=spec.get("hangPolicy").get("action").choice(HangAction.RESTART_GROUP),
        scale_up_stabilization=policy.get("scaleUpStabilizationSeconds").seconds(30),
        increment=step,
        restart_window=spec.get("failurePolicy").get("restartWindowSeconds").seconds(0),
        backoff=spec.get("failurePolicy").get("backoffSeconds").seconds(0),
        max_backoff=spec.get("failurePolicy").get("maxBackoffSeconds").seconds(300),
        failure_rules=parse_rules(spec.get("failurePolicy").get("rules").value),
        log_rules=_log_rules(spec),
        success_policy=spec.get("successPolicy").choice(SuccessPolicy.ALL),
    )


def _log_rules(spec: _Field) -> tuple[LogRule, ...]:
    try:
        return decode_log_rules(spec.get("logRules").value)
    except LogRuleError as error:
        raise ManifestError(f"spec: {error}") from None


def _workers(
    field: _Field, container: _Field, command: tuple[str, ...], env: Mapping[str, str], backend: Backend
) -> WorkerCount:
    """Return the number of workers of a pod, as on a cluster."""
    resources = container.get("resources")
    devices = requested_devices(resources.get("requests").entries(), resources.get("limits").entries())
    try:
        check_launcher(command, backend)
        return count_workers(field.value, command, env, devices, backend)
    except CommandError as error:
        raise ManifestError(f"spec: {error}") from None


def _gpus(container: _Field) -> int:
    limit = str(container.get("resources").get("limits").get(_GPU).value)
    return int(limit) if limit.isdigit() else 0

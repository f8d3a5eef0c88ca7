"""A job's spec with every default applied.

The API server has validated the spec; parsing tolerates invalid values nevertheless.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from elasticjob._runtime.contract.commands.launchers import check_launcher
from elasticjob._runtime.contract.commands.python_command import expand_variables
from elasticjob._runtime.contract.commands.torchrun_command import CommandError
from elasticjob._runtime.contract.commands.worker_count import WorkerCount, count_workers, quantity, requested_devices
from elasticjob._runtime.contract.failures.failure_rules import FailureRule, parse_rules
from elasticjob._runtime.contract.log_rules.rules import LogRule, LogRuleError, decode_log_rules
from elasticjob._runtime.contract.messages import (
    HangAction,
    RestartStrategy,
    RoundSettings,
    SuccessPolicy,
    allowed_size,
)
from elasticjob._runtime.contract.names import DEFAULT_PORT, Backend, TrainerIntegration
from elasticjob_operator.model.cluster.raw import Raw, at, integer, mapping, objects, sequence, text
from elasticjob_operator.model.job.store_spec import StoreSpec, read_store

E = TypeVar("E", bound=Enum)

DEFAULT_PRELOAD = ("torch", "torch._dynamo")
GPU = "nvidia.com/gpu"
"""The resource name of NVIDIA's GPUs."""
TRAINER = "trainer"
"""The container of this name is the trainer; without one, the first container is."""
LEAVE_SECONDS = 5
"""Seconds that an agent needs after the end of its workers to leave the job in order."""
DEFAULT_GRACE = 30
"""Seconds of terminationGracePeriodSeconds that Kubernetes applies to a pod that sets none."""


class CleanPods(str, Enum):
    """`spec.cleanPodPolicy`: which worker pods are deleted at the job's end."""

    ALL = "All"
    RUNNING = "Running"
    NONE = "None"


class GangProvider(str, Enum):
    """`spec.gang.provider`: the scheduler that places the smallest number of a job's pods together or not at all."""

    NONE = "None"
    """Also written `none`, as every other value that is not known."""
    COSCHEDULING = "coscheduling"
    VOLCANO = "volcano"
    KUBERNETES = "kubernetes"


class PodReplacement(str, Enum):
    """`spec.podReplacementPolicy`: when a pod that is being deleted gets a successor."""

    TERMINATING_OR_FAILED = "TerminatingOrFailed"
    FAILED = "Failed"


class Placement(str, Enum):
    """`spec.placement`: where the scheduler prefers to place a job's worker pods."""

    NONE = "None"
    PACKED = "Packed"
    SPREAD = "Spread"


class SpecError(ValueError):
    """No pod can be made from the spec. The message names what the user must change."""


@dataclass(frozen=True)
class JobSpec:
    """The spec with its defaults. Durations are in seconds."""

    target: int
    """Number of nodes that the job should have now, within min_replicas and max_replicas."""
    min_replicas: int
    max_replicas: int
    nproc_per_node: int
    template: Raw
    spares: int = 0
    """Number of standby nodes beyond the target."""
    increment: int = 1
    """The job has min_replicas nodes plus a multiple of this."""
    scale_up_stabilization: int = 30
    backend: Backend = Backend.ELASTICJOB
    port: int = DEFAULT_PORT
    join_timeout: int = 600
    last_call_timeout: int = 30
    keep_alive_interval: int = 1
    keep_alive_attempts: int = 3
    store: StoreSpec = field(default_factory=StoreSpec)
    nproc_is_default: bool = False
    """Whether the manifest leaves the number of workers open (`WorkerCount.is_default`)."""
    gpus: int = 0
    """Number of NVIDIA GPUs that the trainer requests."""
    preload: tuple[str, ...] = DEFAULT_PRELOAD
    stop_grace: int = 1
    trainer_integration: TrainerIntegration = TrainerIntegration.AUTO
    graceful_shutdown: int | None = None
    """Limit of a planned end of a round; None: what the template's terminationGracePeriodSeconds leaves."""
    faulty_scale_down: int = 300
    """Seconds after which the job does without pods that have no room."""
    wait_for_min: int | None = None
    """Seconds without room for min_replicas nodes after which the job gives its pods back; None: never."""
    max_restarts: int = 3
    restart_window: int = 0
    """Seconds from the first restart of a window to its end; 0: all restarts of the job count."""
    backoff: int = 0
    """Seconds that the round after the first restart waits; they double with each further one. 0: no round waits."""
    max_backoff: int = 300
    max_start_failures: int = 10
    """Attempts to start pods that may fail in a row before the job fails."""
    failure_rules: tuple[FailureRule, ...] = ()
    """In order; the first one that matches a failure applies."""
    log_rules: tuple[LogRule, ...] = ()
    """What agents look for in the output of workers; empty if one of the rules is refused."""
    avoid_node: int = 86400
    """How long the operator avoids an unhealthy node, or one that a failure rule names: a day, for its repair. A first
    suspicion does not count."""
    progress_timeout: int = 0
    """Time without a step after which workers hang; 0 disables hang detection."""
    hang_action: HangAction = HangAction.RESTART_GROUP
    success_policy: SuccessPolicy = SuccessPolicy.ALL
    suspend: bool = False
    active_deadline: int | None = None
    """Seconds that an execution may take; None: no limit."""
    ttl_after_finished: int | None = None
    """Seconds after its end in which the job is kept; None: for ever."""
    clean_pods: CleanPods = CleanPods.RUNNING
    gang: GangProvider = GangProvider.NONE
    restart_strategy: RestartStrategy = RestartStrategy.IN_PLACE
    pod_replacement: PodReplacement = PodReplacement.TERMINATING_OR_FAILED
    termination_timeout: int | None = 120
    """Seconds beyond its grace period for which the job waits for a pod that is being deleted; None: for ever."""
    disruption_budget: bool = True
    """Whether evictions must leave min_replicas workers."""
    network_isolation: bool = True
    """Whether the job's pods accept connections only from each other and from the operator."""
    placement: Placement = Placement.NONE
    code: str = ""
    """Digest of the code that `elasticjob submit` has shipped, an annotation of the job; empty without any."""

    @property
    def termination_grace(self) -> int:
        """The grace period of worker pods: what the template sets, but at least what the agent may need."""
        requested = integer(self.template, "spec", "terminationGracePeriodSeconds", default=DEFAULT_GRACE)
        return max((self.graceful_shutdown or 0) + self.stop_grace + LEAVE_SECONDS, requested)

    @property
    def planned_end(self) -> int:
        """The limit of a planned end, from its begin to the end of the last worker."""
        if self.graceful_shutdown is not None:
            return self.graceful_shutdown
        return self.termination_grace - self.stop_grace - LEAVE_SECONDS

    @property
    def settings(self) -> RoundSettings:
        """The settings that the coordinator of this job applies."""
        return RoundSettings(
            min_nodes=self.min_replicas,
            max_nodes=self.max_replicas,
            target=self.target,
            spares=self.spares,
            max_restarts=self.max_restarts,
            join_timeout=float(self.join_timeout),
            last_call_timeout=float(self.last_call_timeout),
            stop_grace=float(self.stop_grace),
            graceful_shutdown=float(self.planned_end),
            keep_alive_interval=float(self.keep_alive_interval),
            keep_alive_max_attempts=self.keep_alive_attempts,
            progress_timeout=float(self.progress_timeout),
            hang_action=self.hang_action,
            restart_strategy=self.restart_strategy,
            increment=self.increment,
            restart_window=float(self.restart_window),
            backoff=float(self.backoff),
            max_backoff=float(self.max_backoff),
            failure_rules=self.failure_rules,
            log_rules=self.log_rules,
            success_policy=self.success_policy,
            scale_up_stabilization=float(self.scale_up_stabilization),
            code=self.code,
        )


def parse_spec(raw: Raw) -> JobSpec:
    """Return the spec of a job; raise `SpecError` if no pod can be made from it."""
    spec, error = read_spec(raw)
    if error:
        raise SpecError(error)
    return spec


def read_spec(raw: Raw) -> tuple[JobSpec, str]:
    """Return the spec of a job, and why no worker pod can be made from it; empty if one can.

    All other fields hold in any case: a job can be suspended, and goes on, with a template that has a mistake.
    """
    low, high, target = _sizes(raw)
    increment = max(1, integer(raw, "elasticPolicy", "replicaIncrementStep", default=JobSpec.increment))
    template = mapping(raw, "template")
    rendezvous = mapping(raw, "rendezvous")
    preload = at(raw, "preload")
    backend = _choice(text(rendezvous, "backend"), Backend.ELASTICJOB)
    trainer: Raw = {}
    workers, error = WorkerCount(1), ""
    try:
        trainer = trainer_of(mapping(template, "spec"))
        workers = _workers(at(raw, "nprocPerNode"), trainer, backend)
    except SpecError as invalid:
        error = str(invalid)
    log_rules: tuple[LogRule, ...] = ()
    try:
        log_rules = decode_log_rules(at(raw, "logRules"))
    except LogRuleError as invalid_rule:
        error = error or f"spec.logRules: {invalid_rule}"
    spec = JobSpec(
        target=allowed_size(target, low, increment),
        min_replicas=low,
        max_replicas=high,
        increment=increment,
        scale_up_stabilization=max(
            0, integer(raw, "elasticPolicy", "scaleUpStabilizationSeconds", default=JobSpec.scale_up_stabilization)
        ),
        spares=max(0, integer(raw, "elasticPolicy", "spares")),
        nproc_per_node=workers.number,
        nproc_is_default=workers.is_default,
        template=template,
        gpus=int(quantity(_requested(trainer).get(GPU))),
        backend=backend,
        port=integer(rendezvous, "port", default=DEFAULT_PORT),
        join_timeout=integer(rendezvous, "joinTimeoutSeconds", default=JobSpec.join_timeout),
        last_call_timeout=integer(rendezvous, "lastCallTimeoutSeconds", default=JobSpec.last_call_timeout),
        keep_alive_interval=integer(rendezvous, "keepAliveIntervalSeconds", default=JobSpec.keep_alive_interval),
        keep_alive_attempts=integer(rendezvous, "keepAliveMaxAttempts", default=JobSpec.keep_alive_attempts),
        store=read_store(mapping(rendezvous, "store"), template),
        preload=tuple(str(m) for m in preload) if isinstance(preload, list) else DEFAULT_PRELOAD,
        stop_grace=integer(raw, "stopGraceSeconds", default=JobSpec.stop_grace),
        trainer_integration=_choice(text(raw, "trainerIntegration"), TrainerIntegration.AUTO),
        graceful_shutdown=_graceful_shutdown(mapping(raw, "elasticPolicy")),
        faulty_scale_down=max(
            0, integer(raw, "elasticPolicy", "faultyScaleDownSeconds", default=JobSpec.faulty_scale_down)
        ),
        wait_for_min=_seconds(raw, "waitForMinSeconds"),
        max_restarts=max(0, integer(raw, "failurePolicy", "maxRestarts", default=JobSpec.max_restarts)),
        restart_window=max(0, integer(raw, "failurePolicy", "restartWindowSeconds")),
        backoff=max(0, integer(raw, "failurePolicy", "backoffSeconds")),
        max_backoff=max(1, integer(raw, "failurePolicy", "maxBackoffSeconds", default=JobSpec.max_backoff)),
        max_start_failures=max(
            1, integer(raw, "failurePolicy", "maxStartFailures", default=JobSpec.max_start_failures)
        ),
        failure_rules=parse_rules(at(raw, "failurePolicy", "rules")),
        log_rules=log_rules,
        avoid_node=max(0, integer(raw, "failurePolicy", "avoidNodeSeconds", default=JobSpec.avoid_node)),
        progress_timeout=max(0, integer(raw, "hangPolicy", "progressTimeoutSeconds")),
        hang_action=_choice(text(raw, "hangPolicy", "action"), HangAction.RESTART_GROUP),
        success_policy=_choice(text(raw, "successPolicy"), SuccessPolicy.ALL),
        suspend=at(raw, "suspend") is True,
        active_deadline=_seconds(raw, "activeDeadlineSeconds"),
        ttl_after_finished=_seconds(raw, "ttlSecondsAfterFinished"),
        clean_pods=_choice(text(raw, "cleanPodPolicy"), CleanPods.RUNNING),
        gang=_choice(text(raw, "gang", "provider"), GangProvider.NONE),
        restart_strategy=_choice(text(raw, "restartStrategy"), RestartStrategy.IN_PLACE),
        pod_replacement=_choice(text(raw, "podReplacementPolicy"), PodReplacement.TERMINATING_OR_FAILED),
        termination_timeout=_termination_timeout(raw),
        disruption_budget=at(raw, "disruptionBudget") is not False,
        placement=_choice(text(raw, "placement"), Placement.NONE),
        # A NetworkPolicy does not apply to pods that have their Node's address.
        network_isolation=at(raw, "networkIsolation") is not False and not uses_host_network(template),
    )
    return spec, error


def uses_host_network(template: Raw) -> bool:
    """Return whether the pods have the network of their Node."""
    return at(template, "spec", "hostNetwork") is True


def _seconds(raw: Raw, name: str) -> int | None:
    return max(0, integer(raw, name)) if at(raw, name) is not None else None


def _termination_timeout(raw: Raw) -> int | None:
    seconds = _seconds(raw, "podTerminationTimeoutSeconds")
    return JobSpec.termination_timeout if seconds is None else seconds or None


def trainer_of(pod_spec: Raw) -> Raw:
    """Return the trainer container; raise `SpecError` if there is none or it has no command."""
    containers = objects(pod_spec, "containers")
    if not containers:
        raise SpecError("spec.template.spec.containers is empty: add the container that trains")
    trainer = next((c for c in containers if text(c, "name") == TRAINER), containers[0])
    if not sequence(trainer, "command"):
        name = text(trainer, "name")
        raise SpecError(f"container {name!r} has no command: set the training command, for example [python, train.py]")
    if text(trainer, "restartPolicy") not in ("", "Never") or at(trainer, "restartPolicyRules") is not None:
        # A kubelet that restarts the container would start an agent in a pod that the job counts as ended.
        raise SpecError(
            f"container {text(trainer, 'name')!r} has a restartPolicy or restartPolicyRules of its own: remove them, "
            "elasticjob restarts workers itself (failurePolicy.maxRestarts)"
        )
    return trainer


def _sizes(raw: Raw) -> tuple[int, int, int]:
    """Return the least, the largest and the wanted number of nodes; all equal for a fixed size."""
    policy = mapping(raw, "elasticPolicy")
    if "minReplicas" not in policy and "maxReplicas" not in policy:
        size = max(1, integer(raw, "replicas", default=1))
        return size, size, size
    low = max(1, integer(policy, "minReplicas", default=1))
    high = max(low, integer(policy, "maxReplicas", default=low))
    return low, high, min(max(integer(raw, "replicas", default=high), low), high)


def _workers(value: Any, trainer: Raw, backend: Backend) -> WorkerCount:
    env: dict[str, str] = {}
    for item in objects(trainer, "env"):
        if isinstance(item.get("value"), str):
            env[text(item, "name")] = expand_variables(item["value"], env)
    words = (*sequence(trainer, "command"), *sequence(trainer, "args"))
    command = [expand_variables(str(word), env) for word in words]
    devices = requested_devices(mapping(trainer, "resources", "requests"), mapping(trainer, "resources", "limits"))
    try:
        check_launcher(command, backend)
        return count_workers(value, command, env, devices, backend)
    except CommandError as error:
        raise SpecError(str(error)) from None


def _requested(container: Raw) -> dict[str, Any]:
    # The limit wins: Kubernetes uses it where the request is missing.
    return {**mapping(container, "resources", "requests"), **mapping(container, "resources", "limits")}


def _graceful_shutdown(policy: Raw) -> int | None:
    return max(0, integer(policy, "gracefulShutdownSeconds", default=120)) if policy else None


def _choice(value: str, default: E) -> E:
    """Return the member of the default's enum that has this value, or the default."""
    return next((member for member in type(default) if member.value == value), default)

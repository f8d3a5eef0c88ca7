"""ElasticJobs from TrainJobs of Kubeflow Trainer (trainer.kubeflow.org/v1alpha1), and their runtimes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from elasticjob.convert.draft import JobDraft
from elasticjob.convert.kinds.runtime_patches import PodPatch, merge_template, take_patches
from elasticjob.convert.parts.fields import ConvertError, InputObject, JsonObject, Notes
from elasticjob.convert.parts.pod_template import TrainingTemplate, read_template
from elasticjob.convert.parts.shared_fields import autoscaler, note_unknown, put_life_cycle, put_queue, put_template
from elasticjob.convert.parts.workers import put_max_restarts, put_nodes, put_workers

TRAINJOB_VERSION = "trainer.kubeflow.org/v1alpha1"
RUNTIME_KINDS = ("ClusterTrainingRuntime", "TrainingRuntime")
_OWN_CONTROLLERS = ("trainer.kubeflow.org/trainjob-controller",)
_TRAINER = "node"
"""Name of the training container, and of its job in a runtime."""
_FIRST_FIELDS = ("name", "image", "imagePullPolicy", "command", "args", "env", "resources")
"""Fields of a container that are written before others."""
_GANG_PROVIDERS = ("coscheduling", "volcano")
_STEP_LABEL = "trainer.kubeflow.org/trainjob-ancestor-step"
_NO_JOB_SET = "is left out: an ElasticJob has pods, and no Job or JobSet"


@dataclass(frozen=True)
class _Runtime:
    """What a TrainJob takes from its runtime."""

    template: JsonObject
    policy: InputObject
    """mlPolicy."""
    job: str = _TRAINER
    """Name of the job that trains."""
    gang: str = ""
    """The gang scheduler in podGroupPolicy; empty without one."""


def convert_trainjob(job: JsonObject, runtimes: Sequence[JsonObject], notes: Notes) -> list[JsonObject]:
    """Return the ElasticJob, and a HorizontalPodAutoscaler if its runtime has metrics.

    `runtimes`: TrainingRuntimes and ClusterTrainingRuntimes of the input; like `job` without null fields.
    ConvertError: it cannot be converted.
    """
    root = InputObject(job, "")
    root.drop("apiVersion", "kind", "status")
    draft = JobDraft(root.take_object("metadata"), notes)
    spec = root.take_object("spec")
    for name in ("labels", "annotations"):
        if values := spec.take_object(name).rest():
            draft.metadata[name] = {**draft.metadata.get(name, {}), **values}
    trainer = spec.take_object("trainer")
    runtime = _find_runtime(spec.take_object("runtimeRef"), trainer, runtimes, notes)
    trained = _template(runtime, take_patches(spec, notes), trainer, notes)
    metrics = _put_size(draft, trainer, runtime.policy, trained, notes)
    put_life_cycle(draft, spec, _OWN_CONTROLLERS)
    put_queue(draft, None, "")
    if runtime.gang:
        effect = "training starts with minReplicas pods"
        draft.put_if_supported("gang", {"provider": runtime.gang}, "runtime.spec.podGroupPolicy", effect)
    initializer = spec.take_object("initializer")
    initializer.note_rest(notes, "is left out: load it in an init container of spec.template, or in the script")
    put_template(draft, trained.template)
    others = autoscaler(draft, metrics, "runtime.spec.mlPolicy.torch.elasticPolicy.metrics")
    for rest in (trainer, spec, root):
        note_unknown(rest, notes)
    return [draft.finish(), *others]


def _put_size(
    draft: JobDraft, trainer: InputObject, policy: InputObject, trained: TrainingTemplate, notes: Notes
) -> Any:
    """Write nodes, workers and restarts; return the metrics of the runtime's autoscaler."""
    torch = policy.take_object("torch")
    elastic = torch.take_object("elasticPolicy")
    nodes, default = trainer.take_integer("numNodes"), policy.take_integer("numNodes")
    bounds = elastic.take_integer("minNodes"), elastic.take_integer("maxNodes")
    wanted = next((number for number in (nodes, default, bounds[1], bounds[0]) if number is not None), 1)
    put_nodes(draft, wanted, bounds, trained, trainer.at("numNodes"), notes)
    own, of_runtime = trainer.take("numProcPerNode"), torch.take("numProcPerNode")
    workers = own if own is not None else of_runtime
    if workers in (None, "auto") and not trained.devices.gpus:
        workers = "cpu" if trained.devices.cpus else 1  # Trainer's auto without GPUs: the requested processors, or one
    put_workers(draft, trained, workers, trainer.at("numProcPerNode"), notes)
    put_max_restarts(draft, {elastic.at("maxRestarts"): elastic.take_integer("maxRestarts")}, trained, notes)
    metrics = elastic.take("metrics")
    for rest in (elastic, torch, policy):
        note_unknown(rest, notes)
    return metrics


# ---- runtime ---------------------------------------------------------------------------------------------------------


def _find_runtime(
    reference: InputObject, trainer: InputObject, runtimes: Sequence[JsonObject], notes: Notes
) -> _Runtime:
    kind, name = reference.take_text("kind") or RUNTIME_KINDS[0], reference.take_text("name")
    reference.drop("apiGroup")
    for runtime in runtimes:
        found = InputObject(runtime, "runtime")
        if found.take("kind") == kind and found.take_object("metadata").take("name") == name:
            return _read_runtime(found, notes)
    get = f"kubectl get {kind.lower()} {name} -o yaml"
    taken = {each: trainer.take(each) for each in ("image", "command")}
    missing = [f"spec.trainer.{each}" for each, value in taken.items() if not value]
    if missing:
        raise ConvertError(
            f"spec.runtimeRef: {kind} {name} has the {' and '.join(m.rsplit('.', 1)[1] for m in missing)} of this job:"
            f" give it to `elasticjob convert` too (`{get}` prints it), or write {' and '.join(missing)}"
        )
    notes.add(reference.path, f"{kind} {name} is not in the input, and nothing of it is converted: `{get}` prints it")
    container = {"name": _TRAINER, **taken}
    return _Runtime({"spec": {"containers": [container]}}, InputObject(None, "runtime.spec.mlPolicy"))


def _read_runtime(runtime: InputObject, notes: Notes) -> _Runtime:
    spec = runtime.take_object("spec")
    policy = spec.take_object("mlPolicy")
    gang = _read_gang(spec.take_object("podGroupPolicy"), notes)
    template = spec.take_object("template")
    job_set = template.take_object("spec")
    jobs = {str(job.take("name")): job for job in job_set.take_objects("replicatedJobs")}
    pods = {name: _pod_template(job, notes) for name, job in jobs.items()}
    trains = next((name for name, (step, _) in pods.items() if step == "trainer"), _TRAINER)
    if trains not in pods:
        raise ConvertError(f"{job_set.at('replicatedJobs')}: none has the label {_STEP_LABEL}: trainer, or the name"
                           f" {_TRAINER}")  # fmt: skip
    for name in (name for name in pods if name != trains):
        where = f"{job_set.at('replicatedJobs')}[{name}]"
        notes.add(where, "is left out: load what it prepares in an init container of spec.template")
    for rest in (job_set, template, spec):
        rest.note_rest(notes, _NO_JOB_SET)
    return _Runtime(pods[trains][1], policy, trains, gang)


def _read_gang(policy: InputObject, notes: Notes) -> str:
    """Return the gang scheduler of a runtime; empty if it has none."""
    options = {name: policy.take(name) for name in _GANG_PROVIDERS}
    provider = next((name for name, value in options.items() if value is not None), "")
    if provider:
        rest = InputObject(options[provider], policy.at(provider))
        rest.note_rest(notes, "is left out: spec.gang has no options, and a job waits for its pods without a limit")
    policy.note_rest(notes, "is left out: spec.gang.provider is coscheduling or volcano")
    return provider


def _pod_template(job: InputObject, notes: Notes) -> tuple[str | None, JsonObject]:
    """Return the step and the pod template of one of a runtime's jobs."""
    job.drop("replicas", "groupName")
    template = job.take_object("template")
    step = template.take_object("metadata").take_object("labels").take(_STEP_LABEL)
    job_spec = template.take_object("spec")
    job_spec.drop("parallelism", "completions", "completionMode")
    pod = job_spec.take_object("template").rest()
    if step in (None, "trainer"):
        for rest in (job_spec, template, job):
            rest.note_rest(notes, _NO_JOB_SET)
    return step, pod


def _template(runtime: _Runtime, patches: Sequence[PodPatch], trainer: InputObject, notes: Notes) -> TrainingTemplate:
    """Return the template of the runtime with the changes of the TrainJob."""
    template: Any = runtime.template
    for patch in patches:
        if runtime.job in patch.jobs:
            template = merge_template(template, patch.template)
        else:
            notes.add(patch.path, f"is left out: it changes {', '.join(patch.jobs) or 'no job'}, not {runtime.job}")
    own = {"image": "image", "command": "command", "args": "args", "env": "env", "resourcesPerNode": "resources"}
    given = {name: trainer.take(source) for source, name in own.items()}
    given = {name: value for name, value in given.items() if value is not None}
    merged = InputObject(template, "spec.template")
    spec = merged.take_object("spec")
    containers = [item.rest() for item in spec.take_objects("containers")]
    at = next((i for i, container in enumerate(containers) if container.get("name") == _TRAINER), 0)
    containers[at : at + 1] = [_with_trainer(container, given) for container in containers[at : at + 1]]
    pod = {**merged.rest(), "spec": {**spec.rest(), "containers": containers}}
    return read_template(InputObject(pod, "spec.template"), _TRAINER, notes)


def _with_trainer(container: JsonObject, given: JsonObject) -> JsonObject:
    """Return the training container with the TrainJob's own fields: they replace it, and variables join its own."""
    env = merge_template(container.get("env") or [], given["env"], "env") if "env" in given else None
    changed = {**container, **given, **({} if env is None else {"env": env})}
    return {name: changed[name] for name in (*_FIRST_FIELDS, *changed) if name in changed}

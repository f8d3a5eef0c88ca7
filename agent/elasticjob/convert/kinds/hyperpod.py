"""ElasticJobs from HyperPodPyTorchJobs of Amazon SageMaker HyperPod (sagemaker.amazonaws.com/v1). Pure."""

from __future__ import annotations

from elasticjob.convert.draft import JobDraft
from elasticjob.convert.parts.fields import ConvertError, InputObject, JsonObject, Notes
from elasticjob.convert.parts.node_command import plain_command
from elasticjob.convert.parts.pod_template import (
    TrainingTemplate,
    checked_container,
    find_differences,
    literal_values,
    read_template,
)
from elasticjob.convert.parts.shared_fields import note_unknown, put_life_cycle, put_queue, put_template
from elasticjob.convert.parts.workers import put_max_restarts, put_nodes, put_workers

HYPERPOD_KIND, HYPERPOD_VERSION = "HyperPodPyTorchJob", "sagemaker.amazonaws.com/v1"
_CLEAN_POD_POLICIES = ("All", "None", "Running")
_NO_LIMIT = "is left out: an ElasticJob has no limit but activeDeadlineSeconds, which counts for the whole job"


def convert_hyperpod_job(job: JsonObject, notes: Notes) -> list[JsonObject]:
    """Return the ElasticJob. `job`: a HyperPodPyTorchJob without null fields. ConvertError: it cannot be converted."""
    root = InputObject(job, "")
    root.drop("apiVersion", "kind", "status")
    draft = JobDraft(root.take_object("metadata"), notes)
    spec = root.take_object("spec")
    policy, elastic = spec.take_object("runPolicy"), spec.take_object("elasticPolicy")
    replicas, spares, trained = _replica_specs(spec, notes)
    bounds = elastic.take_integer("minReplicas"), elastic.take_integer("maxReplicas")
    if spares and bounds == (None, None):
        bounds = replicas, replicas
    put_nodes(draft, replicas, bounds, trained, spec.at("replicaSpecs"), notes)
    if spares:
        draft.put_number("elasticPolicy.spares", spares, spec.at("replicaSpecs"))
    put_workers(draft, trained, spec.take("nprocPerNode"), spec.at("nprocPerNode"), notes)
    _put_restarts(draft, policy, trained, notes)
    _put_clean_up(draft, policy, notes)
    put_life_cycle(draft, policy, ())
    put_queue(draft, None, "")
    for name in ("startupDeadlineSeconds", "faultDeadlineSeconds"):
        if policy.take(name) is not None:
            notes.add(policy.at(name), _NO_LIMIT)
    if policy.take("logMonitoringConfiguration"):
        notes.add(policy.at("logMonitoringConfiguration"), "is left out: write spec.logRules, or call"
                  " elasticjob.progress in the script, and spec.hangPolicy ends hangs")  # fmt: skip
    put_template(draft, trained.template)
    for rest in (elastic, policy, spec, root):
        note_unknown(rest, notes)
    return [draft.finish()]


def _replica_specs(spec: InputObject, notes: Notes) -> tuple[int, int, TrainingTemplate]:
    """Return the number of nodes, of spares, and the template of all pods: that of the first replica spec."""
    specs = spec.take_objects("replicaSpecs")
    if not specs:
        raise ConvertError(f"{spec.at('replicaSpecs')}: is empty: write one with a template")
    replicas, spares, templates = 0, 0, list[TrainingTemplate]()
    for number, replica in enumerate(specs):
        name = replica.take_text("name")
        count = replica.take_integer("replicas")
        replicas += 1 if count is None else count
        spares += replica.take_integer("spares") or 0
        templates.append(_template(replica, notes if number == 0 else Notes()))
        for path in find_differences(templates[number].template, templates[0].template):
            notes.add(f"{replica.at('template')}.{path}", "differs from that of the first replica spec, which all pods"
                                                          f" get, {name or 'this one'} too")  # fmt: skip
        note_unknown(replica, notes)
    return replicas, spares, templates[0]


def _template(replica: InputObject, notes: Notes) -> TrainingTemplate:
    template = replica.take_object("template")
    metadata, spec = template.take_object("metadata"), template.take_object("spec")
    metadata.drop("name", "namespace")
    containers = [checked_container(item) for item in spec.take_objects("containers")]
    if containers:
        first, lost = plain_command(containers[0], literal_values(containers[0]))
        containers[0] = first
        for option in lost:
            notes.add(f"{spec.at('containers')}[0].command", f"{option} is removed: only hyperpodrun has it")
    pod = {"metadata": metadata.rest(), "spec": {**spec.rest(), "containers": containers}, **template.rest()}
    return read_template(InputObject(pod, replica.at("template")), None, notes)


def _put_restarts(draft: JobDraft, policy: InputObject, trained: TrainingTemplate, notes: Notes) -> None:
    path = policy.at("jobMaxRetryCount")
    put_max_restarts(draft, {path: policy.take_integer("jobMaxRetryCount")}, trained, notes)
    limits = policy.take_object("restartPolicy")
    if (seconds := limits.take_integer("evalPeriodSeconds")) is not None:
        draft.put_number("failurePolicy.restartWindowSeconds", seconds, limits.at("evalPeriodSeconds"))
    for name in ("maxFullJobRestarts", "numRestartBeforeFullJobRestart"):
        if limits.take(name) is not None:
            notes.add(limits.at(name), "is left out: each restart is one of the workers in their pods, and"
                                       " spec.failurePolicy.maxRestarts bounds all of them")  # fmt: skip
    note_unknown(limits, notes)


def _put_clean_up(draft: JobDraft, policy: InputObject, notes: Notes) -> None:
    """Take what differs from the fields of a PyTorchJob: -1 seconds for ever, and the policies for pods."""
    seconds, source = policy.take_integer("ttlSecondsAfterFinished"), policy.at("ttlSecondsAfterFinished")
    if seconds is not None and seconds >= 0:
        draft.put_if_supported("ttlSecondsAfterFinished", seconds, source, "the finished job stays until you delete it")
    pods = policy.take_text("cleanPodPolicy")
    if pods in _CLEAN_POD_POLICIES:
        effect = "pods that have ended stay until you delete the job, others end with it"
        draft.put_if_supported("cleanPodPolicy", pods, policy.at("cleanPodPolicy"), effect)
    elif pods is not None:
        notes.add(policy.at("cleanPodPolicy"), f"{pods} is left out: pods that still run are deleted when the job has"
                                               " ended; want All, None or Running")  # fmt: skip

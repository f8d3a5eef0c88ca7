"""ElasticJobs from JobSets (jobset.x-k8s.io) whose pods run torchrun. Pure."""

from __future__ import annotations

from typing import Any

from elasticjob.convert.draft import JobDraft
from elasticjob.convert.parts.fields import ConvertError, InputObject, JsonObject, Notes
from elasticjob.convert.parts.node_command import plain_command
from elasticjob.convert.parts.pod_template import TrainingTemplate, checked_container, literal_values, read_template
from elasticjob.convert.parts.shared_fields import note_unknown, put_life_cycle, put_queue, put_template
from elasticjob.convert.parts.workers import put_max_restarts, put_nodes, put_workers

JOBSET_KIND, JOBSET_VERSIONS = "JobSet", ("jobset.x-k8s.io/v1alpha2", "jobset.x-k8s.io/v1")
_OWN_CONTROLLERS = ("jobset.sigs.k8s.io/jobset-controller",)
_OF_THE_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
"""Variables with which a JobSet tells torchrun of its nodes: elasticjob does."""
_INDEX = "JOB_COMPLETION_INDEX"
_NO_JOB = "is left out: an ElasticJob has pods, and no Jobs"
_DEFAULT_ACTION = "RestartJobSet"


def convert_jobset(job: JsonObject, notes: Notes) -> list[JsonObject]:
    """Return the ElasticJob. `job`: a JobSet without null fields. ConvertError: it cannot be converted."""
    root = InputObject(job, "")
    root.drop("apiVersion", "kind", "status")
    draft = JobDraft(root.take_object("metadata"), notes)
    spec = root.take_object("spec")
    trains = _training_job(spec, notes)
    nodes, retries, trained = _read_job(trains, notes)
    put_nodes(draft, nodes, (None, None), trained, trains.path, notes)
    put_workers(draft, trained, None, f"{trained.path}.command", notes)
    failures = spec.take_object("failurePolicy")
    limits = {failures.at("maxRestarts"): failures.take_integer("maxRestarts")}
    if None in limits.values() and retries[1]:
        limits = {retries[0]: retries[1]}
    put_max_restarts(draft, limits, trained, notes)
    failures.drop("restartStrategy")
    for rule in failures.take_objects("rules"):
        if rule.take("action") != _DEFAULT_ACTION or rule.rest().keys() - {"name"}:
            notes.add(rule.path, "is left out: write spec.failurePolicy.rules, which know exit codes and conditions of"
                                 " pods")  # fmt: skip
    put_life_cycle(draft, spec, _OWN_CONTROLLERS)
    put_queue(draft, None, "")
    success = spec.take_object("successPolicy")
    if success.take("operator") == "Any":
        notes.add(success.path, "is left out: an ElasticJob is complete once all workers have succeeded; write"
                                " spec.successPolicy Any if those of one pod are enough")  # fmt: skip
    success.drop("targetReplicatedJobs")
    spec.drop("network", "coordinator", "startupPolicy")
    put_template(draft, trained.template)
    for rest in (failures, success, spec, root):
        note_unknown(rest, notes)
    return [draft.finish()]


def _training_job(spec: InputObject, notes: Notes) -> InputObject:
    """Return the replicated job that trains: the only one, or the only one that starts torchrun."""
    jobs = {str(job.get("name")): job for job in (item.rest() for item in spec.take_objects("replicatedJobs"))}
    path = spec.at("replicatedJobs")
    if not jobs:
        raise ConvertError(f"{path}: is empty: write one with a template")
    training = [name for name, job in jobs.items() if len(jobs) == 1 or "torchrun" in str(job)]
    if len(training) != 1:
        found = ", ".join(training) or "none of them"
        raise ConvertError(
            f"{path}: one of {', '.join(jobs)} must train, and {found} starts torchrun: leave one of those in the"
            " manifest, and apply the others as a JobSet of their own"
        )
    for name in (name for name in jobs if name != training[0]):
        notes.add(f"{path}[{name}]", "is left out: apply it as a JobSet of its own, or use an init container")
    return InputObject(jobs[training[0]], f"{path}[{training[0]}]")


def _read_job(job: InputObject, notes: Notes) -> tuple[int, tuple[str, int | None], TrainingTemplate]:
    """Return the number of pods, backoffLimit with its path, and the template of a replicated job."""
    job.drop("name", "groupName")
    replicas = job.take_integer("replicas")
    if job.take("dependsOn"):
        notes.add(job.at("dependsOn"), "is left out: use an init container that waits")
    template = job.take_object("template")
    template.drop("metadata")
    spec = template.take_object("spec")
    parallelism, completions = spec.take_integer("parallelism"), spec.take_integer("completions")
    nodes = (1 if replicas is None else replicas) * (1 if parallelism is None else parallelism)
    if completions not in (None, parallelism):
        notes.add(spec.at("completions"), f"has no effect: {nodes} pods run at once, and the job ends with them")
    retries = spec.at("backoffLimit"), spec.take_integer("backoffLimit")
    spec.drop("completionMode", "podReplacementPolicy")
    trained = _template(spec.take_object("template"), notes)
    for rest in (spec, template, job):
        rest.note_rest(notes, _NO_JOB)
    return nodes, retries, trained


def _template(template: InputObject, notes: Notes) -> TrainingTemplate:
    spec = template.take_object("spec")
    containers: list[Any] = [checked_container(item) for item in spec.take_objects("containers")]
    if containers:
        first = _with_plain_command(containers[0], f"{spec.at('containers')}[0]", notes)
        containers[0] = first
    pod = {**template.rest(), "spec": {**spec.rest(), "containers": containers}}
    return read_template(InputObject(pod, template.path), None, notes)


def _with_plain_command(container: JsonObject, path: str, notes: Notes) -> JsonObject:
    """Return the container without what tells torchrun of the nodes of a JobSet."""
    changed, _ = plain_command(container, literal_values(container))
    port = literal_values(container).get("MASTER_PORT")
    read = InputObject(changed, path)
    env = [item.rest() for item in read.take_objects("env")]
    ports = [item.rest() for item in read.take_objects("ports")]
    kept = {
        "env": [item for item in env if item.get("name") not in _OF_THE_RENDEZVOUS],
        "ports": [item for item in ports if str(item.get("containerPort")) != port],
    }
    if _INDEX in str((changed.get("command"), changed.get("args"), kept["env"])):
        notes.add(f"{path}.command", f"{_INDEX} is not set: GROUP_RANK is the number of a worker's pod")
    return {name: kept.get(name, value) for name, value in changed.items() if kept.get(name, value) != []}

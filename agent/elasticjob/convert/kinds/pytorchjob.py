"""ElasticJobs from PyTorchJobs (kubeflow.org/v1). Pure."""

from __future__ import annotations

from elasticjob.convert.draft import JobDraft
from elasticjob.convert.parts.fields import ConvertError, InputObject, JsonObject, Notes
from elasticjob.convert.parts.pod_template import TrainingTemplate, find_differences, read_template
from elasticjob.convert.parts.shared_fields import autoscaler, note_unknown, put_life_cycle, put_queue, put_template
from elasticjob.convert.parts.workers import put_max_restarts, put_nodes, put_workers

PYTORCHJOB_VERSION = "kubeflow.org/v1"
_OWN_CONTROLLERS = ("kubeflow.org/training-operator",)
_TRAINER = "pytorch"
_REPLICA_TYPES = ("Master", "Worker")
_RESTART_POLICIES = ("Always", "OnFailure", "Never", "ExitCode")
_RUN_POLICY = ("cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit")
"""Fields of runPolicy that older versions of the API have in the spec itself."""
_DEFAULT_PORT = 29400
_NO_FAILURE_RULES = "a failed worker restarts up to spec.failurePolicy.maxRestarts times, whatever its exit code"
_CONF = {
    "join_timeout": "rendezvous.joinTimeoutSeconds",
    "last_call_timeout": "rendezvous.lastCallTimeoutSeconds",
}
"""Keys of rdzvConf with the same meaning here."""


def convert_pytorchjob(job: JsonObject, notes: Notes) -> list[JsonObject]:
    """Return the ElasticJob, and a HorizontalPodAutoscaler if the job has metrics.

    `job`: a PyTorchJob without null fields. ConvertError: it cannot be converted.
    """
    root = InputObject(job, "")
    root.drop("apiVersion", "kind", "status")
    draft = JobDraft(root.take_object("metadata"), notes)
    spec = root.take_object("spec")
    elastic, run_policy = spec.take_object("elasticPolicy"), _run_policy(spec)
    has_elastic = bool(elastic)
    replicas, restart, trained = _replica_specs(spec.take_object("pytorchReplicaSpecs"), notes)
    bounds = elastic.take_integer("minReplicas"), elastic.take_integer("maxReplicas")
    put_nodes(draft, replicas, bounds, trained, "spec.pytorchReplicaSpecs.Worker.replicas", notes)
    put_workers(draft, trained, *_workers_field(spec, elastic, notes), notes)
    _put_rendezvous(draft, elastic, notes)
    limits = {
        elastic.at("maxRestarts"): elastic.take_integer("maxRestarts"),
        restart[1]: 0 if restart[0] == "Never" else None,
        run_policy.at("backoffLimit"): run_policy.take_integer("backoffLimit"),
    }
    _put_restarts(draft, restart, limits, trained, notes)
    put_life_cycle(draft, run_policy, _OWN_CONTROLLERS)
    _put_scheduling(draft, run_policy.take_object("schedulingPolicy"), trained, notes)
    put_template(draft, trained.template)
    metrics = elastic.take("metrics")
    others = autoscaler(draft, metrics, elastic.at("metrics")) if has_elastic else []
    for rest in (elastic, run_policy, spec, root):
        note_unknown(rest, notes)
    return [draft.finish(), *others]


def _run_policy(spec: InputObject) -> InputObject:
    policy = spec.take("runPolicy")
    older = {name: value for name in _RUN_POLICY if (value := spec.take(name)) is not None}
    if older and not policy:
        return InputObject(older, "spec")
    if older and isinstance(policy, dict):
        policy = {**older, **policy}
    return InputObject(policy, "spec.runPolicy")


def _workers_field(spec: InputObject, elastic: InputObject, notes: Notes) -> tuple[str | int | None, str]:
    """Return nprocPerNode and its path. elasticPolicy.nProcPerNode is its older name."""
    older, value = elastic.take("nProcPerNode"), spec.take("nprocPerNode")
    if value is None and older is not None:
        return older, elastic.at("nProcPerNode")
    if older is not None:
        notes.add(elastic.at("nProcPerNode"), "has no effect: spec.nprocPerNode is its newer name")
    return value, spec.at("nprocPerNode")


# ---- replica specs ---------------------------------------------------------------------------------------------------


def _replica_specs(specs: InputObject, notes: Notes) -> tuple[int, tuple[str, str], TrainingTemplate]:
    """Return the number of pods, restart policy with its path, and the template of all pods."""
    found = _by_type(specs)
    if not found:
        raise ConvertError(f"{specs.path}: is empty: a PyTorchJob has a Master, Workers or both")
    replicas = {kind: _count(replica) for kind, replica in found.items()}
    restarts = {kind: _restart_policy(replica) for kind, replica in found.items()}
    kind = "Worker" if replicas.get("Worker") or "Master" not in found else "Master"
    templates = {
        each: read_template(replica.take_object("template"), _TRAINER, notes if each == kind else Notes())
        for each, replica in found.items()
    }
    used = {each: template for each, template in templates.items() if replicas[each] or each == kind}
    if len(used) > 1:
        _note_differences(used, found["Master"].at("template"), notes)
    for each in used:
        if restarts[each] != restarts[kind]:
            where = f"{found[each].path}.restartPolicy"
            notes.add(where, f"{restarts[each]} has no effect: the {kind}'s, {restarts[kind]}, holds for all pods")
    for replica in found.values():
        note_unknown(replica, notes)
    return sum(replicas.values()), (restarts[kind], f"{found[kind].path}.restartPolicy"), templates[kind]


def _by_type(specs: InputObject) -> dict[str, InputObject]:
    """Return the replica specs by type. As in Kubeflow, a type's name may have any case."""
    found = {}
    for name, value in specs.rest().items():
        kind = next((kind for kind in _REPLICA_TYPES if kind.lower() == name.lower()), None)
        if kind is None:
            raise ConvertError(f"{specs.at(name)}: a PyTorchJob has the replica types Master and Worker")
        found[kind] = InputObject(value, specs.at(name))
    return {kind: found[kind] for kind in _REPLICA_TYPES if kind in found}


def _count(replica: InputObject) -> int:
    number = replica.take_integer("replicas")
    return 1 if number is None else number


def _restart_policy(replica: InputObject) -> str:
    policy = replica.take_text("restartPolicy") or "OnFailure"
    if policy not in _RESTART_POLICIES:
        raise ConvertError(f"{replica.at('restartPolicy')}: {policy!r}: want one of {', '.join(_RESTART_POLICIES)}")
    return policy


def _note_differences(templates: dict[str, TrainingTemplate], source: str, notes: Notes) -> None:
    different = find_differences(templates["Master"].template, templates["Worker"].template)
    for path in different:
        notes.add(f"{source}.{path}", "differs from the Worker's, which all pods get: any pod can have rank 0")
    if different:
        notes.add(source, "its success ends a PyTorchJob, an ElasticJob is complete once the workers of all pods have"
                          " succeeded: write spec.successPolicy Any if those of one pod are enough")  # fmt: skip


# ---- policies --------------------------------------------------------------------------------------------------------


def _put_restarts(
    draft: JobDraft,
    restart: tuple[str, str],
    limits: dict[str, int | None],
    trained: TrainingTemplate,
    notes: Notes,
) -> None:
    policy, path = restart
    is_limited = put_max_restarts(draft, limits, trained, notes)
    if policy == "ExitCode":
        # Kubeflow restarts a pod for exit codes from 128 on: the process was ended by a signal.
        rule = {
            "name": "exit-code-of-the-program",
            "action": "FailJob",
            "onExitCodes": {"operator": "In", "values": list(range(1, 128))},
        }
        draft.put_if_supported("failurePolicy.rules", [rule], path, _NO_FAILURE_RULES)
    if not is_limited:
        notes.add(path, f"{policy} has no limit of restarts, an ElasticJob has: set spec.failurePolicy.maxRestarts,"
                        " which is 3 by default")  # fmt: skip


def _put_rendezvous(draft: JobDraft, elastic: InputObject, notes: Notes) -> None:
    backend, host = elastic.take_text("rdzvBackend") or "c10d", elastic.take("rdzvHost")
    if backend != "c10d":
        notes.add(elastic.at("rdzvBackend"), f"{backend} is not needed: the job's coordinator runs the rendezvous")
    port = elastic.take_integer("rdzvPort")
    if port is not None and (backend != "c10d" or host):
        notes.add(elastic.at("rdzvPort"), f"is not needed: the job's own store listens on {_DEFAULT_PORT}")
    elif port is not None and port != _DEFAULT_PORT:
        draft.put_number("rendezvous.port", port, elastic.at("rdzvPort"))
    for name, value in (("rdzvHost", host), ("rdzvId", elastic.take("rdzvId"))):
        if value:
            notes.add(elastic.at(name), "is not needed: each job has a store and an id of its own")
    if elastic.take_switch("standalone"):
        notes.add(elastic.at("standalone"), "is not needed: the job's coordinator runs the rendezvous")
    for item in elastic.take_objects("rdzvConf"):
        key, value = str(item.take("key")), str(item.take("value"))
        if key in _CONF and value.isascii() and value.isdigit():
            draft.put_number(_CONF[key], int(value), item.path)
        else:
            notes.add(item.path, f"{key}={value} is left out: spec.rendezvous has the time-outs of an ElasticJob")


def _put_scheduling(draft: JobDraft, policy: InputObject, trained: TrainingTemplate, notes: Notes) -> None:
    put_queue(draft, policy.take_text("queue"), policy.at("queue"))
    if priority := policy.take_text("priorityClass"):
        pod = trained.template["spec"]
        used = pod.setdefault("priorityClassName", priority)
        text = "all pods have it" if used == priority else f"{priority} has no effect"
        notes.add(policy.at("priorityClass"), f"{text}: priorityClassName in spec.template is {used}")
    if (number := policy.take_integer("minAvailable")) is not None:
        _note_gang(draft, number, policy.at("minAvailable"), notes)
    if policy.take("minResources") is not None:
        notes.add(policy.at("minResources"), "is left out: the requests of the pods count")
    if policy.take("scheduleTimeoutSeconds") is not None:
        notes.add(policy.at("scheduleTimeoutSeconds"), "is left out: a job waits for its pods without a limit")
    note_unknown(policy, notes)


def _note_gang(draft: JobDraft, number: int, path: str, notes: Notes) -> None:
    low = draft.get("elasticPolicy.minReplicas") or draft.get("replicas")
    if not draft.supports("gang"):
        notes.add(path, "gang scheduling is not supported yet: training starts with minReplicas pods")
    else:
        notes.add(path, f"{number} is left out: spec.gang.provider names the scheduler, and a gang has {low} pods")

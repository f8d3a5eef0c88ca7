"""Each field of Kubeflow's APIs and its place in an ElasticJob, or the note where it has none."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from elasticjob.convert.kinds.pytorchjob import convert_pytorchjob
from elasticjob.convert.kinds.trainjob import convert_trainjob
from elasticjob.convert.parts.fields import ConvertError, Notes
from support.common.planned_fields import bare_schema, planned_schema

PYTORCHJOB: dict[str, Any] = {
    "apiVersion": "kubeflow.org/v1",
    "kind": "PyTorchJob",
    "metadata": {"name": "toy"},
    "spec": {
        "runPolicy": {},
        "pytorchReplicaSpecs": {
            "Worker": {
                "replicas": 2,
                "restartPolicy": "Never",
                "template": {"spec": {"containers": [
                    {"name": "pytorch", "image": "example/toy", "command": ["torchrun", "train.py"],
                     "resources": {"limits": {"nvidia.com/gpu": 2}}},
                ]}},
            }
        },
    },
}  # fmt: skip
RUNTIME: dict[str, Any] = {
    "kind": "ClusterTrainingRuntime",
    "metadata": {"name": "torch"},
    "spec": {
        "mlPolicy": {"torch": {}},
        "template": {"spec": {"replicatedJobs": [
            {"name": "node", "template": {"spec": {"template": {"spec": {"containers": [
                {"name": "node", "image": "example/torch", "command": ["torchrun", "train.py"],
                 "env": [{"name": "A", "value": "runtime"}, {"name": "B", "value": "runtime"}],
                 "resources": {"limits": {"nvidia.com/gpu": 2}}},
            ]}}}}},
        ]}},
    },
}  # fmt: skip
TRAINJOB: dict[str, Any] = {
    "apiVersion": "trainer.kubeflow.org/v1alpha1",
    "kind": "TrainJob",
    "metadata": {"name": "toy"},
    "spec": {"runtimeRef": {"name": "torch"}, "trainer": {}},
}
ELASTIC = {"elasticPolicy.minReplicas": 1, "elasticPolicy.maxReplicas": 3}
WORKER = "pytorchReplicaSpecs.Worker"
CONTAINER = {"name": "pytorch", "image": "example/toy", "command": ["torchrun", "train.py"]}
RANGE = ["torchrun", "--nnodes=1:3", "--nproc-per-node=1", "train.py"]
CONTAINERS = "template.spec.containers.0"
METRIC = {"type": "Resource", "resource": {"name": "cpu"}}
GANG = "training starts with minReplicas pods"
JOB_SET = "an ElasticJob has pods, and no Job or JobSet"


def put(target: dict[str, Any], path: str, value: Any) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        target = target.setdefault(parent, {})
    target[name] = value


def get(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = value[int(name)] if isinstance(value, list) else (value or {}).get(name)
    return value


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = planned_schema()
    for module in ("convert.draft", "_runtime.local.manifest.job_schema"):
        monkeypatch.setattr(f"elasticjob.{module}.job_schema", lambda: schema)


# Field of the spec, its value (and others that it needs), what is in the spec of the ElasticJob, part of the note.
PYTORCHJOB_FIELDS: list[tuple[str, Any, dict[str, Any], str]] = [
    ("runPolicy.cleanPodPolicy", "All", {"cleanPodPolicy": "All"}, ""),
    ("runPolicy.ttlSecondsAfterFinished", 60, {"ttlSecondsAfterFinished": 60}, ""),
    ("runPolicy.activeDeadlineSeconds", 60, {"activeDeadlineSeconds": 60}, ""),
    (f"{WORKER}.restartPolicy+runPolicy.backoffLimit", ("OnFailure", 7), {"failurePolicy.maxRestarts": 7}, ""),
    ("runPolicy.backoffLimit", 7, {"failurePolicy.maxRestarts": 0}, "restartPolicy sets the job's budget"),
    ("runPolicy.suspend", True, {"suspend": True}, ""),
    ("runPolicy.suspend", False, {"suspend": None}, ""),
    ("runPolicy.managedBy", "kueue.x-k8s.io/multikueue", {"managedBy": "kueue.x-k8s.io/multikueue"}, ""),
    ("runPolicy.managedBy", "kubeflow.org/training-operator", {"managedBy": None}, ""),
    ("runPolicy.managedBy", "example.com/other", {"managedBy": None}, "another controller cannot run"),
    ("runPolicy.schedulingPolicy.queue", "q", {}, "create a LocalQueue of Kueue named q"),
    ("runPolicy.schedulingPolicy.priorityClass", "p", {"template.spec.priorityClassName": "p"}, "all pods have it"),
    ("runPolicy.schedulingPolicy.minAvailable", 2, {}, "spec.gang.provider names the scheduler"),
    ("runPolicy.schedulingPolicy.minResources", {"cpu": 1}, {}, "the requests of the pods count"),
    ("runPolicy.schedulingPolicy.scheduleTimeoutSeconds", 9, {}, "a job waits for its pods without a limit"),
    ("elasticPolicy.minReplicas", 1, {"elasticPolicy": {"minReplicas": 1, "maxReplicas": 1}, "replicas": 1},
     "2 nodes are outside of 1 to 1: spec.replicas is 1"),
    ("elasticPolicy.maxReplicas", 2, {"elasticPolicy": {"minReplicas": 2, "maxReplicas": 2}, "replicas": 2}, ""),
    ("elasticPolicy.minReplicas+elasticPolicy.maxReplicas", (1, 4),
     {"elasticPolicy": {"minReplicas": 1, "maxReplicas": 4}, "replicas": 2}, ""),
    ("elasticPolicy.rdzvBackend", "c10d", {"rendezvous": None, "elasticPolicy": None}, ""),
    ("elasticPolicy.rdzvBackend", "etcd", {"rendezvous": None}, "etcd is not needed"),
    ("elasticPolicy.rdzvPort", 29401, {"rendezvous.port": 29401}, ""),
    ("elasticPolicy.rdzvPort", 29400, {"rendezvous": None}, ""),
    ("elasticPolicy.rdzvPort", 80, {"rendezvous.port": 1024}, "80 is not allowed: spec.rendezvous.port is 1024"),
    ("elasticPolicy.rdzvHost", "etcd", {}, "each job has a store and an id of its own"),
    ("elasticPolicy.rdzvId", "7", {}, "each job has a store and an id of its own"),
    ("elasticPolicy.rdzvConf", [{"key": "join_timeout", "value": "99"}], {"rendezvous.joinTimeoutSeconds": 99}, ""),
    ("elasticPolicy.rdzvConf", [{"key": "last_call_timeout", "value": "9"}],
     {"rendezvous.lastCallTimeoutSeconds": 9}, ""),
    ("elasticPolicy.rdzvConf", [{"key": "read_timeout", "value": "9"}], {"rendezvous": None}, "read_timeout=9 is left"),
    ("elasticPolicy.standalone", True, {}, "the job's coordinator runs the rendezvous"),
    ("elasticPolicy.nProcPerNode", 3, {"nprocPerNode": 3}, ""),
    ("elasticPolicy.maxRestarts", 4, {"failurePolicy.maxRestarts": 4}, "restartPolicy: has no effect"),
    ("elasticPolicy.maxRestarts", 20000, {"failurePolicy.maxRestarts": 10000}, "20000 is not allowed"),
    ("elasticPolicy.metrics", [METRIC], {}, "the job has a fixed size"),
    ("nprocPerNode", "auto", {"nprocPerNode": None}, ""),
    ("nprocPerNode", "2", {"nprocPerNode": 2}, ""),
    ("nprocPerNode", "gpu", {"nprocPerNode": "gpu"}, ""),
    ("nprocPerNode+elasticPolicy.nProcPerNode", ("2", 3), {"nprocPerNode": 2}, "spec.nprocPerNode is its newer name"),
    (f"{WORKER}.replicas", 3, {"replicas": 3, "elasticPolicy": None}, ""),
    (f"{WORKER}.replicas", None, {"replicas": 1}, ""),
    (f"{WORKER}.restartPolicy", "Never", {"failurePolicy.maxRestarts": 0}, ""),
    (f"{WORKER}.restartPolicy", "OnFailure", {"failurePolicy": None}, "OnFailure has no limit of restarts"),
    (f"{WORKER}.restartPolicy", None, {"failurePolicy": None}, "OnFailure has no limit of restarts"),
    (f"{WORKER}.restartPolicy", "Always", {"failurePolicy": None}, "Always has no limit of restarts"),
    (f"{WORKER}.restartPolicy+runPolicy.backoffLimit", ("ExitCode", 5),
     {"failurePolicy.rules.0.onExitCodes.values": list(range(1, 128)), "failurePolicy.rules.0.action": "FailJob",
      "failurePolicy.maxRestarts": 5}, ""),
    (f"{WORKER}.template", {"spec": {"containers": [CONTAINER], "nodeName": "n"}},
     {"template.spec.nodeName": "n"}, "torchrun's auto is one worker for each processor without GPUs"),
    (f"{WORKER}.template", {"spec": {"containers": [{**CONTAINER, "command": RANGE}]}},
     {**ELASTIC, "replicas": 2, "nprocPerNode": 1, f"{CONTAINERS}.command": ["torchrun", "train.py"]}, ""),
    ("elasticPolicy.minReplicas+" f"{WORKER}.template",
     (2, {"spec": {"containers": [{**CONTAINER, "command": RANGE}]}}),
     {"elasticPolicy": {"minReplicas": 2, "maxReplicas": 2}}, "--nnodes has no effect"),
    ("pytorchReplicaSpecs.Master", {"restartPolicy": "Never", "template": {"spec": {"containers": [CONTAINER]}}},
     {"replicas": 3}, "Master.template.spec.containers[pytorch].resources: differs from the Worker's"),
    ("pytorchReplicaSpecs.worker+pytorchReplicaSpecs.Worker",
     ({"restartPolicy": "Never", "template": {"spec": {"containers": [CONTAINER], "nodeName": "n"}}}, None),
     {"template.spec.nodeName": "n"}, "torchrun's auto"),
    ("cleanPodPolicy", "All", {"cleanPodPolicy": "All"}, ""),
    ("runPolicy.typo", 1, {}, "spec.runPolicy.typo: is left out: an ElasticJob has no such field"),
    ("typo", 1, {}, "spec.typo: is left out: an ElasticJob has no such field"),
]  # fmt: skip
API_OF_PYTORCHJOBS = {
    "runPolicy": {"cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit", "suspend",
                  "managedBy", "schedulingPolicy"},
    "schedulingPolicy": {"minAvailable", "queue", "minResources", "priorityClass", "scheduleTimeoutSeconds"},
    "elasticPolicy": {"minReplicas", "maxReplicas", "rdzvBackend", "rdzvPort", "rdzvHost", "rdzvId", "rdzvConf",
                      "standalone", "nProcPerNode", "maxRestarts", "metrics"},
    "Worker": {"replicas", "template", "restartPolicy"},
}  # fmt: skip


def converted(kind: str, path: str, value: Any) -> tuple[list[dict[str, Any]], list[str]]:
    job = copy.deepcopy(PYTORCHJOB if kind == "PyTorchJob" else TRAINJOB)
    runtime = copy.deepcopy(RUNTIME)
    paths = path.split("+")
    for each, part in zip(paths, value if len(paths) > 1 else [value], strict=True):
        is_runtime = each.startswith("runtime.")
        put(runtime["spec"] if is_runtime else job["spec"], each.removeprefix("runtime."), part)
    notes = Notes()
    job = without(job)
    manifests = convert_pytorchjob(job, notes) if kind == "PyTorchJob" else convert_trainjob(job, [runtime], notes)
    return manifests, [str(note) for note in notes.items]


def without(value: Any) -> Any:
    return {k: without(v) for k, v in value.items() if v is not None} if isinstance(value, dict) else value


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize(("path", "value", "expected", "note"), PYTORCHJOB_FIELDS)
def test_field_of_a_pytorchjob(path: str, value: Any, expected: dict[str, Any], note: str) -> None:
    (job, *_), notes = converted("PyTorchJob", path, value)
    assert {name: get(job["spec"], name) for name in expected} == expected
    assert bool(notes) == bool(note), notes
    assert any(note in line for line in notes) or not note, notes


def test_every_field_of_pytorchjobs_is_in_the_table() -> None:
    parts = [each.split(".") for path, *_ in PYTORCHJOB_FIELDS for each in path.split("+")]
    for parent, names in API_OF_PYTORCHJOBS.items():
        found = {part[part.index(parent) + 1] for part in parts if parent in part[:-1]}
        assert names <= found, f"{parent}: {names - found}"


@pytest.mark.parametrize(
    ("path", "value", "note"),
    [
        ("runPolicy.cleanPodPolicy", "None", "others end with it"),
        ("runPolicy.ttlSecondsAfterFinished", 60, "the finished job stays until you delete it"),
        ("runPolicy.activeDeadlineSeconds", 60, "the job has no time limit"),
        ("runPolicy.suspend", True, "the job starts when you apply it"),
        ("runPolicy.managedBy", "kueue.x-k8s.io/multikueue", "the operator of this cluster runs the job"),
        ("runPolicy.schedulingPolicy.minAvailable", 2, GANG),
        (f"{WORKER}.restartPolicy+runPolicy.backoffLimit", ("ExitCode", 1), "whatever its exit code"),
    ],
)
def test_a_field_that_the_api_lacks_is_a_note(
    path: str, value: Any, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elasticjob.convert.draft.job_schema", bare_schema)
    monkeypatch.setattr("elasticjob._runtime.local.manifest.job_schema.job_schema", bare_schema)
    _, notes = converted("PyTorchJob", path, value)
    line = f"spec.{path.split('+')[0]}: "
    assert [n for n in notes if n.startswith(line) and "not supported yet" in n and n.endswith(note)], notes


def test_a_job_that_kueue_holds_back_waits_in_its_queue_and_is_not_suspended_for_ever() -> None:
    spec = {**PYTORCHJOB["spec"], "runPolicy": {"suspend": True}}
    labels = {"kueue.x-k8s.io/queue-name": "team"}
    notes = Notes()
    queued, *_ = convert_pytorchjob({**PYTORCHJOB, "metadata": {"name": "toy", "labels": labels}, "spec": spec}, notes)
    assert (queued["metadata"]["labels"], "suspend" in queued["spec"]) == (labels, False)
    assert "the job waits in the queue team" in str(notes.items[0])
    alone, *_ = convert_pytorchjob({**PYTORCHJOB, "spec": spec}, Notes())
    assert alone["spec"]["suspend"] is True


@pytest.mark.parametrize(
    ("template", "container", "note"),
    [
        ({"serviceAccountName": "robot"}, {}, "automountServiceAccountToken: is false by default"),
        ({"serviceAccountName": "robot", "automountServiceAccountToken": True}, {}, ""),
        ({}, {"ports": [{"containerPort": 8080}]}, "closes port 8080 for pods outside the job"),
        ({"hostNetwork": True}, {"ports": [{"containerPort": 8080, "hostPort": 8080}]}, ""),
        ({}, {"ports": [{"containerPort": 3389}], "command": ["torchrun", "--rdzv_endpoint=a:3389", "a.py"]}, ""),
    ],
)
def test_what_pods_of_an_elasticjob_lack_is_noted(template: Any, container: Any, note: str) -> None:
    job = copy.deepcopy(PYTORCHJOB)
    spec = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    spec.update(template)
    spec["containers"][0].update(container)
    notes = Notes()
    convert_pytorchjob(job, notes)
    found = [str(item) for item in notes.items if "--rdzv" not in str(item)]
    assert len(found) == bool(note)
    assert note in "".join(found)


def test_labels_that_the_operator_sets_are_left_out() -> None:
    job = copy.deepcopy(PYTORCHJOB)
    labels = {"app.kubernetes.io/name": "bert", "app.kubernetes.io/part-of": "text"}
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["metadata"] = {"labels": labels}
    notes = Notes()
    converted_job, *_ = convert_pytorchjob(job, notes)
    assert get(converted_job["spec"], "template.metadata.labels") == {"app.kubernetes.io/part-of": "text"}
    assert "labels[app.kubernetes.io/name]: is left out" in str(notes.items[0])


def test_the_pods_of_the_store_get_the_priority_of_the_job() -> None:
    job = copy.deepcopy(PYTORCHJOB)
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["priorityClassName"] = "high"
    converted_job, *_ = convert_pytorchjob(job, Notes())
    assert get(converted_job["spec"], "rendezvous.store.priorityClassName") == "high"


def test_metrics_become_an_autoscaler() -> None:
    elastic = {"minReplicas": 1, "maxReplicas": 3, "metrics": [METRIC]}
    (job, autoscaler), notes = converted("PyTorchJob", "elasticPolicy", elastic)
    assert autoscaler["spec"] == {
        "scaleTargetRef": {"apiVersion": job["apiVersion"], "kind": "ElasticJob", "name": "toy"},
        "minReplicas": 1,
        "maxReplicas": 3,
        "metrics": [METRIC],
    }
    assert autoscaler["apiVersion"] == "autoscaling/v2"
    assert job["spec"]["replicas"] == 2, "an autoscaler needs it"
    assert "delete it together with the job" in notes[-1]


def test_an_autoscaler_needs_the_name_of_the_job() -> None:
    elastic = {"minReplicas": 1, "maxReplicas": 3, "metrics": [METRIC]}
    job = {**PYTORCHJOB, "metadata": {"generateName": "toy-"}, "spec": {**PYTORCHJOB["spec"], "elasticPolicy": elastic}}
    notes = Notes()
    assert [manifest["kind"] for manifest in convert_pytorchjob(job, notes)] == ["ElasticJob"]
    assert "needs metadata.name, and not generateName" in str(notes.items[-1])


# ---- TrainJobs -------------------------------------------------------------------------------------------------------

POD = {"metadata": {"labels": {"a": "b"}}, "spec": {"tolerations": [{"key": "k"}]}}
PATCHED = {"template.metadata.labels": {"a": "b"}, "template.spec.tolerations": [{"key": "k"}]}
TARGET = {"targetJobs": [{"name": "node"}]}
PATCH = {"manager": "m", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [
    {"name": "node", "template": {"spec": {"template": POD}}}]}}}}  # fmt: skip
STEPS = "runtime.template.spec.replicatedJobs"

TRAINJOB_FIELDS: list[tuple[str, Any, dict[str, Any], str]] = [
    ("runtimeRef.kind", "ClusterTrainingRuntime", {f"{CONTAINERS}.image": "example/torch", "replicas": 1}, ""),
    ("runtimeRef.apiGroup", "trainer.kubeflow.org", {}, ""),
    ("trainer.image", "example/other", {f"{CONTAINERS}.image": "example/other"}, ""),
    ("trainer.command", ["torchrun", "a.py"], {f"{CONTAINERS}.command": ["torchrun", "a.py"]}, ""),
    ("trainer.args", ["--lr=1"], {f"{CONTAINERS}.args": ["--lr=1"]}, ""),
    ("trainer.env", [{"name": "B", "value": "job"}, {"name": "C", "value": "job"}],
     {f"{CONTAINERS}.env": [{"name": "A", "value": "runtime"}, {"name": "B", "value": "job"},
                            {"name": "C", "value": "job"}]}, ""),
    ("trainer.numNodes", 3, {"replicas": 3, "elasticPolicy": None}, ""),
    ("trainer.resourcesPerNode", {"limits": {"cpu": 4}},
     {f"{CONTAINERS}.resources": {"limits": {"cpu": 4}}, "nprocPerNode": "cpu"}, ""),
    ("trainer.resourcesPerNode", {}, {"nprocPerNode": 1}, ""),
    ("trainer.numProcPerNode", 2, {"nprocPerNode": 2}, ""),
    ("trainer.numProcPerNode", "auto", {"nprocPerNode": None}, ""),
    ("initializer.dataset", {"storageUri": "hf://a"}, {}, "load it in an init container"),
    ("initializer.model", {"storageUri": "hf://a"}, {}, "load it in an init container"),
    ("suspend", True, {"suspend": True}, ""),
    ("managedBy", "trainer.kubeflow.org/trainjob-controller", {"managedBy": None}, ""),
    ("managedBy", "kueue.x-k8s.io/multikueue", {"managedBy": "kueue.x-k8s.io/multikueue"}, ""),
    ("activeDeadlineSeconds", 60, {"activeDeadlineSeconds": 60}, ""),
    ("podSpecOverrides", [{**TARGET, "nodeSelector": {"a": "b"}}], {"template.spec.nodeSelector": {"a": "b"}}, ""),
    ("podTemplateOverrides", [{**TARGET, **POD}], PATCHED, ""),
    ("podTemplateOverrides", [{"targetJobs": [{"name": "launcher"}], **POD}], {"template.spec.tolerations": None},
     "it changes launcher, not node"),
    ("templateOverrides", [{"manager": "m", "pod": [{**TARGET, **POD}]}], PATCHED, ""),
    ("templateOverrides", [{"manager": "m", "job": [{}]}], {}, JOB_SET),
    ("runtimePatches", [PATCH], PATCHED, ""),
    ("typo", 1, {}, "spec.typo: is left out"),
    ("runtime.mlPolicy.numNodes", 4, {"replicas": 4}, ""),
    ("runtime.mlPolicy.numNodes+trainer.numNodes", (4, 2), {"replicas": 2}, ""),
    ("runtime.mlPolicy.torch.numProcPerNode", "gpu", {"nprocPerNode": "gpu"}, ""),
    ("runtime.mlPolicy.torch.elasticPolicy", {"minNodes": 1, "maxNodes": 3, "maxRestarts": 5},
     {**ELASTIC, "replicas": 3, "failurePolicy.maxRestarts": 5}, ""),
    ("runtime.mlPolicy.torch.elasticPolicy", {"minNodes": 1, "maxNodes": 3, "metrics": [METRIC]}, ELASTIC,
     "a HorizontalPodAutoscaler of its own replaces it"),
    ("runtime.mlPolicy.mpi", {"numProcPerNode": 2}, {}, "runtime.spec.mlPolicy.mpi: is left out"),
    ("runtime.podGroupPolicy", {"volcano": {}}, {"gang.provider": "volcano"}, ""),
    ("runtime.podGroupPolicy", {"coscheduling": {"scheduleTimeoutSeconds": 9}}, {"gang.provider": "coscheduling"},
     "podGroupPolicy.coscheduling.scheduleTimeoutSeconds: is left out"),
    ("runtime.podGroupPolicy", {"other": {}}, {"gang": None}, "spec.gang.provider is coscheduling or volcano"),
    ("runtime.template.spec.successPolicy", {"operator": "All"}, {}, JOB_SET),
]  # fmt: skip
API_OF_TRAINJOBS = {
    "runtimeRef", "initializer", "trainer", "suspend", "managedBy", "activeDeadlineSeconds", "podSpecOverrides",
    "podTemplateOverrides", "templateOverrides", "runtimePatches",
}  # fmt: skip


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize(("path", "value", "expected", "note"), TRAINJOB_FIELDS)
def test_field_of_a_trainjob(path: str, value: Any, expected: dict[str, Any], note: str) -> None:
    (job, *_), notes = converted("TrainJob", path, value)
    assert {name: get(job["spec"], name) for name in expected} == expected
    assert bool(notes) == bool(note), notes
    assert any(note in line for line in notes) or not note, notes


def test_every_field_of_trainjobs_is_in_the_table() -> None:
    assert {path.split(".")[0].split("+")[0] for path, *_ in TRAINJOB_FIELDS} >= API_OF_TRAINJOBS


def test_the_runtime_is_found_by_kind_and_name() -> None:
    other = {"kind": "TrainingRuntime", "metadata": {"name": "torch"}, "spec": {}}
    for runtimes in ([other, RUNTIME], [RUNTIME, other]):
        (job,) = convert_trainjob(TRAINJOB, runtimes, Notes())
        assert get(job["spec"], f"{CONTAINERS}.image") == "example/torch"
    with pytest.raises(ConvertError, match="ClusterTrainingRuntime torch has the image and command of this job"):
        convert_trainjob(TRAINJOB, [other], Notes())

"""`kubectl apply` refuses invalid manifests, with a message that says what to write instead."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.kube import Kube
from support.kubectl import Done, Tools

pytestmark = pytest.mark.cluster

NAMESPACE = "manifest-test"

GOOD: dict[str, Any] = {
    "apiVersion": "elasticjob.dev/v1alpha1",
    "kind": "ElasticJob",
    "metadata": {"name": "good"},
    "spec": {
        "replicas": 3,
        "elasticPolicy": {"minReplicas": 2, "maxReplicas": 4},
        "template": {"spec": {"containers": [{"name": "main", "image": "x", "command": ["python3", "train.py"]}]}},
    },
}
FIXED = copy.deepcopy(GOOD)
del FIXED["spec"]["elasticPolicy"]

SUSPENDED = copy.deepcopy(GOOD)
SUSPENDED["spec"]["suspend"] = True
FIXED_SUSPENDED = copy.deepcopy(FIXED)
FIXED_SUSPENDED["spec"]["suspend"] = True

RULE = {"name": "user-error", "action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}}
DRAIN = {"name": "drain", "action": "RestartGroup", "onPodConditions": [{"type": "DisruptionTarget"}]}

Change = tuple[str, Any]
"""A path such as `spec.template.spec.containers.0.image` and its new value; ABSENT removes the field."""
ABSENT = object()

BAD_AT_CREATE: list[tuple[str, list[Change], str]] = [
    ("name too long", [("metadata.name", "a" * 51)], "metadata.name is too long: write at most 50 characters"),
    ("name with a dot", [("metadata.name", "a.b")], "metadata.name must start with a letter and have only"),
    ("name starts with a digit", [("metadata.name", "7b")], "metadata.name must start with a letter"),
    ("name of a store", [("metadata.name", "bert-rdzv")], "metadata.name must not end in -rdzv"),
    ("min above max", [("spec.elasticPolicy.minReplicas", 5)], "minReplicas is above maxReplicas: swap them"),
    (
        "a maximum between two steps",
        [("spec.elasticPolicy.maxReplicas", 5), ("spec.elasticPolicy.replicaIncrementStep", 2)],
        "elasticPolicy.maxReplicas must be minReplicas plus a multiple of replicaIncrementStep: change one of them",
    ),
    (
        "a budget as a number",
        [("spec.disruptionBudget", 2)],
        'spec.disruptionBudget in body must be of type boolean: "integer"',
    ),
    ("no step", [("spec.elasticPolicy.replicaIncrementStep", 0)], "should be greater than or equal to 1"),
    ("avoid nodes for too short", [("spec.failurePolicy.avoidNodeSeconds", 5)], "greater than or equal to 60"),
    (
        "too long graceful shutdown",
        [("spec.elasticPolicy.gracefulShutdownSeconds", 3601)],
        "should be less than or equal to 3600",
    ),
    ("negative spares", [("spec.elasticPolicy.spares", -1)], "spares in body should be greater than or equal to 0"),
    ("too many spares", [("spec.elasticPolicy.spares", 65)], "spares in body should be less than or equal to 64"),
    ("replicas below min", [("spec.replicas", 1)], "replicas is below elasticPolicy.minReplicas: raise replicas"),
    ("replicas above max", [("spec.replicas", 5)], "replicas is above elasticPolicy.maxReplicas: lower replicas"),
    ("no replicas at all", [("spec.replicas", 0)], "spec.replicas in body should be greater than or equal to 1"),
    ("replicas as text", [("spec.replicas", "3")], 'spec.replicas in body must be of type integer: "string"'),
    ("min without max", [("spec.elasticPolicy.maxReplicas", ABSENT)], "spec.elasticPolicy.maxReplicas: Required"),
    ("no workers", [("spec.nprocPerNode", 0)], "nprocPerNode must be a number from 1 to 64 (without quotes)"),
    ("too many workers", [("spec.nprocPerNode", 65)], "nprocPerNode must be a number from 1 to 64"),
    ("workers in quotes", [("spec.nprocPerNode", "2")], "nprocPerNode must be a number from 1 to 64 (without quotes)"),
    ("workers as an unknown word", [("spec.nprocPerNode", "all")], "or auto, gpu or cpu"),
    ("privileged port", [("spec.rendezvous.port", 80)], "port in body should be greater than or equal to 1024"),
    ("port above the range", [("spec.rendezvous.port", 70000)], "port in body should be less than or equal to 65535"),
    ("no keep-alive", [("spec.rendezvous.keepAliveIntervalSeconds", 0)], "should be greater than or equal to 1"),
    ("another backend", [("spec.rendezvous.backend", "etcd")], 'supported values: "elasticjob", "c10d"'),
    (
        "too many modules to preload",
        [("spec.preload", ["m"] * 33)],
        "spec.preload: Too many: 33: must have at most 32 items",
    ),
    ("a file to preload", [("spec.preload", ["train.py,x"])], "preload must list modules by their import names"),
    ("negative budget", [("spec.failurePolicy.maxRestarts", -1)], "maxRestarts in body should be greater than"),
    (
        "two rules of one name",
        [("spec.failurePolicy.rules", [RULE, {**RULE, "action": "Ignore"}])],
        "two rules have the same name: write another name for one of them",
    ),
    (
        "a rule that matches nothing",
        [("spec.failurePolicy.rules", [{"name": "user-error", "action": "FailJob"}])],
        "write exactly one of onExitCodes, onPodConditions and onReasons in each rule",
    ),
    (
        "a rule with two criteria",
        [("spec.failurePolicy.rules", [{**RULE, "onReasons": ["OOMKilled"]}])],
        "write exactly one of onExitCodes, onPodConditions and onReasons in each rule",
    ),
    (
        "a rule named in capitals",
        [("spec.failurePolicy.rules", [{**RULE, "name": "OOM"}])],
        "the name of a rule must start with a letter and have only a-z, 0-9 and '-'",
    ),
    (
        "a rule for success",
        [("spec.failurePolicy.rules", [{**RULE, "onExitCodes": {"operator": "In", "values": [0]}}])],
        "values[0] in body should be greater than or equal to 1",
    ),
    (
        "a rule without exit codes",
        [("spec.failurePolicy.rules", [{**RULE, "onExitCodes": {"operator": "In", "values": []}}])],
        "onExitCodes.values is empty: write at least one exit code",
    ),
    (
        "a rule without reasons",
        [("spec.failurePolicy.rules", [{"name": "oom", "action": "Ignore", "onReasons": []}])],
        "onReasons is empty: write at least one reason, such as OOMKilled",
    ),
    (
        "a rule without conditions",
        [("spec.failurePolicy.rules", [{"name": "drain", "action": "Ignore", "onPodConditions": []}])],
        "onPodConditions is empty: write at least one condition, such as type: DisruptionTarget",
    ),
    (
        "an unknown action",
        [("spec.failurePolicy.rules", [{**RULE, "action": "Count"}])],
        'supported values: "FailJob", "RestartGroup", "RestartGroupAndIgnoreMaxRestarts", "Ignore"',
    ),
    (
        "too short progress timeout",
        [("spec.hangPolicy", {"progressTimeoutSeconds": 5})],
        "should be greater than or equal to 10",
    ),
    (
        "hang policy without a timeout",
        [("spec.hangPolicy", {"action": "FailJob"})],
        "progressTimeoutSeconds: Required value",
    ),
    (
        "unknown hang action",
        [("spec.hangPolicy", {"progressTimeoutSeconds": 60, "action": "Ignore"})],
        'spec.hangPolicy.action: Unsupported value: "Ignore"',
    ),
    (
        "too long stop grace",
        [("spec.stopGraceSeconds", 4000)],
        "stopGraceSeconds in body should be less than or equal to 3600",
    ),
    ("no template", [("spec.template", ABSENT)], "spec.template: Required value"),
    ("no container", [("spec.template.spec.containers", [])], "containers is empty: write one container with an image"),
    (
        "no command",
        [("spec.template.spec.containers.0.command", ABSENT)],
        "needs a command, such as [python3, train.py]: elasticjob cannot read the ENTRYPOINT of an image",
    ),
    (
        "the trainer has no command",
        [("spec.template.spec.containers.1", {"name": "trainer", "image": "x"})],
        "the trainer container (the one named trainer, else the first) needs a command",
    ),
    (
        "pods that restart",
        [("spec.template.spec.restartPolicy", "OnFailure")],
        "restartPolicy must be absent or Never: elasticjob restarts workers itself",
    ),
    ("hostname", [("spec.template.spec.hostname", "h")], "remove template.spec.hostname and subdomain"),
    ("subdomain", [("spec.template.spec.subdomain", "s")], "remove template.spec.hostname and subdomain"),
    (
        "a reserved volume name",
        [("spec.template.spec.volumes", [{"name": "elasticjob-shm", "emptyDir": {}}])],
        "names of containers and volumes must not start with elasticjob-",
    ),
    (
        "a reserved container name",
        [("spec.template.spec.containers.1", {"name": "elasticjob-agent", "image": "x"})],
        "names of containers and volumes must not start with elasticjob-",
    ),
    (
        "a number as a variable",
        [("spec.template.spec.containers.0.env", [{"name": "EPOCHS", "value": 3}])],
        "env[0].value in body must be of type string",
    ),
    (
        "a variable twice",
        [("spec.template.spec.containers.0.env", [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}])],
        'env[1]: Duplicate value: {"name":"A"}',
    ),
    ("unknown field", [("spec.minReplicas", 2)], 'unknown field "spec.minReplicas"'),
    ("unknown pod field", [("spec.template.spec.contianers", [])], 'unknown field "spec.template.spec.contianers"'),
    ("a field that does not exist", [("spec.suspended", True)], 'unknown field "spec.suspended"'),
    ("suspend as text", [("spec.suspend", "yes")], 'spec.suspend in body must be of type boolean: "string"'),
    ("no time at all", [("spec.activeDeadlineSeconds", 0)], "activeDeadlineSeconds in body should be greater than"),
    (
        "a negative time",
        [("spec.ttlSecondsAfterFinished", -1)],
        "ttlSecondsAfterFinished in body should be greater than",
    ),
    (
        "an unknown policy for pods",
        [("spec.cleanPodPolicy", "Ended")],
        'supported values: "All", "Running", "None"',
    ),
    (
        "an unknown restart strategy",
        [("spec.restartStrategy", "Replace")],
        'supported values: "InPlace", "Recreate"',
    ),
    (
        "an unknown policy for replacements",
        [("spec.podReplacementPolicy", "Terminating")],
        'supported values: "TerminatingOrFailed", "Failed"',
    ),
    (
        "too long termination timeout",
        [("spec.podTerminationTimeoutSeconds", 3601)],
        "podTerminationTimeoutSeconds in body should be less than or equal to 3600",
    ),
    (
        "an unknown controller",
        [("spec.managedBy", "example.com/mine")],
        'supported values: "elasticjob.dev/elasticjob-controller", "kueue.x-k8s.io/multikueue"',
    ),
    (
        "an unknown gang scheduler",
        [("spec.gang", {"provider": "slurm"})],
        'spec.gang.provider: Unsupported value: "slurm"',
    ),
    ("not a quantity", [("spec.template.spec.overhead", {"cpu": "1 core"})], "spec.template.spec.overhead"),
]

BAD_AT_CHANGE: list[tuple[str, dict[str, Any], list[Change], str]] = [
    ("nprocPerNode", GOOD, [("spec.nprocPerNode", 2)], "nprocPerNode may not change: create a new job"),
    (
        "template",
        GOOD,
        [("spec.template.spec.containers.0.image", "y")],
        "template may not change while the job runs: set suspend to true in the same change",
    ),
    (
        "rendezvous",
        GOOD,
        [("spec.rendezvous.port", 29401)],
        "rendezvous may not change while the job runs: set suspend",
    ),
    (
        "gang",
        GOOD,
        [("spec.gang", {"provider": "volcano"})],
        "gang may not change while the job runs: set suspend to true in the same change",
    ),
    ("preload", GOOD, [("spec.preload", [])], "preload may not change while the job runs: set suspend to true"),
    (
        "managedBy",
        GOOD,
        [("spec.managedBy", "kueue.x-k8s.io/multikueue")],
        "managedBy may not change: create a new job",
    ),
    ("max below replicas", GOOD, [("spec.elasticPolicy.maxReplicas", 2)], "raise maxReplicas (in the same change)"),
    (
        "fixed size",
        FIXED,
        [("spec.replicas", 4)],
        "replicas of a job without elasticPolicy is fixed while it runs: set suspend to true in the same change",
    ),
    (
        "from elastic to another fixed size",
        GOOD,
        [("spec.elasticPolicy", ABSENT), ("spec.replicas", 4)],
        "replicas of a job without elasticPolicy is fixed",
    ),
]

GOOD_AT_CHANGE: list[tuple[str, dict[str, Any], list[Change]]] = [
    ("replicas", GOOD, [("spec.replicas", 4)]),
    ("both ends", GOOD, [("spec.elasticPolicy", {"minReplicas": 1, "maxReplicas": 1}), ("spec.replicas", 1)]),
    ("budget and grace", GOOD, [("spec.failurePolicy.maxRestarts", 9), ("spec.stopGraceSeconds", 5)]),
    ("a fixed job made elastic", FIXED, [("spec.elasticPolicy", {"minReplicas": 1, "maxReplicas": 8})]),
    ("failure rules added", GOOD, [("spec.failurePolicy.rules", [RULE, DRAIN])]),
    ("a hang policy added", GOOD, [("spec.hangPolicy", {"progressTimeoutSeconds": 60})]),
    ("replicas between two steps", GOOD, [("spec.elasticPolicy.replicaIncrementStep", 2), ("spec.replicas", 3)]),
    ("replicas removed", GOOD, [("spec.replicas", ABSENT)]),
    ("deadlines and clean-up", GOOD, [("spec.activeDeadlineSeconds", 9), ("spec.cleanPodPolicy", "All")]),
    ("a template, with suspend", GOOD, [("spec.suspend", True), ("spec.template.spec.containers.0.image", "y")]),
    (
        "a template, resumed with it",
        SUSPENDED,
        [("spec.suspend", False), ("spec.template.spec.containers.0.image", "y")],
    ),
    ("all of a suspended job", SUSPENDED, [("spec.rendezvous.port", 29401), ("spec.preload", [])]),
    ("the gang of a suspended job", SUSPENDED, [("spec.gang", {"provider": "coscheduling"})]),
    ("the size of a suspended fixed job", FIXED_SUSPENDED, [("spec.replicas", 5)]),
]


def changed(manifest: dict[str, Any], changes: list[Change]) -> dict[str, Any]:
    """Return a copy of `manifest` with the changes."""
    result = copy.deepcopy(manifest)
    for path, value in changes:
        *parents, last = path.split(".")
        node: Any = result
        for key in parents:
            node = node[int(key)] if isinstance(node, list) else node.setdefault(key, {})
        if value is ABSENT:
            del node[last]
        elif isinstance(node, list):
            node.insert(int(last), value)
        else:
            node[last] = value
    return result


@pytest.fixture(scope="module")
def tools(kube: Kube, cluster_dir: Path) -> Iterator[Tools]:
    """kubectl on a cluster with the ElasticJob CRD, and a namespace for this module."""
    tools = Tools(cluster_dir / "bin", cluster_dir / "kubeconfig")
    tools.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--wait", "--timeout=60s")
    tools.kubectl("create", "namespace", NAMESPACE)
    yield tools
    tools.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def refusal(tools: Tools, manifest: dict[str, Any], *verb: str) -> str:
    """Return the error message with which the API server refuses a manifest."""
    done = tools.kubectl(*verb, "-n", NAMESPACE, "--dry-run=server", "-f", "-", stdin=json.dumps(manifest), check=False)
    assert done.code != 0, f"the API server accepted it: {done.output}"
    return done.output


def replace(tools: Tools, manifest: dict[str, Any]) -> Done:
    """Run `kubectl replace`, again after a conflict: the operator may write the new job's status meanwhile."""
    while True:
        arguments = ("replace", "-n", NAMESPACE, "--dry-run=server", "-f", "-")
        done = tools.kubectl(*arguments, stdin=json.dumps(manifest), check=False)
        if "(Conflict)" not in done.output:
            return done


def unique(manifest: dict[str, Any], index: int) -> dict[str, Any]:
    """Return the manifest with a name that no other case uses."""
    return changed(manifest, [("metadata.name", f"job-{index}")])


def test_the_manifests_that_cases_start_from_are_accepted(tools: Tools) -> None:
    for manifest in (GOOD, FIXED):
        tools.kubectl("apply", "-n", NAMESPACE, "--dry-run=server", "-f", "-", stdin=json.dumps(manifest))


@pytest.mark.parametrize(
    ("changes", "sentence"), [case[1:] for case in BAD_AT_CREATE], ids=[c[0] for c in BAD_AT_CREATE]
)
def test_refused_at_create(tools: Tools, changes: list[Change], sentence: str) -> None:
    assert sentence in refusal(tools, changed(GOOD, changes), "apply")


@pytest.mark.parametrize("case", range(len(BAD_AT_CHANGE)), ids=[c[0] for c in BAD_AT_CHANGE])
def test_refused_at_change(tools: Tools, case: int) -> None:
    _, start, changes, sentence = BAD_AT_CHANGE[case]
    before = unique(start, case)
    tools.kubectl("create", "-n", NAMESPACE, "-f", "-", stdin=json.dumps(before))
    done = replace(tools, changed(before, changes))
    assert done.code != 0, f"the API server accepted it: {done.output}"
    assert sentence in done.output
    tools.kubectl("delete", "ej", "-n", NAMESPACE, before["metadata"]["name"])


@pytest.mark.parametrize("case", range(len(GOOD_AT_CHANGE)), ids=[c[0] for c in GOOD_AT_CHANGE])
def test_accepted_at_change(tools: Tools, case: int) -> None:
    _, start, changes = GOOD_AT_CHANGE[case]
    before = unique(start, 100 + case)
    tools.kubectl("create", "-n", NAMESPACE, "-f", "-", stdin=json.dumps(before))
    done = replace(tools, changed(before, changes))
    assert done.code == 0, done.output
    tools.kubectl("delete", "ej", "-n", NAMESPACE, before["metadata"]["name"])


def test_scale_beyond_the_policy_is_refused(tools: Tools) -> None:
    job = unique(GOOD, 200)
    name = job["metadata"]["name"]
    tools.kubectl("create", "-n", NAMESPACE, "-f", "-", stdin=json.dumps(job))
    refused = tools.kubectl("scale", "-n", NAMESPACE, f"ej/{name}", "--replicas=9", check=False)
    assert refused.code != 0
    assert "replicas is above elasticPolicy.maxReplicas" in refused.output
    tools.kubectl("scale", "-n", NAMESPACE, f"ej/{name}", "--replicas=4")
    tools.kubectl("delete", "ej", "-n", NAMESPACE, name)


def test_a_finished_job_keeps_its_size(tools: Tools) -> None:
    job = unique(GOOD, 300)
    name = job["metadata"]["name"]
    tools.kubectl("create", "-n", NAMESPACE, "-f", "-", stdin=json.dumps(job))
    complete = {
        "type": "Complete",
        "status": "True",
        "reason": "AllAgentsSucceeded",
        "message": "done",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    status = json.dumps({"status": {"phase": "Succeeded", "conditions": [complete]}})
    tools.kubectl("patch", "-n", NAMESPACE, f"ej/{name}", "--subresource=status", "--type=merge", "-p", status)
    refused = tools.kubectl("scale", "-n", NAMESPACE, f"ej/{name}", "--replicas=4", check=False)
    assert "spec.replicas of a finished job may not change: delete the job and apply it again" in refused.output
    tools.kubectl("label", "-n", NAMESPACE, f"ej/{name}", "team=x")
    tools.kubectl("delete", "ej", "-n", NAMESPACE, name)


def test_defaults_are_set_in_the_job(tools: Tools) -> None:
    done = tools.kubectl("apply", "-n", NAMESPACE, "--dry-run=server", "-o", "json", "-f", "-", stdin=json.dumps(GOOD))
    spec = json.loads(done.stdout)["spec"]
    assert spec["nprocPerNode"] == "auto"
    assert spec["preload"] == ["torch", "torch._dynamo"]
    assert spec["failurePolicy"] == {"maxRestarts": 3, "maxStartFailures": 10, "avoidNodeSeconds": 86400}
    assert spec["rendezvous"]["port"] == 29400
    assert (spec["suspend"], spec["cleanPodPolicy"]) == (False, "Running")
    assert spec["restartStrategy"] == "InPlace"
    assert (spec["podReplacementPolicy"], spec["podTerminationTimeoutSeconds"]) == ("TerminatingOrFailed", 120)
    assert spec["managedBy"] == "elasticjob.dev/elasticjob-controller"

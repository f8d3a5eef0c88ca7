"""Manifests that the API server accepts, and those that it refuses with a message that says what to write instead.

`unit/agent/test_job_schema.py` reads the same tables: a local run refuses a manifest in the same words.
"""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticjob._runtime.contract.commands.reserved_variables import RESERVED_VARIABLES
from support.cluster.kube import ApiError, Json, Kube
from support.cluster.kubectl import Tools

pytestmark = pytest.mark.cluster

NAMESPACE = f"manifest-test-{os.environ.get('PYTEST_XDIST_WORKER', 'gw0')}"
"""A namespace for each process of pytest, which creates it anew when it starts: tests run in several at once."""

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
FIXED["metadata"]["name"] = "fixed"
del FIXED["spec"]["elasticPolicy"]

SUSPENDED = copy.deepcopy(GOOD)
SUSPENDED["metadata"]["name"] = "suspended"
SUSPENDED["spec"]["suspend"] = True
FIXED_SUSPENDED = copy.deepcopy(FIXED)
FIXED_SUSPENDED["metadata"]["name"] = "fixed-suspended"
FIXED_SUSPENDED["spec"]["suspend"] = True

RULE = {"name": "user-error", "action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}}
LOG_RULE = {"name": "loss", "pattern": r"step (?P<step>\d+) loss (?P<loss>\S+)"}
DRAIN = {"name": "drain", "action": "RestartGroup", "onPodConditions": [{"type": "DisruptionTarget"}]}

NEW = copy.deepcopy(GOOD)
NEW["metadata"]["name"] = "new"

OTHER_CONTROLLER = "kueue.x-k8s.io/multikueue"
"""The controller of the jobs that changes start from."""

CONTAINER = "spec.template.spec.containers.0"
ENV = f"{CONTAINER}.env"

NOT_RESERVED = (
    "PET_LOG_DIR", "PET_REDIRECTS", "PET_TEE", "PET_LOCAL_RANKS_FILTER", "PET_LOG_LINE_PREFIX_TEMPLATE", "PET_ROLE",
    "PET_EVENT_LOG_HANDLER", "PET_NPROC_PER_NODE", "PET_MODULE", "PET_MONITOR_INTERVAL", "PET_SIGNALS_TO_HANDLE",
    "PYTHON_EXEC", "TORCHELASTIC_HEALTH_CHECK_PORT", "OMP_NUM_THREADS", "NCCL_DEBUG", "MY_RANK",
)  # fmt: skip
"""Variables that docs/reference/environment-variables.md offers, and one whose name only contains a reserved one."""

Change = tuple[str, Any]
"""A path such as `spec.template.spec.containers.0.image` and its new value; ABSENT removes the field."""
ABSENT = object()

BAD_AT_CREATE: list[tuple[str, list[Change], str]] = [
    *(
        (f"reserved: {name}", [(ENV, [{"name": name, "value": "1"}])], f"remove {name} from env in spec.template: elas")
        for name in (*sorted(RESERVED_VARIABLES), "ELASTICJOB_MINE")
    ),
    (
        "reserved in several containers",
        [
            (ENV, [{"name": "MINE", "value": "1"}, {"name": "RANK", "value": "1"}]),
            (
                "spec.template.spec.initContainers",
                [{"name": "first", "image": "x", "env": [{"name": "PET_NNODES", "value": "2"}]}],
            ),
            (f"{CONTAINER[:-1]}1", {"name": "other", "image": "x", "env": [{"name": "MASTER_ADDR", "value": "h"}]}),
        ],
        "remove RANK, MASTER_ADDR, PET_NNODES from env in spec.template: elasticjob sets them for each worker",
    ),
    (
        "reserved in an init container",
        [("spec.template.spec.initContainers", [{"name": "a", "image": "x", "env": [{"name": "RANK", "value": "0"}]}])],
        "remove RANK from env in spec.template: elasticjob sets it for each worker",
    ),
    ("name in capitals", [("metadata.name", "Bert")], "metadata.name must start with a letter and have only"),
    ("name with an underscore", [("metadata.name", "a_b")], "metadata.name must start with a letter and have only"),
    ("name that ends in a dash", [("metadata.name", "a-")], "metadata.name must start with a letter and have only"),
    ("no minimum", [("spec.elasticPolicy.minReplicas", 0)], "minReplicas in body should be greater than or equal to 1"),
    (
        "max without min",
        [("spec.elasticPolicy.minReplicas", ABSENT)],
        "elasticPolicy needs both minReplicas and maxReplicas",
    ),
    ("too many nodes", [("spec.replicas", 4097)], "replicas in body should be less than or equal to 4096"),
    (
        "a maximum of too many nodes",
        [("spec.elasticPolicy.maxReplicas", 4097)],
        "maxReplicas in body should be less than or equal to 4096",
    ),
    (
        "too long stabilization",
        [("spec.elasticPolicy.scaleUpStabilizationSeconds", 3601)],
        "scaleUpStabilizationSeconds in body should be less than or equal to 3600",
    ),
    (
        "negative graceful shutdown",
        [("spec.elasticPolicy.gracefulShutdownSeconds", -1)],
        "gracefulShutdownSeconds in body should be greater than or equal to 0",
    ),
    (
        "too short join time-out",
        [("spec.rendezvous.joinTimeoutSeconds", 9)],
        "joinTimeoutSeconds in body should be greater than or equal to 10",
    ),
    (
        "too long last call",
        [("spec.rendezvous.lastCallTimeoutSeconds", 3601)],
        "lastCallTimeoutSeconds in body should be less than or equal to 3600",
    ),
    (
        "too long keep-alive",
        [("spec.rendezvous.keepAliveIntervalSeconds", 301)],
        "keepAliveIntervalSeconds in body should be less than or equal to 300",
    ),
    (
        "no keep-alive attempt",
        [("spec.rendezvous.keepAliveMaxAttempts", 0)],
        "keepAliveMaxAttempts in body should be greater than or equal to 1",
    ),
    (
        "unknown field of the store",
        [("spec.rendezvous.store", {"gpu": 1})],
        'unknown field "spec.rendezvous.store.gpu"',
    ),
    (
        "a store with little memory",
        [("spec.rendezvous.store", {"resources": {"limits": {"memory": "200Mi"}}})],
        "rendezvous.store.resources.limits.memory is below 256Mi, which a store may need: raise it, or leave it out",
    ),
    (
        "a store with a number of bytes",
        [("spec.rendezvous.store", {"resources": {"limits": {"memory": 200_000_000}}})],
        "rendezvous.store.resources.limits.memory is below 256Mi",
    ),
    (
        "a store with a device",
        [("spec.rendezvous.store", {"resources": {"claims": [{"name": "gpu"}]}})],
        "rendezvous.store.resources.claims: the store uses no devices, remove it",
    ),
    (
        "network isolation on the host's network",
        [("spec.networkIsolation", True), ("spec.template.spec.hostNetwork", True)],
        "networkIsolation is not possible with template.spec.hostNetwork: remove one of them",
    ),
    (
        "network isolation as text",
        [("spec.networkIsolation", "yes")],
        'spec.networkIsolation in body must be of type boolean: "string"',
    ),
    ("one module as text", [("spec.preload", "torch")], 'spec.preload in body must be of type array: "string"'),
    ("a module with a dash", [("spec.preload", ["my-module"])], "preload must list modules by their import names"),
    ("a module without a name", [("spec.preload", ["torch."])], "preload must list modules by their import names"),
    ("too long module", [("spec.preload", ["m" * 129])], "spec.preload[0]: Too long: may not be more than 128 bytes"),
    (
        "too large budget",
        [("spec.failurePolicy.maxRestarts", 10001)],
        "maxRestarts in body should be less than or equal to 10000",
    ),
    (
        "no attempt to start",
        [("spec.failurePolicy.maxStartFailures", 0)],
        "maxStartFailures in body should be greater than or equal to 1",
    ),
    (
        "negative stop grace",
        [("spec.stopGraceSeconds", -1)],
        "stopGraceSeconds in body should be greater than or equal",
    ),
    (
        "too long progress timeout",
        [("spec.hangPolicy", {"progressTimeoutSeconds": 86401})],
        "progressTimeoutSeconds in body should be less than or equal to 86400",
    ),
    ("a half worker", [("spec.nprocPerNode", 1.5)], "spec.nprocPerNode in body must be of type integer,string"),
    ("a template without a pod", [("spec.template", {})], "spec.template.spec: Required value"),
    ("no containers", [("spec.template.spec.containers", ABSENT)], "spec.template.spec.containers: Required value"),
    ("a container without a name", [(f"{CONTAINER}.name", ABSENT)], "spec.template.spec.containers[0].name: Required"),
    (
        "an empty command",
        [(f"{CONTAINER}.command", [])],
        "the trainer container (the one named trainer, else the first)",
    ),
    (
        "a command as text",
        [(f"{CONTAINER}.command", "python3 t.py")],
        'command in body must be of type array: "string"',
    ),
    (
        "pods that always restart",
        [("spec.template.spec.restartPolicy", "Always")],
        "restartPolicy must be absent or Never",
    ),
    (
        "two containers with one name",
        [(f"{CONTAINER[:-1]}1", {"name": "main", "image": "x"})],
        'containers[1]: Duplicate value: {"name":"main"}',
    ),
    (
        "a reserved name of an init container",
        [("spec.template.spec.initContainers", [{"name": "elasticjob-agent", "image": "x"}])],
        "names of containers and volumes must not start with elasticjob-",
    ),
    (
        "an ephemeral container",
        [("spec.template.spec.ephemeralContainers", [])],
        'unknown field "spec.template.spec.ephemeralContainers"',
    ),
    ("a container of another resource", [("spec.containers", [])], 'unknown field "spec.containers"'),
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
    (
        "a negative wait for room",
        [("spec.elasticPolicy.faultyScaleDownSeconds", -1)],
        "faultyScaleDownSeconds in body should be greater than or equal to 0",
    ),
    (
        "no wait for min",
        [("spec.waitForMinSeconds", 0)],
        "waitForMinSeconds in body should be greater than or equal to 1",
    ),
    ("replicas below min", [("spec.replicas", 1)], "replicas is below elasticPolicy.minReplicas: raise replicas"),
    ("replicas above max", [("spec.replicas", 5)], "replicas is above elasticPolicy.maxReplicas: lower replicas"),
    ("no replicas at all", [("spec.replicas", 0)], "spec.replicas in body should be greater than or equal to 1"),
    ("replicas as text", [("spec.replicas", "3")], 'spec.replicas in body must be of type integer: "string"'),
    (
        "min without max",
        [("spec.elasticPolicy.maxReplicas", ABSENT)],
        "elasticPolicy needs both minReplicas and maxReplicas",
    ),
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
        "a negative window",
        [("spec.failurePolicy.restartWindowSeconds", -1)],
        "restartWindowSeconds in body should be greater than or equal to 0",
    ),
    (
        "a negative backoff",
        [("spec.failurePolicy.backoffSeconds", -1)],
        "backoffSeconds in body should be greater than or equal to 0",
    ),
    (
        "no longest backoff",
        [("spec.failurePolicy.maxBackoffSeconds", 0)],
        "maxBackoffSeconds in body should be greater than or equal to 1",
    ),
    (
        "a backoff above the longest one",
        [("spec.failurePolicy.backoffSeconds", 301)],
        "failurePolicy.backoffSeconds is above maxBackoffSeconds: lower it, or raise maxBackoffSeconds",
    ),
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
        "two log rules of one name",
        [("spec.logRules", [LOG_RULE, LOG_RULE])],
        "logRules: two rules have the same name: write another name for one of them",
    ),
    (
        "a log rule with a capital letter",
        [("spec.logRules", [{**LOG_RULE, "name": "Loss"}])],
        "the name of a rule must start with a letter and have only a-z, 0-9 and '-', such as iteration",
    ),
    (
        "a log rule without a group",
        [("spec.logRules", [{"name": "loss", "pattern": "loss (.*)"}])],
        "pattern has no group with a name: write one, such as (?P<step>[0-9]+)",
    ),
    (
        "a condition on a metric with two bounds",
        [("spec.logRules", [{**LOG_RULE, "conditions": [{"metric": "loss", "above": 1, "below": 0.5}]}])],
        "write exactly one of notFinite: true, below and above in each condition",
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
        'supported values: "FailJob", "RestartGroup", "RestartGroupAndIgnoreMaxRestarts", "ReplacePod", '
        '"ReplacePodAndAvoidNode", "Ignore"',
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
    (
        "a trainer that restarts",
        [("spec.template.spec.containers.0.restartPolicy", "Always")],
        "the trainer container must have no restartPolicyRules, and no restartPolicy but Never",
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
        "an unknown placement",
        [("spec.placement", "Together")],
        'spec.placement: Unsupported value: "Together": supported values: "None", "Packed", "Spread"',
    ),
    (
        "a claim without a name",
        [("spec.template.spec.resourceClaims", [{"resourceClaimTemplateName": "gpus"}])],
        "spec.template.spec.resourceClaims[0].name: Required value",
    ),
    (
        "a claim of a container as text",
        [(f"{CONTAINER}.resources", {"claims": ["gpus"]})],
        'claims[0] in body must be of type object: "string"',
    ),
    ("an unknown success policy", [("spec.successPolicy", "One")], 'supported values: "All", "Any"'),
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

GOOD_AT_CREATE: list[tuple[str, list[Change]]] = [
    ("unchanged", []),
    ("the longest name", [("metadata.name", "a" * 50)]),
    ("the shortest name", [("metadata.name", "a")]),
    ("a name with digits and dashes", [("metadata.name", "bert-2--large-7b")]),
    ("a name that only resembles a store's", [("metadata.name", "bert-rdzv-2")]),
    ("a fixed size", [("spec.elasticPolicy", ABSENT)]),
    ("a fixed size with a spare", [("spec.elasticPolicy", {"spares": 1, "gracefulShutdownSeconds": 7})]),
    ("a trainer that does not restart", [("spec.template.spec.containers.0.restartPolicy", "Never")]),
    ("the older spelling of no gang", [("spec.gang", {"provider": "none"})]),
    ("one node", [("spec.elasticPolicy", ABSENT), ("spec.replicas", ABSENT)]),
    (
        "log rules",
        [
            (
                "spec.logRules",
                [
                    {**LOG_RULE, "conditions": [{"metric": "loss", "notFinite": True, "action": "RestartGroup"}]},
                    {**LOG_RULE, "name": "slow", "conditions": [{"metric": "loss", "below": 0.5, "forSeconds": 60}]},
                ],
            )
        ],
    ),
    ("the maximum as size", [("spec.replicas", ABSENT)]),
    ("one size only", [("spec.elasticPolicy", {"minReplicas": 3, "maxReplicas": 3, "replicaIncrementStep": 7})]),
    ("the largest size", [("spec.elasticPolicy.maxReplicas", 4096), ("spec.replicas", 4096)]),
    ("steps", [("spec.elasticPolicy", {"minReplicas": 2, "maxReplicas": 8, "replicaIncrementStep": 3})]),
    ("most spares", [("spec.elasticPolicy.spares", 64)]),
    ("most workers", [("spec.nprocPerNode", 64)]),
    ("workers by the processors", [("spec.nprocPerNode", "cpu")]),
    ("no fork server", [("spec.preload", [])]),
    ("most modules", [("spec.preload", [f"_pkg{i}.mod_{i}" for i in range(32)])]),
    ("torchrun's own rendezvous", [("spec.rendezvous.backend", "c10d")]),
    (
        "the ends of ranges",
        [("spec.rendezvous", {"port": 1024, "lastCallTimeoutSeconds": 0}), ("spec.stopGraceSeconds", 0)],
    ),
    (
        "a store with a place",
        [
            (
                "spec.rendezvous.store",
                {
                    "resources": {"requests": {"cpu": 1, "memory": "64Mi"}},
                    "priorityClassName": "high",
                    "nodeSelector": {"pool": "cpu"},
                    "tolerations": [{"key": "pool", "operator": "Exists"}],
                },
            )
        ],
    ),
    (
        "the smallest store",
        [("spec.rendezvous.store", {"resources": {"limits": {"cpu": "50m", "memory": 268435456}}})],
    ),
    (
        "the largest store",
        [
            (
                "spec.rendezvous.store",
                {"resources": {"requests": {"cpu": 2, "memory": "1Ti"}, "limits": {"cpu": "2", "memory": "1Ti"}}},
            )
        ],
    ),
    ("network isolation", [("spec.networkIsolation", True)]),
    ("packed", [("spec.placement", "Packed")]),
    (
        "a resource claim",
        [
            ("spec.nprocPerNode", 8),
            ("spec.template.spec.resourceClaims", [{"name": "gpus", "resourceClaimTemplateName": "eight-gpus"}]),
            (f"{CONTAINER}.resources", {"claims": [{"name": "gpus", "request": "gpu"}]}),
        ],
    ),
    (
        "MIG devices",
        [("spec.nprocPerNode", "gpu"), (f"{CONTAINER}.resources", {"limits": {"nvidia.com/mig-1g.10gb": 2}})],
    ),
    ("the host's network", [("spec.template.spec.hostNetwork", True)]),
    (
        "the host's network without isolation",
        [("spec.networkIsolation", False), ("spec.template.spec.hostNetwork", True)],
    ),
    ("no budget", [("spec.failurePolicy.maxRestarts", 0)]),
    ("a long backoff", [("spec.failurePolicy", {"backoffSeconds": 600, "maxBackoffSeconds": 600})]),
    ("stalls only reported", [("spec.hangPolicy", {"progressTimeoutSeconds": 10, "action": "Event"})]),
    ("suspended from the start", [("spec.suspend", True)]),
    ("another controller's job", [("spec.managedBy", OTHER_CONTROLLER)]),
    ("deleted at once", [("spec.ttlSecondsAfterFinished", 0), ("spec.activeDeadlineSeconds", 1)]),
    ("restartPolicy Never", [("spec.template.spec.restartPolicy", "Never")]),
    (
        "a trainer that is not the first container",
        [
            (f"{CONTAINER}.command", ABSENT),
            (f"{CONTAINER[:-1]}1", {"name": "trainer", "image": "x", "command": ["torchrun", "t.py"]}),
        ],
    ),
    (
        "a sidecar that starts first",
        [("spec.template.spec.initContainers", [{"name": "s", "image": "x", "restartPolicy": "Always"}])],
    ),
    ("labels of pods", [("spec.template.metadata", {"labels": {"team": "x"}, "annotations": {"a": "b"}})]),
    ("labels of a queue", [("metadata.labels", {"kueue.x-k8s.io/queue-name": "q"})]),
    *((f"not reserved: {name}", [(ENV, [{"name": name, "value": "1"}])]) for name in NOT_RESERVED),
    (
        "a variable of the pod",
        [(ENV, [{"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}])],
    ),
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
    (
        "placement",
        GOOD,
        [("spec.placement", "Spread")],
        "placement may not change while the job runs: set suspend to true in the same change",
    ),
    (
        "successPolicy",
        GOOD,
        [("spec.successPolicy", "Any")],
        "successPolicy may not change while the job runs: set suspend to true in the same change",
    ),
    ("preload", GOOD, [("spec.preload", [])], "preload may not change while the job runs: set suspend to true"),
    (
        "networkIsolation",
        GOOD,
        [("spec.networkIsolation", False)],
        "networkIsolation may not change while the job runs: set suspend to true in the same change",
    ),
    (
        "the place of the store",
        GOOD,
        [("spec.rendezvous.store", {"nodeSelector": {"pool": "cpu"}})],
        "rendezvous may not change while the job runs: set suspend",
    ),
    (
        "managedBy",
        GOOD,
        [("spec.managedBy", "elasticjob.dev/elasticjob-controller")],
        "managedBy may not change: create a new job",
    ),
    (
        "suspend removed with the old template changed",
        GOOD,
        [("spec.template.spec.containers.0.command", ["python3", "other.py"]), ("spec.suspend", False)],
        "template may not change while the job runs",
    ),
    ("a label of the pods", GOOD, [("spec.template.metadata.labels", {"a": "b"})], "template may not change while the"),
    ("nprocPerNode of a suspended job", SUSPENDED, [("spec.nprocPerNode", 2)], "nprocPerNode may not change"),
    (
        "managedBy of a suspended job",
        SUSPENDED,
        [("spec.managedBy", "elasticjob.dev/elasticjob-controller")],
        "managedBy may not change: create a new job",
    ),
    ("the store's place", GOOD, [("spec.rendezvous.store", {"nodeSelector": {"a": "b"}})], "rendezvous may not change"),
    (
        "min above replicas",
        GOOD,
        [("spec.elasticPolicy.minReplicas", 4)],
        "replicas is below elasticPolicy.minReplicas",
    ),
    (
        "replicas of a fixed job removed",
        FIXED,
        [("spec.replicas", ABSENT)],
        "replicas of a job without elasticPolicy.minReplicas and maxReplicas is",
    ),
    (
        "a reserved variable, with suspend",
        GOOD,
        [("spec.suspend", True), (ENV, [{"name": "RANK", "value": "0"}])],
        "remove RANK from env in spec.template: elasticjob sets it for each worker",
    ),
    ("max below replicas", GOOD, [("spec.elasticPolicy.maxReplicas", 2)], "raise maxReplicas (in the same change)"),
    (
        "fixed size",
        FIXED,
        [("spec.replicas", 4)],
        "elasticPolicy.minReplicas and maxReplicas is fixed while it runs: set suspend to true in the same change",
    ),
    (
        "from elastic to another fixed size",
        GOOD,
        [("spec.elasticPolicy", ABSENT), ("spec.replicas", 4)],
        "replicas of a job without elasticPolicy.minReplicas and maxReplicas is fixed",
    ),
]

GOOD_AT_CHANGE: list[tuple[str, dict[str, Any], list[Change]]] = [
    ("replicas", GOOD, [("spec.replicas", 4)]),
    ("both ends", GOOD, [("spec.elasticPolicy", {"minReplicas": 1, "maxReplicas": 1}), ("spec.replicas", 1)]),
    ("budget and grace", GOOD, [("spec.failurePolicy.maxRestarts", 9), ("spec.stopGraceSeconds", 5)]),
    ("a fixed job made elastic", FIXED, [("spec.elasticPolicy", {"minReplicas": 1, "maxReplicas": 8})]),
    ("failure rules added", GOOD, [("spec.failurePolicy.rules", [RULE, DRAIN])]),
    ("pods replaced", GOOD, [("spec.failurePolicy.rules", [{**RULE, "action": "ReplacePodAndAvoidNode"}])]),
    ("a backoff", GOOD, [("spec.failurePolicy.backoffSeconds", 10)]),
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
    ("the placement of a suspended job", SUSPENDED, [("spec.placement", "Packed")]),
    ("the success policy of a suspended job", SUSPENDED, [("spec.successPolicy", "Any")]),
    (
        "what may change at any time",
        GOOD,
        [
            ("spec.restartStrategy", "Recreate"),
            ("spec.podReplacementPolicy", "Failed"),
            ("spec.podTerminationTimeoutSeconds", 0),
            ("spec.waitForMinSeconds", 60),
            ("spec.disruptionBudget", False),
            ("spec.ttlSecondsAfterFinished", 0),
            ("spec.elasticPolicy.gracefulShutdownSeconds", 0),
            ("spec.elasticPolicy.faultyScaleDownSeconds", 0),
        ],
    ),
    ("suspended", GOOD, [("spec.suspend", True)]),
    (
        "rendezvous and preload, with suspend",
        GOOD,
        [("spec.suspend", True), ("spec.rendezvous.port", 29401), ("spec.preload", [])],
    ),
    ("a variable of a suspended job", SUSPENDED, [(ENV, [{"name": "PET_LOG_DIR", "value": "/logs"}])]),
    ("a label", GOOD, [("metadata.labels", {"team": "x"})]),
    ("network isolation in words", GOOD, [("spec.networkIsolation", True)]),
    ("the network isolation of a suspended job", SUSPENDED, [("spec.networkIsolation", False)]),
    (
        "spares and windows",
        GOOD,
        [("spec.elasticPolicy.spares", 2), ("spec.elasticPolicy.scaleUpStabilizationSeconds", 0)],
    ),
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
def tools(kube: Kube, cluster_dir: Path) -> Tools:
    """kubectl on a cluster with the ElasticJob CRD and the admission policy."""
    return Tools(cluster_dir / "bin", cluster_dir / "kubeconfig")


@pytest.fixture(scope="module")
def jobs(kube: Kube) -> Iterator[dict[str, Json]]:
    """The jobs that changes start from, by name, in a namespace of this module. No operator works on them."""
    kube.recreate_namespace(NAMESPACE)
    deadline = time.monotonic() + 30
    reserved = changed(GOOD, [(ENV, [{"name": "RANK", "value": "0"}])])
    while not refusal(kube, reserved) and time.monotonic() < deadline:
        pass  # a new policy takes effect after a moment
    yield {start["metadata"]["name"]: create(kube, start) for start in (GOOD, FIXED, SUSPENDED, FIXED_SUSPENDED)}
    kube.delete("namespaces", NAMESPACE)


def create(kube: Kube, manifest: Json) -> Json:
    """Create a job that the operator leaves alone, and return it."""
    return kube.create("elasticjobs", changed(manifest, [("spec.managedBy", OTHER_CONTROLLER)]), NAMESPACE)


def refusal(kube: Kube, manifest: Json) -> str:
    """Return the message with which the API server refuses a new job, or a changed one; empty if it accepts it."""
    is_change = "uid" in manifest["metadata"]
    path = kube.path("elasticjobs", NAMESPACE, manifest["metadata"]["name"] if is_change else None)
    try:
        kube.request("PUT" if is_change else "POST", f"{path}?dryRun=All&fieldValidation=Strict", manifest)
    except ApiError as error:
        return error.message
    return ""


@pytest.mark.parametrize(("changes", "sentence"), [r[1:] for r in BAD_AT_CREATE], ids=[r[0] for r in BAD_AT_CREATE])
def test_refused_at_create(kube: Kube, jobs: dict[str, Json], changes: list[Change], sentence: str) -> None:
    assert sentence in refusal(kube, changed(NEW, changes))


@pytest.mark.parametrize("changes", [row[1] for row in GOOD_AT_CREATE], ids=[row[0] for row in GOOD_AT_CREATE])
def test_accepted_at_create(kube: Kube, jobs: dict[str, Json], changes: list[Change]) -> None:
    assert refusal(kube, changed(NEW, changes)) == ""


@pytest.mark.parametrize(
    ("start", "changes", "sentence"), [r[1:] for r in BAD_AT_CHANGE], ids=[r[0] for r in BAD_AT_CHANGE]
)
def test_refused_at_change(
    kube: Kube, jobs: dict[str, Json], start: Json, changes: list[Change], sentence: str
) -> None:
    assert sentence in refusal(kube, changed(jobs[start["metadata"]["name"]], changes))


@pytest.mark.parametrize(("start", "changes"), [r[1:] for r in GOOD_AT_CHANGE], ids=[r[0] for r in GOOD_AT_CHANGE])
def test_accepted_at_change(kube: Kube, jobs: dict[str, Json], start: Json, changes: list[Change]) -> None:
    assert refusal(kube, changed(jobs[start["metadata"]["name"]], changes)) == ""


@pytest.mark.parametrize(
    ("prefix", "sentence"),
    [("bert-", ""), ("b" * 44 + "-", ""), ("b" * 45 + "-", "metadata.name is too long: write at most 50 characters")],
)
def test_a_generated_name_has_the_same_limit(kube: Kube, jobs: dict[str, Json], prefix: str, sentence: str) -> None:
    refused = refusal(kube, changed(NEW, [("metadata", {"generateName": prefix})]))
    assert sentence in refused if sentence else refused == ""


@pytest.mark.parametrize(
    ("name", "replicas", "sentence"),
    [
        ("good", 9, "replicas is above elasticPolicy.maxReplicas: lower replicas or raise maxReplicas"),
        ("good", 1, "replicas is below elasticPolicy.minReplicas: raise replicas or lower minReplicas"),
        ("fixed", 4, "replicas of a job without elasticPolicy.minReplicas and maxReplicas is fixed while it runs"),
        ("good", 4, ""),
    ],
    ids=["above", "below", "fixed size", "within"],
)
def test_the_scale_subresource_has_the_bounds_of_the_policy(
    tools: Tools, jobs: dict[str, Json], name: str, replicas: int, sentence: str
) -> None:
    scale = ("scale", "-n", NAMESPACE, f"ej/{name}", "--dry-run=server", f"--replicas={replicas}")
    done = tools.kubectl(*scale, check=False)
    assert (done.code != 0) == bool(sentence)
    assert sentence in done.output


def test_a_finished_job_keeps_its_size_and_its_template(tools: Tools, kube: Kube, jobs: dict[str, Json]) -> None:
    create(kube, changed(GOOD, [("metadata.name", "finished")]))
    complete = {
        "type": "Complete",
        "status": "True",
        "reason": "AllAgentsSucceeded",
        "message": "done",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    status = {"status": {"phase": "Succeeded", "conditions": [complete]}}
    kube.patch("elasticjobs", "finished", status, NAMESPACE, "/status")
    sentence = "a finished job does not run again: delete it and apply it again, or apply it under a new name"
    refused = tools.kubectl("scale", "-n", NAMESPACE, "ej/finished", "--replicas=4", check=False)
    assert sentence in refused.output
    changes = {"spec": {"preload": [], "rendezvous": {"port": 29401}}}
    patch = ("patch", "-n", NAMESPACE, "ej/finished", "--type=merge", "-p", json.dumps(changes))
    refused = tools.kubectl(*patch, check=False)
    assert sentence in refused.output
    assert "suspend" not in refused.output
    tools.kubectl("label", "-n", NAMESPACE, "ej/finished", "team=x")


def test_defaults_are_set_in_the_job(kube: Kube, jobs: dict[str, Json]) -> None:
    spec = kube.create("elasticjobs", NEW, NAMESPACE, dry_run=True)["spec"]
    assert spec["nprocPerNode"] == "auto"
    assert "preload" not in spec, "the operator supplies it: the platform may have another default"
    assert "spares" not in spec["elasticPolicy"]
    assert spec["failurePolicy"] == {
        "maxRestarts": 3, "maxStartFailures": 10, "avoidNodeSeconds": 86400, "restartWindowSeconds": 0,
        "backoffSeconds": 0, "maxBackoffSeconds": 300,
    }  # fmt: skip
    assert spec["rendezvous"]["port"] == 29400
    assert (spec["suspend"], spec["cleanPodPolicy"]) == (False, "Running")
    assert (spec["restartStrategy"], spec["placement"]) == ("InPlace", "None")
    assert (spec["podReplacementPolicy"], spec["podTerminationTimeoutSeconds"]) == ("TerminatingOrFailed", 120)
    assert spec["managedBy"] == "elasticjob.dev/elasticjob-controller"

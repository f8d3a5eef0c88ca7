"""Every field of the spec reaches the operator, and what rounds depend on the coordinator, also that of a local run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from elasticjob._runtime.contract.failures.failure_rules import parse_rules
from elasticjob._runtime.contract.log_rules.rules import decode_log_rules
from elasticjob._runtime.contract.messages import HangAction, RestartStrategy, RoundSettings, SuccessPolicy
from elasticjob._runtime.contract.names import Backend, TrainerIntegration
from elasticjob._runtime.local.manifest.manifest import parse_local_job
from elasticjob_operator.model.job.spec import CleanPods, GangProvider, JobSpec, Placement, PodReplacement, parse_spec
from elasticjob_operator.model.observed import parse_job
from support.common.read_yaml import read_yaml
from support.operator.build import raw_job

CRD = read_yaml(Path(__file__).resolve().parents[3] / "crds/elasticjobs.in.yaml")
RULES = [{"name": "oom", "action": "FailJob", "onReasons": ["OOMKilled"]}]
LOG_RULES = [{"name": "loss", "pattern": r"loss (?P<loss>\S+)", "conditions": [{"metric": "loss", "above": 9}]}]
RESOURCES = {"limits": {"memory": "1Gi"}}
TOLERATIONS = [{"key": "pool", "operator": "Exists"}]

FIELDS: list[tuple[str, Any, str, Any]] = [
    ("replicas", 5, "target", 5),
    ("nprocPerNode", 3, "nproc_per_node", 3),
    ("elasticPolicy.minReplicas", 3, "min_replicas", 3),
    ("elasticPolicy.maxReplicas", 9, "max_replicas", 9),
    ("elasticPolicy.replicaIncrementStep", 2, "increment", 2),
    ("elasticPolicy.scaleUpStabilizationSeconds", 7, "scale_up_stabilization", 7),
    ("elasticPolicy.spares", 4, "spares", 4),
    ("elasticPolicy.gracefulShutdownSeconds", 11, "graceful_shutdown", 11),
    ("elasticPolicy.faultyScaleDownSeconds", 12, "faulty_scale_down", 12),
    ("rendezvous.backend", "c10d", "backend", Backend.C10D),
    ("rendezvous.port", 2048, "port", 2048),
    ("rendezvous.joinTimeoutSeconds", 13, "join_timeout", 13),
    ("rendezvous.lastCallTimeoutSeconds", 14, "last_call_timeout", 14),
    ("rendezvous.keepAliveIntervalSeconds", 15, "keep_alive_interval", 15),
    ("rendezvous.keepAliveMaxAttempts", 16, "keep_alive_attempts", 16),
    ("rendezvous.store.resources", RESOURCES, "store.resources", RESOURCES),
    ("rendezvous.store.priorityClassName", "high", "store.priority_class", "high"),
    ("rendezvous.store.labels", {"team": "a"}, "store.labels", {"team": "a"}),
    ("rendezvous.store.annotations", {"a": "b"}, "store.annotations", {"a": "b"}),
    ("rendezvous.store.serviceAccountName", "account", "store.service_account", "account"),
    ("rendezvous.store.nodeSelector", {"pool": "cpu"}, "store.node_selector", {"pool": "cpu"}),
    ("rendezvous.store.tolerations", TOLERATIONS, "store.tolerations", tuple(TOLERATIONS)),
    ("preload", ["numpy"], "preload", ("numpy",)),
    ("stopGraceSeconds", 17, "stop_grace", 17),
    ("trainerIntegration", "None", "trainer_integration", TrainerIntegration.NONE),
    ("failurePolicy.maxRestarts", 18, "max_restarts", 18),
    ("failurePolicy.restartWindowSeconds", 19, "restart_window", 19),
    ("failurePolicy.backoffSeconds", 20, "backoff", 20),
    ("failurePolicy.maxBackoffSeconds", 21, "max_backoff", 21),
    ("failurePolicy.rules", RULES, "failure_rules", parse_rules(RULES)),
    ("failurePolicy.maxStartFailures", 22, "max_start_failures", 22),
    ("failurePolicy.avoidNodeSeconds", 123, "avoid_node", 123),
    ("hangPolicy.progressTimeoutSeconds", 24, "progress_timeout", 24),
    ("hangPolicy.action", "Event", "hang_action", HangAction.EVENT),
    ("logRules", LOG_RULES, "log_rules", decode_log_rules(LOG_RULES)),
    ("successPolicy", "Any", "success_policy", SuccessPolicy.ANY),
    ("waitForMinSeconds", 25, "wait_for_min", 25),
    ("suspend", True, "suspend", True),
    ("activeDeadlineSeconds", 26, "active_deadline", 26),
    ("ttlSecondsAfterFinished", 27, "ttl_after_finished", 27),
    ("cleanPodPolicy", "All", "clean_pods", CleanPods.ALL),
    ("gang.provider", "volcano", "gang", GangProvider.VOLCANO),
    ("placement", "Spread", "placement", Placement.SPREAD),
    ("restartStrategy", "Recreate", "restart_strategy", RestartStrategy.RECREATE),
    ("podReplacementPolicy", "Failed", "pod_replacement", PodReplacement.FAILED),
    ("podTerminationTimeoutSeconds", 28, "termination_timeout", 28),
    ("networkIsolation", False, "network_isolation", False),
    ("disruptionBudget", False, "disruption_budget", False),
]
"""Path in the spec, a value that is not the default, attribute of `JobSpec`, and its value."""


def complete_spec() -> dict[str, Any]:
    """Return a spec with all of these values."""
    spec: dict[str, Any] = {"template": raw_job()["spec"]["template"]}
    for path, value, _, _ in FIELDS:
        *parents, last = path.split(".")
        node = spec
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return spec


def leaves(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    for name, child in schema["properties"].items():
        if "properties" in child:
            yield from leaves(child, f"{path}{name}.")
        else:
            yield path + name


def attribute(spec: JobSpec, path: str) -> Any:
    value: Any = spec
    for name in path.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize(("path", "attr", "expected"), [(p, a, e) for p, _, a, e in FIELDS], ids=[f[0] for f in FIELDS])
def test_a_field_is_read(path: str, attr: str, expected: Any) -> None:
    without = raw_job()["spec"] | {"networkIsolation": True}
    assert attribute(parse_spec(without), attr) != expected
    assert attribute(parse_spec(complete_spec()), attr) == expected


def test_no_field_is_missing() -> None:
    (version,) = CRD["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert {path for path, *_ in FIELDS} == {*leaves(spec)} - {"template", "managedBy"}
    assert [parse_job(raw_job(managedBy=name)).managed for name in ("", "kueue.x-k8s.io/multikueue")] == [True, False]


def test_rounds_have_the_settings_of_the_spec() -> None:
    assert parse_spec(complete_spec()).settings == RoundSettings(
        min_nodes=3, max_nodes=9, target=5, spares=4, max_restarts=18, join_timeout=13.0, last_call_timeout=14.0,
        stop_grace=17.0, graceful_shutdown=11.0, keep_alive_interval=15.0, keep_alive_max_attempts=16,
        scale_up_stabilization=7.0, progress_timeout=24.0, hang_action=HangAction.EVENT, increment=2,
        restart_window=19.0, backoff=20.0, max_backoff=21.0, failure_rules=parse_rules(RULES),
        log_rules=decode_log_rules(LOG_RULES), restart_strategy=RestartStrategy.RECREATE,
        success_policy=SuccessPolicy.ANY,
    )  # fmt: skip


NOT_IN_LOCAL_RUNS = {"restart_strategy", "code"}
"""Settings that a local run leaves at their default: it restarts workers in place, and has no shipped code."""


def test_a_local_run_has_the_same_settings() -> None:
    raw = raw_job() | {"spec": complete_spec() | {"suspend": False}}
    local, on_a_cluster = parse_local_job(raw).settings, parse_spec(raw["spec"]).settings
    defaults = RoundSettings(min_nodes=1, max_nodes=1, target=1)
    names = {field.name for field in fields(RoundSettings)} - NOT_IN_LOCAL_RUNS
    assert [name for name in names if getattr(on_a_cluster, name) == getattr(defaults, name)] == []
    assert [name for name in names if getattr(local, name) != getattr(on_a_cluster, name)] == []


def test_rounds_have_the_digest_of_the_code_that_the_job_was_submitted_with() -> None:
    raw = raw_job()
    assert parse_job(raw).spec.settings.code == ""  # type: ignore[union-attr]
    raw["metadata"]["annotations"] = {"elasticjob.dev/code-sha256": "abc"}
    assert parse_job(raw).spec.settings.code == "abc"  # type: ignore[union-attr]

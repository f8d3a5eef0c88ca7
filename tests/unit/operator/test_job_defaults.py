"""Defaults of a platform: who wins, what is refused, and when a job gets them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from elasticjob_operator.kube import JOBS
from elasticjob_operator.model.job.job_defaults import (
    DEFAULT_FIELDS,
    JobDefaults,
    PlatformDefaults,
    effective_spec,
    find_default_problems,
    read_platform_defaults,
)
from elasticjob_operator.model.observed import Observed, parse_job
from elasticjob_operator.plan import plan
from elasticjob_operator.watch import defaults_file
from elasticjob_operator.watch.defaults_file import DefaultsFile
from support.operator.build import NOW, Raw, condition, raw_job, status
from support.operator.cluster import Cluster

HANG = {"progressTimeoutSeconds": 600, "action": "Event"}
OWN_HANG = {"progressTimeoutSeconds": 60, "action": "FailJob"}
STORE = {"rendezvous": {"store": {"priorityClassName": "low", "nodeSelector": {"pool": "cpu"}}}}
COMPLETE: Raw = {
    "preload": ["numpy"],
    "elasticPolicy": {"spares": 2},
    "rendezvous": {
        "store": {
            "resources": {"requests": {"cpu": 1}},
            "priorityClassName": "low",
            "nodeSelector": {"pool": "cpu"},
            "tolerations": [{"key": "a", "operator": "Exists"}],
        }
    },
    "failurePolicy": {"rules": [{"name": "oom", "action": "FailJob", "onReasons": ["OOMKilled"]}]},
    "hangPolicy": HANG,
    "waitForMinSeconds": 600,
    "activeDeadlineSeconds": 3600,
    "ttlSecondsAfterFinished": 60,
    "template": {"spec": {"priorityClassName": "batch"}},
}


@pytest.mark.parametrize(
    ("spec", "cluster", "namespace", "expected", "sources"),
    [
        ({}, {"hangPolicy": HANG}, {}, {"hangPolicy": HANG}, {"hangPolicy": "Cluster"}),
        ({}, {"hangPolicy": HANG}, {"hangPolicy": OWN_HANG}, {"hangPolicy": OWN_HANG}, {"hangPolicy": "Namespace"}),
        ({"hangPolicy": OWN_HANG}, {"hangPolicy": HANG}, {}, {"hangPolicy": OWN_HANG}, {}),
        ({"preload": []}, {"preload": ["numpy"]}, {}, {"preload": []}, {}),
        (
            {"rendezvous": {"port": 1, "store": {"priorityClassName": ""}}}, STORE, {},
            {"rendezvous": {"port": 1, "store": {"priorityClassName": "", "nodeSelector": {"pool": "cpu"}}}},
            {"rendezvous.store.nodeSelector": "Cluster"},
        ),
        ({}, {"elasticPolicy": {"spares": 1}}, {}, {}, {}),
        (
            {"elasticPolicy": {"gracefulShutdownSeconds": 5}}, {"elasticPolicy": {"spares": 1}}, {},
            {"elasticPolicy": {"gracefulShutdownSeconds": 5, "spares": 1}}, {"elasticPolicy.spares": "Cluster"},
        ),
        ({"elasticPolicy": {"spares": 0}}, {}, {"elasticPolicy": {"spares": 1}}, {"elasticPolicy": {"spares": 0}}, {}),
    ],
)  # fmt: skip
def test_the_job_wins_over_its_namespace_and_that_over_the_cluster(
    spec: Raw, cluster: Raw, namespace: Raw, expected: Raw, sources: dict[str, str]
) -> None:
    assert effective_spec(spec, JobDefaults(cluster, namespace)) == (expected, sources)


def test_each_field_that_may_have_a_default_is_accepted_and_reaches_the_spec() -> None:
    assert find_default_problems(COMPLETE) == []
    raw = raw_job(elasticPolicy={"minReplicas": 1, "maxReplicas": 2})
    job = parse_job(raw, JobDefaults(cluster=COMPLETE))
    assert job.default_sources.keys() == {".".join(path) for path in DEFAULT_FIELDS}
    spec, without = job.spec, parse_job(raw).spec
    assert spec is not None
    assert without is not None
    assert (spec.preload, spec.spares, spec.progress_timeout, spec.wait_for_min) == (("numpy",), 2, 600, 600)
    assert (spec.active_deadline, spec.ttl_after_finished) == (3600, 60)
    assert spec.store.priority_class == "low"
    assert [rule.name for rule in spec.failure_rules] == ["oom"]
    assert spec.template["spec"]["priorityClassName"] == "batch"
    assert (without.preload, without.spares, without.progress_timeout) == (("torch", "torch._dynamo"), 0, 0)


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"hangPolicy": {"progressTimeoutSecond": 600}}, 'unknown field "spec.hangPolicy.progressTimeoutSecond"'),
        ({"hangPolicy": {"progressTimeoutSeconds": 1}}, "should be greater than or equal to 10"),
        ({"hangPolicie": HANG}, "hangPolicie can have no default: only preload, "),
        ({"failurePolicy": {"maxRestarts": 5}}, "failurePolicy.maxRestarts can have no default"),
        ({"template": {"spec": {"nodeSelector": {"a": "b"}}}}, "template.spec.nodeSelector can have no default"),
        ({"preload": ["my-module"]}, "preload must list modules by their import names"),
        ({"rendezvous": {"store": {"resources": {"limits": {"memory": "1Mi"}}}}}, "is below 256Mi"),
        (["hangPolicy"], "it is not an object with fields of spec"),
    ],
)
def test_a_mistake_in_defaults_is_found_by_the_schema_and_the_rules_of_the_crd(section: Any, sentence: str) -> None:
    assert sentence in "; ".join(find_default_problems(section))


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("cluster: [", "it is not YAML"),
        ("- a", "it is not one object"),
        ("everywhere: {}", "unknown field 'everywhere'"),
        ("namespaces: [a]", "`namespaces` is not an object"),
    ],
)
def test_a_file_that_cannot_be_read_changes_nothing(written: str, sentence: str) -> None:
    last = PlatformDefaults({"preload": []}, {"a": {"hangPolicy": HANG}})
    found = read_platform_defaults(written, last)
    assert (found.cluster, found.namespaces) == (last.cluster, last.namespaces)
    assert sentence in found.of("any").problem


def test_a_section_with_a_mistake_is_refused_alone_and_stays_as_it_was() -> None:
    good = read_platform_defaults(
        "{cluster: {preload: [a]}, namespaces: {x: {waitForMinSeconds: 5}}}", PlatformDefaults()
    )
    assert not good.problems
    bad = read_platform_defaults(
        "{cluster: {preload: [b]}, namespaces: {x: {waitForMinSeconds: 0}, y: {preload: [c]}}}", good
    )
    assert (bad.of("x").cluster, bad.of("x").namespace) == ({"preload": ["b"]}, {"waitForMinSeconds": 5})
    assert "waitForMinSeconds" in bad.of("x").problem
    assert bad.of("y") == JobDefaults({"preload": ["b"]}, {"preload": ["c"]})
    assert not read_platform_defaults("", bad).of("x").record, "an empty file has no defaults"


async def test_the_file_is_followed_and_a_mistake_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "defaults.yaml"
    defaults = DefaultsFile(str(file))
    await defaults.read()
    assert "cannot be read" in caplog.text
    for written, preload, refused in (("[a]", ["a"], 0), ("[a-b]", ["a"], 1), ("[a-b]", ["a"], 1), ("[c]", ["c"], 0)):
        caplog.clear()
        file.write_text(f"cluster: {{preload: {written}}}")
        await defaults.read()
        assert defaults.of("ns").cluster == {"preload": preload}
        assert REGISTRY.get_sample_value("elasticjob_job_defaults_refused") == refused
    file.write_text("cluster: {preload: [a-b]}")
    await defaults.read()
    await defaults.read()
    assert [record.levelname for record in caplog.records].count("ERROR") == 1


async def test_a_text_that_breaks_the_check_ends_no_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RecursionError("too deep")

    file = tmp_path / "defaults.yaml"
    file.write_text("cluster: {preload: [a]}")
    defaults = DefaultsFile(str(file))
    await defaults.read()
    file.write_text("cluster: {preload: [b]}")
    monkeypatch.setattr(defaults_file, "read_platform_defaults", broken)
    await defaults.read()
    assert defaults.of("ns").cluster == {"preload": ["a"]}
    assert "RecursionError: too deep" in defaults.of("ns").problem


async def test_without_a_file_there_are_no_defaults() -> None:
    defaults = DefaultsFile("")
    await defaults.read()
    assert defaults.of("ns") == JobDefaults()


async def test_a_job_keeps_the_defaults_with_which_it_was_started_until_it_is_resumed() -> None:
    cluster = Cluster(preload=["own"])
    current = JobDefaults({"hangPolicy": HANG, "preload": ["numpy"]}, {"waitForMinSeconds": 60})
    cluster.controller.defaults = lambda namespace: current

    async def recorded() -> Any:
        await cluster.reconcile_for(30.0)
        return cluster.api.objects[JOBS, "bert"]["status"].get("defaults")

    began = {
        "execution": 1,
        "cluster": {"hangPolicy": HANG, "preload": ["numpy"]},
        "namespace": {"waitForMinSeconds": 60},
        "fields": {"hangPolicy": "Cluster", "waitForMinSeconds": "Namespace"},
    }
    assert await recorded() == began
    current = JobDefaults({"hangPolicy": OWN_HANG}, problem="the namespace's are refused")
    assert await recorded() == began
    cluster.change(hangPolicy=OWN_HANG)
    assert await recorded() == {**began, "fields": {"waitForMinSeconds": "Namespace"}}
    cluster.change(suspend=True, hangPolicy=None)
    await recorded()
    cluster.change(suspend=False)
    assert await recorded() == {"execution": 2, **current.record, "fields": {"hangPolicy": "Cluster"}}
    cluster.change(suspend=True)
    await recorded()
    current = JobDefaults()
    cluster.change(suspend=False)
    assert await recorded() is None


def test_a_job_from_before_the_defaults_has_none() -> None:
    job = parse_job(raw_job(status=status()), JobDefaults({"hangPolicy": HANG}))
    assert job.spec is not None
    assert job.spec.progress_timeout == 0
    planned = plan(Observed(job), "image", NOW)
    assert planned.status is not None
    assert "defaults" not in planned.status


def test_defaults_of_an_earlier_execution_do_not_count() -> None:
    """After a rollback, an operator that knows no defaults resumed the job and kept the field."""
    old = {"executionAttempts": 2, "defaults": {"execution": 1, "cluster": {"hangPolicy": HANG}}}
    spec = parse_job(raw_job(status=status(**old))).spec
    assert spec is not None
    assert spec.progress_timeout == 0


def test_a_suspended_job_without_pods_asks_for_what_its_next_execution_will_need() -> None:
    suspended = {"conditions": [condition("Suspended")], "defaults": {"execution": 1, "cluster": {"hangPolicy": HANG}}}
    current = JobDefaults({"hangPolicy": OWN_HANG})
    timeouts = []
    for pods in (0, 1):
        spec = parse_job(raw_job(status=status(replicas=pods, **suspended), suspend=True), current).spec
        timeouts.append(spec.progress_timeout if spec is not None else None)
    assert timeouts == [60, 600]

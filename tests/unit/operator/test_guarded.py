"""The digest of the fields that may change only while a job is suspended, and a job that changed all the same."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from elasticjob_operator.actions import CreateWorker, DeletePod
from elasticjob_operator.model.cluster.raw import timestamp
from elasticjob_operator.model.job.guarded import GUARDED_FIELDS, guarded_digest
from elasticjob_operator.model.job.job_defaults import JobDefaults
from elasticjob_operator.model.job.status import parse_status
from elasticjob_operator.model.observed import QUEUE_LABEL, Children, Job, LinkView, Observed, parse_job
from support.common.read_yaml import read_yaml
from support.operator.build import (
    NOW,
    REPOSITORY,
    Raw,
    condition,
    conditions_of,
    events_of,
    job,
    raw_job,
    reasons_of,
    run,
    status,
    status_of,
    steady,
)

SPEC: Raw = raw_job()["spec"]
SCHEMA = read_yaml(REPOSITORY / "crds/elasticjobs.yaml")["spec"]["versions"][0]["schema"]
RULES: list[Raw] = SCHEMA["openAPIV3Schema"]["x-kubernetes-validations"]
OTHER: Raw = {"spec": {"containers": [{"name": "main", "image": "user:2", "command": ["python", "train.py"]}]}}


# ---- the digest


def defaults(schema: Raw, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path of each field that has a default, and the default; `[]` stands for an item."""
    if "default" in schema:
        yield path, schema["default"]
    for name, below in schema.get("properties", {}).items():
        yield from defaults(below, *path, name)
    if isinstance(schema.get("items"), dict):
        yield from defaults(schema["items"], *path, "[]")


def with_value(path: tuple[str, ...], value: Any) -> Any:
    """Return the smallest object that has this value there."""
    for name in reversed(path):
        value = [value] if name == "[]" else {name: value}
    return value


GUARDED_DEFAULTS = [
    (path, value)
    for name in GUARDED_FIELDS
    for path, value in defaults(SCHEMA["openAPIV3Schema"]["properties"]["spec"]["properties"][name], name)
]


@pytest.mark.parametrize(("path", "value"), GUARDED_DEFAULTS, ids=lambda v: ".".join(v) if isinstance(v, tuple) else "")
def test_a_default_of_the_definition_does_not_change_the_digest(path: tuple[str, ...], value: Any) -> None:
    """An upgrade of the definition may add it to a job that runs. A new default needs an entry in `guarded`."""
    before, after = (with_value(path[:-1], {"x": 1, **added}) for added in ({}, {path[-1]: value}))
    assert guarded_digest(after) == guarded_digest(before)


def test_the_guarded_fields_are_those_of_the_definitions_rules() -> None:
    suffix = " may not change while the job runs: set suspend to true in the same change"
    named = {rule["message"].partition(suffix)[0] for rule in RULES if suffix in rule["message"]}
    assert named & set(SCHEMA["openAPIV3Schema"]["properties"]["spec"]["properties"]) == set(GUARDED_FIELDS)


@pytest.mark.parametrize(
    "change",
    [
        {"template": OTHER}, {"rendezvous": {"port": 1234}}, {"preload": []}, {"gang": {"provider": "volcano"}},
        {"successPolicy": "Any"}, {"placement": "Packed"}, {"networkIsolation": True},
        {"rendezvous": {"store": {"tolerations": [{"key": "a"}]}}},
        {"template": {"spec": {**SPEC["template"]["spec"], "affinity": {"labelSelector": {}}}}},
    ],
    ids=str,
)  # fmt: skip
def test_a_change_of_a_guarded_field_changes_the_digest(change: Raw) -> None:
    assert guarded_digest({**SPEC, **change}) != guarded_digest(SPEC)


def test_other_fields_and_the_order_of_keys_do_not() -> None:
    turned = dict(reversed(copy.deepcopy(SPEC).items()))
    assert guarded_digest({**turned, "replicas": 5, "suspend": True, "stopGraceSeconds": 7}) == guarded_digest(SPEC)


def test_the_digest_of_a_release_stays() -> None:
    """Another digest of the same fields would suspend every job that runs, at the upgrade of the operator."""
    assert guarded_digest(SPEC) == "1:792f8b4639b0bbefff710bcf7a89aaa2"


# ---- the job


def changed(**known: Any) -> Job:
    """Return a job of the first execution whose template is another one now."""
    raw = raw_job(status=status(**known))
    raw["spec"]["template"] = OTHER
    return parse_job(raw)


def deleted(p: Any) -> set[str]:
    return {a.name for a in p.actions if isinstance(a, DeletePod)}


def test_a_job_that_was_suspended_changed_and_resumed_unseen_is_suspended_first() -> None:
    p = run(replace(steady(), job=changed()))
    assert reasons_of(p)["Suspended"] == ("True", "SuspendedForChange")
    assert "changed and resumed at once" in conditions_of(p)["Suspended"]["message"]
    assert "the job then resumes" in conditions_of(p)["Suspended"]["message"]
    assert deleted(p) == {"bert-0-0", "bert-1-0"}
    assert not [a for a in p.actions if isinstance(a, CreateWorker)]
    assert "Suspended" in events_of(p)
    assert status_of(p)["guardedFields"] == job(status=status()).status.raw["guardedFields"]


def test_it_resumes_with_the_new_fields_once_nothing_is_left() -> None:
    suspended = changed(conditions=[condition("Suspended", reason="SuspendedForChange")])
    left = replace(steady(), job=suspended)
    assert reasons_of(run(left)).get("Suspended", ("True", "SuspendedForChange"))[0] == "True"
    gone = replace(left, workers=(), stores=(), children=Children(), link=LinkView(), standby_link=LinkView())
    p = run(gone)
    assert status_of(p)["executionAttempts"] == 2
    assert status_of(p)["guardedFields"] == {"execution": 2, "digest": suspended.guarded_digest}
    assert reasons_of(p)["Suspended"] == ("False", "Resumed")
    later = run(replace(gone, job=replace(suspended, status=parse_status(status_of(p)))))
    assert [a.name for a in later.actions if isinstance(a, CreateWorker)] == ["bert-0-1", "bert-1-1"]


@pytest.mark.parametrize(
    "record",
    [None, {}, {"execution": 1, "digest": "2:abc"}, {"execution": 0, "digest": "1:abc"}, {"digest": 7}, "x"],
    ids=str,
)
def test_a_status_that_says_nothing_comparable_adopts_the_present_fields(record: Any) -> None:
    """An older operator wrote it, or resumed the job since, or a newer one makes its digest in another way."""
    raw = raw_job(status=status())
    raw["status"]["guardedFields"] = record
    p = run(replace(steady(), job=parse_job(raw)))
    assert p.actions == ()
    assert status_of(p)["guardedFields"] == {"execution": 1, "digest": parse_job(raw).guarded_digest}


def test_a_job_that_has_ended_is_not_suspended_for_a_change() -> None:
    ended = changed(conditions=[condition("Complete"), condition("SuccessCriteriaMet")])
    assert reasons_of(run(replace(steady(), job=ended))).get("Suspended") is None


def test_the_digest_is_of_what_the_pods_are_made_from() -> None:
    """Writing the built-in list where the platform has another default is a change, and writing its own is none."""
    recorded = {"defaults": {"execution": 1, "cluster": {"preload": ["numpy"]}}}
    specs: tuple[Raw, ...] = ({}, {"preload": ["torch", "torch._dynamo"]}, {"preload": ["numpy"]})
    parsed = [parse_job(raw_job(status=status(**recorded), **spec)) for spec in specs]
    silent, builtin, same = (found.guarded_digest for found in parsed)
    assert silent == same != builtin


def test_a_workload_asks_anew_when_the_default_of_the_templates_priority_changes() -> None:
    queued = raw_job(suspend=True)
    queued["metadata"]["labels"] = {QUEUE_LABEL: "team"}
    priorities = ({"template": {"spec": {"priorityClassName": name}}} for name in ("low", "high"))
    low, high = (parse_job(queued, JobDefaults(cluster)).template_digest for cluster in priorities)
    assert low != high


def test_the_status_of_a_finished_job_is_not_written_for_the_digest_alone() -> None:
    known = status(conditions=[condition("Complete")], completionTime=timestamp(NOW - 60))
    raw = raw_job(status=known)
    del raw["status"]["guardedFields"]
    decided = run(Observed(parse_job(raw)))
    assert decided.status is None or "guardedFields" not in decided.status

"""A local run refuses what the API server refuses: the tables of the cluster's test, and CEL."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.test_manifests import BAD_AT_CHANGE, BAD_AT_CREATE, FIXED, GOOD, GOOD_AT_CHANGE, GOOD_AT_CREATE, changed
from elasticjob._runtime.local.manifest.cel import CelError, parse_cel
from elasticjob._runtime.local.manifest.job_schema import find_problems, job_schema, with_defaults

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
RULES = "x-kubernetes-validations"


def nodes(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield schema
    inner = [schema[key] for key in ("items", "additionalProperties") if key in schema]
    for child in [*schema.get("properties", {}).values(), *inner]:
        yield from nodes(child)


@pytest.mark.parametrize(("changes", "message"), [row[1:] for row in BAD_AT_CREATE], ids=[r[0] for r in BAD_AT_CREATE])
def test_what_a_cluster_refuses_is_refused_in_its_words(changes: list[tuple[str, Any]], message: str) -> None:
    problems = find_problems(changed(GOOD, changes))
    assert [problem for problem in problems if message in problem], problems


@pytest.mark.parametrize(
    "manifest",
    [
        FIXED,
        *(changed(GOOD, changes) for _, changes in GOOD_AT_CREATE),
        *(changed(manifest, changes) for _, manifest, changes in GOOD_AT_CHANGE),
    ],
    ids=["fixed", *(row[0] for row in GOOD_AT_CREATE), *(row[0] for row in GOOD_AT_CHANGE)],
)
def test_what_a_cluster_accepts_is_accepted(manifest: dict[str, Any]) -> None:
    assert find_problems(manifest) == []


def test_each_rule_has_a_manifest_that_it_refuses() -> None:
    sentences = [row[-1] for row in (*BAD_AT_CREATE, *BAD_AT_CHANGE)]
    messages = [rule["message"] for schema in nodes(job_schema()) for rule in schema.get(RULES, ())]
    untested = [message for message in messages if not any(sentence in message for sentence in sentences)]
    # It is about the status, which these tables do not set: test_a_finished_job_keeps_its_size_and_its_template.
    assert untested == ["a finished job does not run again: delete it and apply it again, or apply it under a new name"]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda p: p.name)
def test_the_examples_are_accepted(path: Path) -> None:
    (manifest,) = yaml.safe_load_all(path.read_text())
    assert find_problems(manifest) == []


def test_each_default_satisfies_the_rules_of_its_field() -> None:
    """The API server checks a default before it applies those of the fields in it, and refuses the CRD otherwise."""
    checked = 0
    for schema in nodes(job_schema()):
        for rule in schema.get(RULES, ()) if "default" in schema else ():
            if "oldSelf" not in rule["rule"]:
                assert parse_cel(rule["rule"])({"self": schema["default"]}) is True
                checked += 1
    assert checked > 0


def test_all_problems_of_a_kind_are_reported() -> None:
    spec = {"replica": 1, "rendezvous": {"prot": 1}}
    assert find_problems({**GOOD, "spec": {**GOOD["spec"], **spec}}) == [
        'unknown field "spec.replica"',
        'unknown field "spec.rendezvous.prot"',
    ]
    assert find_problems({**GOOD, "metadata": {"name": "x", "label": {}}}) == ['unknown field "metadata.label"']


def test_metadata_and_status_of_a_job_in_a_cluster_are_accepted() -> None:
    read = copy.deepcopy(GOOD)
    read["metadata"] |= {"namespace": "default", "uid": "u", "managedFields": [{"manager": "kubectl"}]}
    assert find_problems({**read, "status": {"phase": "Running"}}) == []


def test_defaults() -> None:
    spec = with_defaults(job_schema(), {**GOOD, "spec": {**GOOD["spec"], "stopGraceSeconds": None}})["spec"]
    assert (spec["stopGraceSeconds"], spec["rendezvous"]["port"], spec["elasticPolicy"]["replicaIncrementStep"]) == (
        1,
        29400,
        1,
    )
    assert "preload" not in spec, "a cluster's operator supplies it"


def test_every_keyword_of_the_schema_is_checked_and_every_rule_is_read() -> None:
    known = {
        "type", "format", "properties", "items", "additionalProperties", "required", "default", "enum", "minimum",
        "maximum", "maxLength", "maxItems", "pattern", "x-kubernetes-int-or-string", "x-kubernetes-list-map-keys",
        "x-kubernetes-list-type", "x-kubernetes-map-type", "x-kubernetes-preserve-unknown-fields", RULES,
    }  # fmt: skip
    found = list(nodes(job_schema()))
    assert {key for node in found for key in node} <= known
    rules = [rule["rule"] for node in found for rule in node.get(RULES, ())]
    assert len(rules) > 10
    for rule in rules:
        assert callable(parse_cel(rule))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("self.n + 1 == 2", CelError),
        ("10 - 3 - 2 == 5 && 7 - 10 % 4 == 5 && (1 - 4) % 2 == -1", True),
        ("self.n >= 1 && self.n <= 64", True),
        ("self.n == -1 || !(self.n > 1)", True),
        ("type(self.n) == int ? self.n in [1, 2] : self.n in ['auto']", True),
        ("type(self.name) == int ? self.n > 5 : self.name in ['it\\'s', \"a.b\"]", True),
        ("has(self.absent) || size(self.list) == 2", True),
        ("self.absent == 1", KeyError),
        ("self.list.all(x, x.matches('^[a-z]$')) && !self.list.exists(x, x == 'c')", True),
        ("self.list.exists_one(x, x == 'a') && !self.list.exists_one(x, x != 'c')", True),
        ("[has(self.n), has(self.absent)].exists_one(given, given)", True),
        ("self.list[0].startsWith('a') && self.name.endsWith('.b')", True),
        ("self.list[5] == 'a'", IndexError),
        ("quantity('1M').isLessThan(quantity('1Mi')) && !quantity('1Ti').isLessThan(quantity('999Gi'))", True),
        ("quantity('1').isLessThan(quantity('1m'))", False),
        ("self.list.map(x, x)", CelError),
        ("self.n ==", CelError),
        ("(self.n", CelError),
        ("self.n 1", CelError),
    ],
)
def test_cel(text: str, expected: Any) -> None:
    scope = {"self": {"n": 1, "name": "a.b", "list": ["a", "b"]}}
    if isinstance(expected, bool):
        assert parse_cel(text)(scope) is expected
    else:
        with pytest.raises(expected):
            parse_cel(text)(scope)

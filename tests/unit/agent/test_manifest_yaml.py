"""Odd YAML: `elasticjob run` and `elasticjob convert` read it as the API server does, or name the place."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticjob._runtime.local.manifest.manifest_yaml import (
    MAX_DEPTH,
    MAX_REPEATED,
    ManifestYamlError,
    read_yaml_documents,
)
from elasticjob.cli import main

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)
"""600 bytes for 10^12 values."""
REPEATED = f"aliases such as *a3 repeat over {MAX_REPEATED} values"
DEEP = "nested more than 100 levels deep"
REFUSED = {
    "deep lists": (
        "a: " + "[" * 3000 + "]" * 3000,
        f"line 1, column {3 + MAX_DEPTH}: {DEEP}",
    ),
    "deep objects": (
        "\n".join(" " * n + "a:" for n in range(3000)),
        f"line 101, column 101: {DEEP}",
    ),
    "a list in itself": ("a: &x [1, *x]", "line 1, column 11: *x is a part of itself"),
    "an object in itself": ("a: &x\n  b:\n    c: *x\n", "line 3, column 8: *x is a part of itself"),
    "merged with itself": ("a: &x\n  <<: *x\n", "line 2, column 7: *x is a part of itself"),
    "a bomb": (BOMB, f"line 5, column 45: {REPEATED}"),
    "a number that never ends": ("a: 1" + "0" * 5000, "line 1, column 4: '1000"),
    "infinity": ("a: .inf", "line 1, column 4: .inf is not a number that JSON has"),
    "bytes": ("a: !!binary aGVsbG8=", "could not determine a constructor for the tag 'tag:yaml.org,2002:binary'"),
    "a tag that does not fit": ("a: !!int x", "line 1, column 4: 'x' is invalid"),
    "a bool that is none": ("a: !!bool x", "line 1, column 4: 'x' is invalid"),
    "an object of Python": ("a: !!python/object/apply:os.system [id]", "could not determine a constructor"),
    "a name without text": ("a: {~: 1}", "line 1, column 5: this name is not text: put it in quotes"),
    "a list as a name": ("? [a]\n: 1", "found unhashable key"),
    "half a character": (r'a: "\ud800"', "line 1, column 4: half of a surrogate pair is not text"),
    "no YAML": ("a: [", "is not YAML: while parsing"),
}


@pytest.mark.parametrize("command", ["run", "convert"])
@pytest.mark.parametrize(("text", "expected"), REFUSED.values(), ids=REFUSED)
def test_odd_yaml_is_refused_with_its_place(
    command: str, text: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    assert main([command, str(path)]) in (2, 64)
    printed = capsys.readouterr().err
    assert printed.startswith(f"elasticjob {command}: {path}: ")
    assert expected in printed
    assert len(printed) < 1000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 2026-01-02", {"a": "2026-01-02"}),
        ("a: 2026-99-99", {"a": "2026-99-99"}),
        ("a: 2026-01-02T03:04:05Z", {"a": "2026-01-02T03:04:05Z"}),
        ("{1: a, true: b, c: 1}", {"1": "a", "true": "b", "c": 1}),
        ("a: &x {b: [1]}\nc: *x\nd: {<<: *x, e: 2}", {"a": {"b": [1]}, "c": {"b": [1]}, "d": {"b": [1], "e": 2}}),
        ("a: [1, 1.5, ~, yes, text]", {"a": [1, 1.5, None, True, "text"]}),
    ],
)
def test_yaml_is_read_as_json(text: str, expected: object) -> None:
    assert read_yaml_documents(f"---\n{text}\n---\n") == [expected]


def test_many_aliases_of_small_values_are_accepted() -> None:
    text = "a: &x [1]\nb: [" + ", ".join(["*x"] * 10_000) + "]"
    ((document),) = read_yaml_documents(text)
    assert document["b"] == [[1]] * 10_000


def test_an_anchor_belongs_to_its_document() -> None:
    with pytest.raises(ManifestYamlError, match="undefined alias"):
        read_yaml_documents("a: &x 1\n---\nb: *x\n")

"""The parser of the documentation's code blocks, and the comparison of outputs."""

from __future__ import annotations

import pytest

from support.docs.blocks import indented_code, parse_blocks
from support.docs.manifests import complete_job
from support.docs.outputs import differences
from support.docs.python_code import problems

PAGE = """
# Title

<!-- run: hello -->
```bash
kubectl get ej
```

It prints:

<!-- some lines -->
```
NAME
```

## Part

1. A list:

   <!-- not run: needs a GPU -->
   ```bash
   nvidia-smi
     -q
   ```
"""


def test_blocks_have_marks_a_section_and_their_output() -> None:
    first, second = parse_blocks("page.md", PAGE)
    assert (str(first), first.section, first.language, first.text) == ("page.md:5", "Title", "bash", "kubectl get ej\n")
    assert (first.mark("run"), first.mark("not run")) == ("hello", None)
    assert first.output is not None
    assert (first.output.text, first.output.marks) == ("NAME\n", ("some lines",))
    assert (second.section, second.text, second.mark("not run")) == ("Part", "nvidia-smi\n  -q\n", "needs a GPU")


def test_a_mark_is_right_above_its_block() -> None:
    (block,) = parse_blocks("p", "<!-- run: a -->\n\ntext\n\n```bash\ntrue\n```\n")
    assert block.marks == ()


@pytest.mark.parametrize("text", ["```bash\ntrue\n", "```\noutput\n```\n", "```bash\na\n```\n# B\n```\nof a?\n```\n"])
def test_a_block_without_an_end_or_a_command_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"p:\d"):
        parse_blocks("p", text)


def test_indented_code_is_found() -> None:
    assert indented_code("text\n\n    code\n    more\n\n```yaml\na:\n\n    b: 1\n```\n") == [3]


@pytest.mark.parametrize(
    ("shown", "printed", "agree"),
    [
        ("NAME  AGE\nbert  12s", "NAME   AGE\nbert   3m5s", True),
        ("NAME  AGE\nbert  12s", "NAME   AGE\nbert   3m5s\nmore", False),
        ("first\n...\nlast", "first\n1\n2\nlast", True),
        ("first\n...\nlast", "first\n1\n2", False),
        ("pod ... is lost", "pod bert-1-0 is lost", True),
        ("pod ... is lost", "pod bert-1-0 is found", False),
        ("at 2026-01-01T00:00:00Z from 10.0.0.1", "at 2027-02-03T04:05:06Z from 10.32.1.17", True),
        ("2 workers on 2 pods", "3 workers on 2 pods", False),
        ("elasticjob-5f6c7d8b9-x2x4z  1/1", "elasticjob-69d8c4b5f7-abcde  1/1", True),
    ],
)
def test_a_shown_output_is_compared_without_what_changes(shown: str, printed: str, agree: bool) -> None:
    assert (differences(shown, printed) == []) is agree


def test_some_lines_may_come_in_any_order() -> None:
    assert differences("b\na", "a\nx\nb", some_lines=True) == []
    assert differences("c\na", "a\nx\nb", some_lines=True) == ["not printed: c"]


def test_a_part_of_a_manifest_goes_where_its_fields_are() -> None:
    assert complete_job({"replicas": 3})["spec"]["replicas"] == 3
    pod = complete_job({"volumes": [], "containers": [{"name": "a"}]})["spec"]["template"]["spec"]
    assert (pod["volumes"], pod["containers"][0]["name"], pod["containers"][0]["image"]) == ([], "a", "i")
    assert complete_job({"env": []})["spec"]["template"]["spec"]["containers"][0]["env"] == []
    assert complete_job([{"name": "a"}], "spec.failurePolicy.rules")["spec"]["failurePolicy"]["rules"][0]["name"] == "a"
    with pytest.raises(ValueError, match="'nope'"):
        complete_job({"nope": 1})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("elasticjob.launch(f, nodes=2)", []),
        ("elasticjob.launch(f, machines=2)", ["elasticjob.launch has no argument machines"]),
        ("elasticjob.State(anything=1)", []),
        ("elasticjob.states()", ["elasticjob has no states"]),
        ("from elasticjob.inprocess import Wrapper, Wrap", ["elasticjob.inprocess has no Wrap"]),
        ("for x in y:", ["line 1: expected an indented block after 'for' statement on line 1"]),
    ],
)
def test_python_code_is_read_for_names_of_elasticjob(text: str, problem: list[str]) -> None:
    assert problems(text) == problem

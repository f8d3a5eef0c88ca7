"""Every script of the tests, examples, benchmarks and pages ends the process groups that it creates.

A process that leaves them may die of SIGABRT in Python's finalization, after its last line ("terminate called without
an active exception"), unless it is a fork of the fork server.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CREATES = re.compile(r"\binit_process_group\(|\bTrainingArguments\(")
ENDS = "destroy_process_group"
EXCEPTIONS = {
    "benchmarks/train.py": "the benchmark kills it",
    "benchmarks/train_in_process.py": "the benchmark kills it",
    "benchmarks/train_nvidia.py": "the benchmark kills it",
    "docs/run/frameworks.md": "parts of scripts: the callbacks' sections create a trainer only",
    "tests/gpu/test_faults_in_groups.py": "the beginning of scripts that end their groups",
    "tests/integration/test_agent_fork_server.py": "what a fork does that leaves its group",
    "tests/integration/test_files_left_open.py": "what a fork does that leaves its group",
    "tests/integration/test_framework_callbacks.py": "the beginning of scripts that end their groups",
    "tests/integration/test_frameworks.py": "a single process, for which Trainer creates no group",
    "tests/integration/test_interrupted_group.py": "its processes end by os._exit",
    "tests/integration/test_own_trainers.py": "the second script is a single process, and the first one ends its group",
    "tests/integration/test_unmodified_trainers.py": "scripts as people write them: the trainers create the groups",
    "tests/integration/test_saved_in_process.py": "it trains until it is drained or fails",
    "tests/unit/test_scripts_end_groups.py": "what this test finds",
}
"""Files whose scripts may leave a group, and why."""


def scripts(path: Path) -> Iterator[str]:
    """Return the scripts of a file: texts in a test, code of a page, or the file itself."""
    text = path.read_text()
    if path.suffix == ".md":
        fenced = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
        yield from fenced.findall(text)
        outside = fenced.sub("\n---\n", text).splitlines()
        for is_code, lines in groupby(outside, lambda line: not line or line.startswith("    ")):
            if is_code:
                yield "\n".join(lines)
    elif path.is_relative_to(ROOT / "tests") and path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count("\n") > 1:
                yield node.value
    else:
        yield text


def leaves_a_group(script: str) -> bool:
    return CREATES.search(script) is not None and ENDS not in script


@pytest.mark.slow
def test_each_script_ends_the_process_groups_that_it_creates() -> None:
    folders = ("benchmarks", "docs", "examples", "tests")
    paths = [p for f in folders for s in ("*.py", "*.md", "*.yaml") for p in sorted((ROOT / f).rglob(s))]
    leaving = [str(path.relative_to(ROOT)) for path in paths if any(map(leaves_a_group, scripts(path)))]
    assert sorted(set(leaving) - set(EXCEPTIONS)) == []
    assert sorted(set(EXCEPTIONS) - set(leaving)) == [], "exceptions that are needless"


def test_a_script_that_leaves_its_group_is_found() -> None:
    assert leaves_a_group("import torch.distributed as dist\ndist.init_process_group('gloo')\n")
    assert not leaves_a_group("dist.init_process_group('gloo')\ndist.destroy_process_group()\n")

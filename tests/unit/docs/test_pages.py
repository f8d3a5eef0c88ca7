"""Each code block of the pages for users runs in a test, is checked here, or says why nothing runs it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from elasticjob._runtime.local.manifest.job_schema import find_mistakes, find_problems
from elasticjob_operator.model.job.job_defaults import PlatformDefaults, read_platform_defaults
from support.cluster.kubectl import REPOSITORY
from support.docs.blocks import RUNNERS, Block, all_blocks, indented_code, pages
from support.docs.manifests import complete_job
from support.docs.python_code import problems

BLOCKS = all_blocks()
WHY_NOT = re.compile(r"needs \w.+")
KUEUE = {"integrations": {"externalFrameworks": ["ElasticJob.v1alpha1.elasticjob.dev"]}}
SHELL = ("bash", "dockerfile", "promql")


def in_language(*names: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in names]


def test_all_code_is_in_blocks_with_a_language() -> None:
    assert [f"{path}:{line}" for path in pages() for line in indented_code(path.read_text())] == []
    assert {block.language for block in BLOCKS} <= {*SHELL, "", "python", "yaml", "mermaid"}


@pytest.mark.parametrize("block", in_language(*SHELL), ids=str)
def test_a_shell_block_runs_in_a_test_or_says_what_it_needs(block: Block) -> None:
    runner, why_not = block.mark("run"), block.mark("not run")
    if block.mark("file") is not None:
        return
    assert (runner is None) != (why_not is None), "above it, write <!-- run: NAME --> or <!-- not run: needs X -->"
    assert runner is None or runner in RUNNERS
    assert why_not is None or WHY_NOT.fullmatch(why_not)


@pytest.mark.parametrize("name", RUNNERS)
def test_a_runner_has_blocks_and_a_test(name: str) -> None:
    assert [block for block in BLOCKS if block.mark("run") == name]
    assert f'"{name}"' in (REPOSITORY / RUNNERS[name]).read_text()


@pytest.mark.parametrize("block", in_language("python"), ids=str)
def test_python_code_uses_elasticjob_as_it_is(block: Block) -> None:
    assert problems(block.text) == []


@pytest.mark.parametrize("block", in_language("yaml"), ids=str)
def test_a_manifest_is_one_that_the_cluster_accepts(block: Block) -> None:
    if block.mark("not run"):
        assert WHY_NOT.fullmatch(block.mark("not run") or "")
        return
    place, test = block.mark("part of"), block.mark("checked")
    if test is not None:
        assert block.page in (REPOSITORY / test).read_text()
        return
    for part in yaml.safe_load_all(block.text):
        if place is None and isinstance(part, dict) and part.get("kind", "ElasticJob") != "ElasticJob":
            pytest.fail(f"a {part['kind']}: name the test that checks it with <!-- checked: PATH -->")
        assert CHECKS.get(place or "", lambda p: find_problems(complete_job(p, place)))(part) == []


def problems_of_status(part: Any) -> list[str]:
    definition = yaml.load((REPOSITORY / "crds/elasticjobs.yaml").read_text(), yaml.CSafeLoader)
    version = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return find_mistakes(version["properties"]["status"], part)


def problems_of_values(part: dict[str, Any]) -> list[str]:
    chart = yaml.safe_load((REPOSITORY / "charts/elasticjob/values.yaml").read_text())
    unknown = [name for name in part if name not in chart]
    defaults = read_platform_defaults(yaml.safe_dump(part.get("jobDefaults", {})), PlatformDefaults())
    return unknown + [f"{where}: {problem}" for where, problem in defaults.problems.items()]


CHECKS: dict[str, Callable[[Any], list[str]]] = {
    "status": problems_of_status,
    "values.yaml": problems_of_values,
    "Kueue's Configuration": lambda part: (
        [] if part == KUEUE else ["see `externalFrameworks` in Kueue's Configuration"]
    ),
}
"""What a part belongs to, if that is not the spec of a job: how it is checked."""


FIELD = re.compile(r"\{(?:range )?\.(?:status|spec)\.\w+")


@pytest.mark.parametrize("block", [b for b in in_language("bash") if " ej" in b.text and FIELD.search(b.text)], ids=str)
def test_a_field_that_a_command_prints_is_one_of_a_job(block: Block) -> None:
    definition = yaml.load((REPOSITORY / "crds/elasticjobs.yaml").read_text(), yaml.CSafeLoader)
    fields = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    for loop, items in re.findall(r"\{range \.status\.(\w+)\[\*\]\}(.*?)\{end\}", block.text):
        known = fields["status"]["properties"][loop]["items"]["properties"]
        assert [name for name in re.findall(r"\{\.(\w+)\}", items) if name not in known] == []
    for part, name in re.findall(r"\{(?:range )?\.(status|spec)\.(\w+)", block.text):
        assert name in fields[part]["properties"]


@pytest.mark.parametrize("block", [b for b in in_language("bash") if "delete pod -l" in b.text], ids=str)
def test_a_command_that_deletes_a_worker_pod_leaves_the_stores(block: Block) -> None:
    """A store pod has the label of index 0 too."""
    assert "elasticjob.dev/role=worker" in block.text

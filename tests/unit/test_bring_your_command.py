"""Each manifest of docs/run/bring-your-command.md is one that a cluster and a local run accept."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from elasticjob._runtime.contract.commands.launchers import REFUSED_LAUNCHERS, find_refused_launcher
from elasticjob._runtime.local.manifest.job_schema import find_problems
from elasticjob._runtime.local.manifest.manifest import parse_local_job

PAGE = (Path(__file__).resolve().parents[2] / "docs/run/bring-your-command.md").read_text()
MANIFESTS = [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)]
HEAD = {"apiVersion": "elasticjob.dev/v1alpha1", "kind": "ElasticJob", "metadata": {"name": "mine"}}


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda m: m["spec"]["template"]["spec"]["containers"][0]["image"])
def test_a_manifest_of_the_page_is_accepted(manifest: dict[str, Any]) -> None:
    job = {**HEAD, **manifest}
    assert find_problems(job) == []
    assert not find_refused_launcher(manifest["spec"]["template"]["spec"]["containers"][0]["command"])
    assert parse_local_job(job).command


ROWS = [
    "scripts.chat_sft",
    "torchtitan.train",
    "pretrain_gpt.py",
    "torch.distributed.run",
    "/usr/local/bin/torchrun",
    "--mixed_precision=fp16",
    "recipes/accelerate_configs/zero3.yaml",
    "trl",
    "axolotl",
    "llamafactory-cli",
    "swift",
    "tune",
    "deepspeed",
    "composer",
    "trainer.num_nodes",
    "fabric",
    "open_clip_train.main",
    "./distributed_train.sh",
    "verl.trainer.fsdp_sft_trainer",
    "numactl",
    "nsys",
    "torch.distributed.launch",
    "--multiprocessing-distributed",
    "--tee=3",
]
"""A word of each command line that people bring."""


def test_the_page_has_a_manifest_for_each_line() -> None:
    commands = [" ".join(m["spec"]["template"]["spec"]["containers"][0]["command"]) for m in MANIFESTS]
    assert [word for word in ROWS if not any(word in command for command in commands)] == []


def test_the_page_says_what_to_write_instead_of_a_refused_launcher() -> None:
    section = PAGE.split("## Launchers that are refused")[1]
    assert [name for name in REFUSED_LAUNCHERS if f"`{name}`" not in section] == []

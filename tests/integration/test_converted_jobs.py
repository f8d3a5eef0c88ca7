"""PyTorchJobs that `elasticjob convert` has converted, run by `elasticjob run`: the same workers as in Kubeflow."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.agent.worker_scripts import script
from support.local.run import PROGRAM, LocalRun

SHOW = "import os, sys; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], *sys.argv[1:])"
STATIC = ["--nnodes=$(WORLD_SIZE)", "--node_rank=$(RANK)", "--master_addr=$(MASTER_ADDR)", "--master_port=23456"]
SHELL = 'echo begin; torchrun --nproc_per_node=$N --nnodes=$WORLD_SIZE --node_rank=$RANK "$0" --lr 1'


def pytorchjob(command: list[str]) -> dict[str, Any]:
    """Return a PyTorchJob with a Master and a Worker."""
    container = {"name": "pytorch", "image": "example/toy", "command": command, "env": [{"name": "N", "value": "2"}]}
    replica = {"restartPolicy": "Never", "template": {"spec": {"containers": [container]}}}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "toy"},
        "spec": {"pytorchReplicaSpecs": {"Master": replica, "Worker": replica}},
    }


@pytest.mark.parametrize(
    ("launcher", "workers"),
    [
        (["python3"], 2),
        (["torchrun", "--nproc_per_node=$(N)", *STATIC], 4),
        (["python3", "-m", "torch.distributed.launch", "--use_env", "--nproc_per_node=2", *STATIC], 4),
        (["bash", "-c", SHELL], 4),
    ],
    ids=["python", "torchrun", "launch", "shell"],
)
def test_a_converted_job_runs_the_workers_of_the_pytorchjob(launcher: list[str], workers: int, tmp_path: Path) -> None:
    program = script(tmp_path, SHOW)[-1]
    arguments = [] if launcher[0] == "bash" else ["--lr", "1"]
    text = yaml.safe_dump(pytorchjob([*launcher, program, *arguments]))
    converted = subprocess.run([*PROGRAM, "convert", "-"], input=text, capture_output=True, text=True, check=True)
    job = yaml.safe_load(converted.stdout)
    job["spec"]["preload"] = ["json"]  # the fork server runs the torchrun of a shell, and needs no torch here
    with LocalRun(job, tmp_path) as run:
        assert run.exit_code() == 0, run.text
    shown = sorted(re.findall(r"rank (\d of \d.*)$", run.text, re.MULTILINE))
    assert shown == [f"{rank} of {workers} --lr 1" for rank in range(workers)], run.text


def test_a_converted_jobset_runs_the_workers_of_the_jobset(tmp_path: Path) -> None:
    program = script(tmp_path, SHOW)[-1]
    index = {"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['a']"}}}
    line = f"torchrun --nproc_per_node=2 --nnodes=2 --node_rank=$RANK --rdzv_endpoint=$MASTER_ADDR:1 {program} --lr 1"
    container = {"name": "a", "image": "example/toy", "command": ["bash", "-c", line], "env": [index]}
    pods = {"parallelism": 2, "completions": 2, "template": {"spec": {"containers": [container]}}}
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "toy"},
        "spec": {"replicatedJobs": [{"name": "workers", "template": {"spec": pods}}]},
    }
    text = yaml.safe_dump(jobset)
    done = subprocess.run(
        [*PROGRAM, "convert", "-", "--strict"], input=text, capture_output=True, text=True, check=True
    )
    job = yaml.safe_load(done.stdout)
    job["spec"]["preload"] = ["json"]
    with LocalRun(job, tmp_path) as run:
        assert run.exit_code() == 0, run.text
    assert sorted(re.findall(r"rank (\d of \d.*)$", run.text, re.MULTILINE)) == [f"{i} of 4 --lr 1" for i in range(4)]

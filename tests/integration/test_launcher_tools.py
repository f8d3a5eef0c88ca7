"""Tools that call a launcher train in the one world of the job: Fabric's and uv's own programs, and stand-ins.

The stand-ins make the calls of TRL 1.16, torchtune 0.6 and LLaMA-Factory 0.9, whose packages need many others.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.local.run import LocalRun, manifest

PROGRAMS = Path(sys.executable).parent
TRAIN = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
ranks = torch.tensor([1.0])
dist.all_reduce(ranks)
print("trained", *sys.argv[1:], "as", dist.get_rank(), "of", int(ranks.item()), flush=True)
dist.destroy_process_group()
"""
TRL = """
import sys
from accelerate.commands.launch import launch_command, launch_command_parser

launch_command(launch_command_parser().parse_args([*sys.argv[2:], "train.py", "--config", "sft.yaml"]))
"""
TUNE = """
from torch.distributed.run import get_args_parser, run

args = get_args_parser().parse_args()
args.standalone = True
args.module = True
run(args)
"""
LLAMA_FACTORY = """
import os, subprocess, sys
options = f"--nnodes {os.getenv('NNODES', '1')} --node_rank {os.getenv('NODE_RANK', '0')} --nproc_per_node 1"
address = f"--master_addr {os.getenv('MASTER_ADDR')} --master_port {os.getenv('MASTER_PORT')}"
process = subprocess.run(f"torchrun {options} {address} train.py {sys.argv[2]}".split(), check=True)
sys.exit(process.returncode)
"""
IMAGENET = """
import sys, torch, torch.distributed as dist, torch.multiprocessing as mp

def train(gpu, nodes, node, url):
    dist.init_process_group("gloo", init_method=url, world_size=2 * nodes, rank=2 * node + gpu)
    ranks = torch.tensor([1.0])
    dist.all_reduce(ranks)
    print(f"trained as {dist.get_rank()} of {int(ranks.item())}\\n", end="", flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(train, nprocs=2, args=(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
"""
"""Starts two ranks on each node, as the imagenet example of PyTorch does."""
STAND_INS = {"trl": TRL, "tune": TUNE, "llamafactory-cli": LLAMA_FACTORY}


@pytest.mark.torch
@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("{programs}/fabric run train.py --accelerator=cpu --devices=1 --num-nodes=2 by fabric", "by fabric"),
        pytest.param(
            "uv run --no-project --offline --python {programs}/python python -m torch.distributed.run train.py by uv",
            "by uv",
            marks=pytest.mark.deep,
        ),
        pytest.param("{folder}/trl sft --cpu --num_processes 2", "--config sft.yaml", marks=pytest.mark.deep),
        pytest.param("{folder}/tune --nproc_per_node 1 train by tune", "by tune", marks=pytest.mark.deep),
        ("FORCE_TORCHRUN=1 NNODES=2 NODE_RANK=0 {folder}/llamafactory-cli train x.yaml", "x.yaml"),
    ],
    ids=["fabric", "uv", "trl", "torchtune", "LLaMA-Factory"],
)
def test_a_tool_trains_in_the_world_of_the_job(command: str, words: str, tmp_path: Path) -> None:
    if command.startswith("uv ") and not (PROGRAMS / "uv").exists():
        pytest.skip("uv is not installed")
    (tmp_path / "train.py").write_text(TRAIN)
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!{sys.executable}\n{text}")
        (tmp_path / name).chmod(0o755)
    script = f"PATH={PROGRAMS}:$PATH\n{command.format(programs=PROGRAMS, folder=tmp_path)}"
    with LocalRun(manifest(["bash", "-c", script], replicas=2), tmp_path) as run:
        assert run.exit_code() == 0, run.text
    for rank in range(2):
        assert f"trained {words} as {rank} of 2" in run.text, run.text
    assert run.text.count("trained") == 2, run.text


@pytest.mark.torch
def test_ranks_of_mp_spawn_meet_in_the_store_of_the_round_if_that_is_meant(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(IMAGENET)
    script = "ALLOW_SEPARATE_WORLDS=1 python main.py $WORLD_SIZE $RANK tcp://$MASTER_ADDR:$MASTER_PORT"
    with LocalRun(manifest(["bash", "-c", script], replicas=2), tmp_path) as run:
        assert run.exit_code() == 0, run.text
    assert all(f"trained as {rank} of 4" in run.text for rank in range(4)), run.text

"""What deepspeed and composer start are the ranks of the pod, other launchers are refused: with stand-ins of them.

The packages need GPUs or too many other packages. The stand-ins have their entry points, and start ranks of their own
if nothing takes their place.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.local.run import LocalRun, manifest

SCRIPT = """
import os, sys
variables = "RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "CROSS_RANK", "CROSS_SIZE", "LOCAL_SIZE"
print("script", *sys.argv[1:], *(f"{name}={os.environ[name]}" for name in variables if name in os.environ), flush=True)
"""
DEEPSPEED = """
import argparse
import subprocess
import sys

def parse_args(args=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--hostfile")
    parser.add_argument("--num_gpus", type=int, default=-1)
    for name in ("module", "no_python", "no_local_rank"):
        parser.add_argument("--" + name, action="store_true")
    parser.add_argument("user_script")
    parser.add_argument("user_args", nargs=argparse.REMAINDER)
    return parser.parse_args(args)

def main(args=None):
    sys.exit("ranks of its own")
"""
LAUNCH = """
import argparse
import sys

def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--node_rank", type=int, default=0)
    parser.add_argument("--world_info")
    for name in ("module", "no_python", "no_local_rank"):
        parser.add_argument("--" + name, action="store_true")
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return parser.parse_args()

def main():
    sys.exit("ranks of its own")

if __name__ == "__main__":
    main()
"""
COMPOSER = """
import argparse
import sys

def _get_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", "--nproc", type=int)
    parser.add_argument("-m", "--module_mode", action="store_true")
    parser.add_argument("-c", "--command_mode", action="store_true")
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs="...")
    return parser

def main():
    sys.exit("ranks of its own")
"""
FT_LAUNCHER = """
def launch_agent(config, entrypoint, args):
    print("an agent of its own", flush=True)

def main():
    launch_agent(None, "train.py", [])
"""
HYPERPODRUN = """
def main(args=None):
    print("an agent of its own", flush=True)
"""
PACKAGES = {
    "deepspeed": ("deepspeed/launcher/runner.py", DEEPSPEED),
    "deepspeed-node": ("deepspeed/launcher/launch.py", LAUNCH),
    "composer": ("composer/cli/launcher.py", COMPOSER),
    "ft_launcher": ("nvidia_resiliency_ext/fault_tolerance/launcher.py", FT_LAUNCHER),
    "hyperpodrun": ("hyperpod_elastic_agent/run.py", HYPERPODRUN),
}
"""File and text of each launcher's module, by the name of its program."""


def run_job(folder: Path, command: str, workers: int = 1) -> LocalRun:
    """Start a job of two pods with so many workers each whose shell runs a command, with the launchers on its PATH."""
    programs = folder / "bin"
    programs.mkdir()
    for program, (name, text) in PACKAGES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        module = name.removesuffix(".py").replace("/", ".")
        lines = f"import sys\nsys.path[0] = {str(folder)!r}\nfrom {module} import main\nsys.exit(main())\n"
        (programs / program).write_text(f"#!{sys.executable}\n{lines}")
        (programs / program).chmod(0o755)
    (folder / "train.py").write_text(SCRIPT)
    (folder / "stage.sh").write_text(f"set -e\nPATH={programs}:$PATH\necho before\n{command}\necho after\n")
    job = manifest(["bash", "stage.sh"], replicas=2, nprocPerNode=workers, failurePolicy={"maxRestarts": 3})
    return LocalRun(job, folder)


TWO = "eyJsb2NhbGhvc3QiOiBbMCwgMV19"
"""`{"localhost": [0, 1]}`: two devices of one node."""


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            "deepspeed --hostfile=x --num_gpus 2 train.py --deepspeed '$x'",
            "--local_rank={local} --deepspeed $x RANK={rank} WORLD_SIZE=4 LOCAL_RANK={local} CROSS_RANK={node}"
            " CROSS_SIZE=2 LOCAL_SIZE=2",
        ),
        (
            f"python -m deepspeed.launcher.launch --world_info {TWO} --no_local_rank --module train x",
            "x RANK={rank} WORLD_SIZE=4 LOCAL_RANK={local} CROSS_RANK={node} CROSS_SIZE=2 LOCAL_SIZE=2",
        ),
        (
            "composer -n 2 train.py 'rank=$RANK'",
            "rank={rank} RANK={rank} WORLD_SIZE=4 LOCAL_RANK={local} NODE_RANK={node}",
        ),
    ],
    ids=["deepspeed", "deepspeed of a node", "composer"],
)
def test_a_launcher_s_ranks_are_those_of_the_pod_whose_command_runs_once(
    command: str, words: str, tmp_path: Path
) -> None:
    with run_job(tmp_path, command, workers=2) as run:
        assert run.exit_code() == 0, run.text
    for rank in range(4):
        assert f"script {words.format(rank=rank, local=rank % 2, node=rank // 2)}\n" in run.text, run.text
    assert run.text.count(":script ") == 4, run.text
    assert (run.text.count(":before"), run.text.count(":after")) == (2, 2), run.text


def test_a_launcher_that_the_command_does_not_name_becomes_the_rank_that_it_starts_below(tmp_path: Path) -> None:
    with run_job(tmp_path, "name=composer; $name -n 2 train.py 'rank=$RANK'", workers=2) as run:
        assert run.exit_code() == 0, run.text
    for rank in range(4):
        assert f"script rank={rank} RANK={rank} " in run.text, run.text
    assert (run.text.count(":script "), run.text.count(":before")) == (4, 4), run.text


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("deepspeed --num_gpus 8 train.py", "asks for 8 workers in each pod, and the job has 1"),
        ("composer -n 8 train.py", "set spec.nprocPerNode: 8"),
        ("ft_launcher train.py", "ft_launcher is an elastic agent of its own: write torchrun in its place"),
        ("hyperpodrun train.py", "hyperpodrun is an elastic agent of its own: write torchrun in its place"),
    ],
    ids=["deepspeed", "composer", "ft_launcher", "hyperpodrun"],
)
def test_what_the_job_is_not_made_for_fails_at_once(command: str, message: str, tmp_path: Path) -> None:
    with run_job(tmp_path, command) as run:
        assert run.exit_code() != 0, run.text
    assert "(TrainsApart)" in run.text, run.text
    assert message in run.text, run.text
    assert "0 restarts" in run.text, run.text
    assert "of its own\n" not in run.text, run.text

"""Tools that call a launcher, and programs before Python, in one job: stand-ins with the calls of the tools.

The calls are those of poetry 2.5, ms-swift 4.6, axolotl 0.19 and torchtitan's run_train.sh. numactl is the real one if
it is installed.
"""

from __future__ import annotations

import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from support.local.run import LocalRun, manifest

PROGRAMS = Path(sys.executable).parent
TRAIN = """
import os, sys
alloc = os.environ.get("PYTORCH_ALLOC_CONF", "-")
print("trained", *sys.argv[1:], "with", alloc, "as", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
"""
POETRY = f"""
import os, sys
environment = {str(PROGRAMS)!r}
os.environ["VIRTUAL_ENV"] = os.path.dirname(environment)
os.environ["PATH"] = environment + os.pathsep + os.environ["PATH"]
os.execvpe(sys.argv[2], sys.argv[2:], os.environ)
"""
SWIFT = """
import os, subprocess, sys
torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", os.environ["NPROC_PER_NODE"]]
sys.exit(subprocess.run([sys.executable, *torchrun, "train.py", *sys.argv[2:]]).returncode)
"""
AXOLOTL = """
import os, sys
config, *options = sys.argv[2:]
if options[:2] == ["--launcher", "torchrun"]:
    launcher = ["torchrun", *options[3:]]
else:
    launcher = ["accelerate", "launch", "--cpu"]
os.execvp(launcher[0], [*launcher, "-m", "axolotl.cli.train", config])
"""
NUMACTL = """
import os, sys
command = [word for word in sys.argv[1:] if not word.startswith("--")]
os.execvp(command[0], command)
"""
TITAN = """#!/usr/bin/bash
set -ex
NGPU=${NGPU:-"8"}
LOG_RANK=${LOG_RANK:-0}
PYTORCH_ALLOC_CONF="expandable_segments:True" \\
torchrun --nproc_per_node=${NGPU} --rdzv_backend c10d --rdzv_endpoint="localhost:0" \\
--local-ranks-filter ${LOG_RANK} --role rank --tee 3 -m torchtitan.train --module ${MODULE} "$@"
"""
ROWS = """
set -e
PATH=$PATH:{folder}/bin:{programs}
numactl --cpunodebind=0 --membind=0 python train.py by numactl
poetry run python train.py by poetry
NPROC_PER_NODE=1 swift pt --deepspeed zero2
axolotl train config.yml
axolotl train again.yml --launcher torchrun -- --nnodes 1
NGPU=1 MODULE=llama3 ./run_train.sh --steps 1
cd open_clip/src; torchrun --nproc_per_node 1 -m open_clip_train.main --train-data '/data/cc12m-{{0000..2175}}.tar'
"""
TRAINED = [
    "by numactl with -",
    "by poetry with -",
    "--deepspeed zero2 with -",
    "config.yml with -",
    "again.yml with -",
    "--module llama3 --steps 1 with expandable_segments:True",
    "--train-data /data/cc12m-{0000..2175}.tar with -",
]
"""What each row of ROWS says in each rank."""


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text if text.startswith("#!") else f"#!{sys.executable}\n{text}")
    path.chmod(0o755)


@pytest.mark.torch
def test_each_row_trains_once_in_the_world_of_the_job(tmp_path: Path) -> None:
    programs = {"poetry": POETRY, "swift": SWIFT, "axolotl": AXOLOTL}
    if shutil.which("numactl") is None:
        programs["numactl"] = NUMACTL
    for name, text in programs.items():
        write_program(tmp_path / "bin" / name, text)
    write_program(tmp_path / "run_train.sh", TITAN)
    for name in ("train.py", "axolotl/cli/train.py", "torchtitan/train.py", "open_clip/src/open_clip_train/main.py"):
        write_program(tmp_path / name, TRAIN)
    command = ["bash", "-c", ROWS.format(folder=tmp_path, programs=PROGRAMS)]
    with LocalRun(manifest(command, replicas=2, preload=["torch"]), tmp_path) as run:
        assert run.exit_code(timeout=180) == 0, run.text
    found = sorted(re.findall(r"trained (.*)", run.text))
    assert found == sorted(f"{words} as {rank} of 2" for words in TRAINED for rank in range(2)), run.text


NSYS = """
import signal, subprocess, sys
options = sys.argv.index("python3")
process = subprocess.Popen(sys.argv[options:], start_new_session=True)
signal.signal(signal.SIGTERM, lambda number, frame: process.send_signal(number))
code = process.wait()
print("report of", sys.argv[options - 1], "after code", code, flush=True)
sys.exit(code)
"""
"""Starts the program in a session of its own, passes SIGTERM on, and writes its report when the program has ended."""
SAVES = """
import os, signal, sys, time

def save(*_):
    print("saved rank", os.environ["RANK"], flush=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
print("began", flush=True)
while True:
    time.sleep(0.1)
"""


def test_a_profiled_rank_gets_sigterm_and_its_report_is_written(tmp_path: Path) -> None:
    write_program(tmp_path / "nsys", NSYS)
    (tmp_path / "train.py").write_text(SAVES)
    command = ["bash", "-c", f"PATH={tmp_path}:$PATH; exec nsys profile -o out-$RANK python3 -u train.py"]
    with LocalRun(manifest(command, replicas=2, stopGraceSeconds=20), tmp_path) as run:
        for _ in range(2):
            run.wait_for("began")
        run.signal(signal.SIGTERM)
        run.exit_code()
    for rank in range(2):
        assert f"saved rank {rank}" in run.text, run.text
        assert f"report of out-{rank} after code 0" in run.text, run.text

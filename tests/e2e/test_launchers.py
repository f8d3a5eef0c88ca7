"""Commands that start launchers, six kinds of them at once, on the real cluster: a kill, a change of size, a drain.

`integration/test_launcher*.py` runs more of them as local processes. accelerate is the real one, from this checkout's
packages; the other tools are stand-ins with the calls of torchtune 0.6, ms-swift 4.6 and uv.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.cluster.jobs import Job, kill_worker, kubectl, manifest
from support.cluster.kube import Json
from support.cluster.logbook import LATE, LogBook

Submit = Callable[[Json], Job]
Follow = Callable[[Job], LogBook]

TRAIN = """
import os, sys, time, torch, torch.distributed as dist
import elasticjob

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
state = elasticjob.State(model=model, step=0)
state.sync()
ends = 0
while not ends:
    ranks = torch.tensor([1.0, float(os.path.exists("/work/end"))])
    dist.all_reduce(ranks)
    size, ends = map(int, ranks.tolist())
    state.step += 1
    print(f"step={state.step} loss=0.5 world={size} of {' '.join(sys.argv[1:])}", flush=True)
    elasticjob.progress(state.step)
    time.sleep(0.3)
dist.destroy_process_group()
"""
"""Trains until a file appears. `world` counts the ranks that take part."""
ACCELERATE = "from accelerate.commands.accelerate_cli import main\nmain()\n"
TORCHRUN = "from torch.distributed.run import main\nmain()\n"
TUNE = """
from torch.distributed.run import get_args_parser, run
args = get_args_parser().parse_args()
args.standalone = True
run(args)
"""
SWIFT = """
import os, subprocess, sys
torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", os.environ["NPROC_PER_NODE"]]
sys.exit(subprocess.run([*torchrun, "/work/train.py", *sys.argv[2:]]).returncode)
"""
UV = """
import os, sys
os.environ["PATH"] = "/work/.venv/bin:" + os.environ["PATH"]
os.execvp(sys.argv[2], sys.argv[2:])
"""
PROGRAMS = {
    "bin/accelerate": ACCELERATE, "bin/tune": TUNE, "bin/swift": SWIFT, "bin/uv": UV, ".venv/bin/torchrun": TORCHRUN,
}  # fmt: skip
ACTIVATE = "export VIRTUAL_ENV=/work/.venv PATH=/work/.venv/bin:$PATH"
LINES = {
    "fsdp": "exec /usr/bin/torchrun --nproc_per_node=1 --nnodes=2 /work/train.py by fsdp",
    "bridge": "uv run python3 -m torch.distributed.run --nproc-per-node=1 train.py by bridge",
    "tune": "tune --nproc_per_node 1 train.py by tune",
    "swift": "NPROC_PER_NODE=1 swift pt by swift",
    "accelerate": "accelerate launch --use_fsdp --num_processes 2 train.py by accelerate",
    "nanochat": "source .venv/bin/activate; torchrun --standalone --nproc_per_node=1 train.py by nanochat; echo ended",
}
"""By the name of the job. `fsdp` is AWS's example, `bridge` is Megatron-Bridge."""
WAIT = 400.0
"""Seconds. Twelve pods import torch at once, on whatever machine has the cluster."""
NOT_IN_THE_IMAGE = [
    *("accelerate", "anyio", "click", "h11", "httpcore2", "httpx2", "huggingface_hub", "safetensors", "tqdm"),
    "truststore",
]
"""Packages that accelerate imports, none of which is built for one version of Python."""


@dataclass(frozen=True)
class Trained:
    """A job and its output."""

    job: Job
    book: LogBook

    def pod(self, index: int, incarnation: int = 0) -> str:
        return f"{self.job.name}-{index}-{incarnation}"

    def kill(self, cluster: Path) -> None:
        """Kill the worker of pod 1, and wait until both pods train again."""
        moment = kill_worker(cluster, self.job, self.pod(1))
        for index in range(2):
            self.wait_step(index, moment + LATE)

    def scale(self, cluster: Path) -> None:
        """Scale the job to three pods, and wait until all of them train."""
        moment = time.time()
        kubectl(cluster, "scale", "-n", self.job.namespace, f"elasticjob/{self.job.name}", "--replicas=3")
        for index in range(3):
            self.wait_step(index, moment, world=3)

    def drain(self, cluster: Path) -> None:
        """Delete pod 1, and wait until another one trains in its place."""
        moment = time.time()
        kubectl(cluster, "delete", "pod", "-n", self.job.namespace, self.pod(1), "--wait=false")
        self.book.wait_steps_after(moment, world=3, incarnation=1, timeout=WAIT)

    def wait_step(self, index: int, moment: float, *, world: int = 2) -> None:
        def made() -> bool:
            return any(s.pod == self.pod(index) and s.world == world and s.time > moment for s in self.book.steps)

        self.book.wait(made, timeout=WAIT, what=f"a step of {self.pod(index)} in a world of {world}")

    def assert_one_world(self, planned_after: float) -> None:
        """Assert that each round trained once, in the world of all pods, and that the planned ends lost no step."""
        steps = self.book.steps
        assert {s.world for s in steps} <= {2, 3}
        made = [s.step for s in steps if s.pod == self.pod(0) and s.time > planned_after]
        assert made == list(range(made[0], made[0] + len(made)))
        self.job.wait("Complete", timeout=WAIT)
        status = self.job.status()
        assert (status["restarts"], status["restartsCountTowardsMax"]) == (1, 1), status
        self.book.wait_read()
        for pod in {s.pod for s in steps}:
            lines = self.book.text(pod)
            assert lines.count(":ended") == (1 if self.job.name == "nanochat" and self.lasted(pod) else 0)

    def lasted(self, pod: str) -> bool:
        return pod != self.pod(1)


@pytest.fixture
def folder(shared_dir: str) -> Path:
    """What the pods have under /work: programs, Python packages and the script."""
    found = Path(shared_dir)
    for name, text in {**PROGRAMS, "train.py": TRAIN, ".venv/bin/activate": ACTIVATE}.items():
        path = found / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/usr/bin/python3\n{text}" if name in PROGRAMS else text)
        path.chmod(0o755)
    for name in NOT_IN_THE_IMAGE:
        library = Path(str(importlib.metadata.distribution(name).locate_file("")))
        for source in (library / name, *library.glob(f"{name}-*.dist-info")):  # the packages look for their versions
            shutil.copytree(source, found / "packages" / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    return found


def launches(name: str, folder: Path) -> Json:
    """Return a job of two pods with one worker each that runs a line of LINES."""
    job = manifest(
        name,
        ["bash", "-c", LINES[name]],
        replicas=2,
        elasticPolicy={"minReplicas": 1, "maxReplicas": 3},
        volumes=[{"name": "work", "hostPath": {"path": str(folder)}}],
        mounts=[{"name": "work", "mountPath": "/work"}],
    )
    container = job["spec"]["template"]["spec"]["containers"][0]
    container["workingDir"] = "/work"
    container["env"] = [
        {"name": "PATH", "value": "/work/bin:/usr/local/bin:/usr/bin:/bin"},
        {"name": "PYTHONPATH", "value": "/work/packages"},
    ]
    return job


@pytest.mark.deep
@pytest.mark.timeout(1800)
def test_the_ranks_of_launchers_train_in_one_world_through_a_kill_a_change_of_size_and_a_drain(
    submit: Submit, follow: Follow, cluster_dir: Path, folder: Path
) -> None:
    jobs = [submit(launches(name, folder)) for name in LINES]
    trained = [Trained(job, follow(job)) for job in jobs]
    with ThreadPoolExecutor(len(trained)) as threads:

        def each(act: Callable[[Trained], None]) -> None:
            list(threads.map(act, trained))

        each(lambda one: one.wait_step(0, 0.0))
        each(lambda one: one.kill(cluster_dir))
        planned_after = time.time()
        each(lambda one: one.scale(cluster_dir))
        each(lambda one: one.drain(cluster_dir))
        (folder / "end").touch()
        each(lambda one: one.assert_one_world(planned_after))

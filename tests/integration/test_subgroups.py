"""Groups below the default one, however they are made: a fault of one rank ends all waits in them at once."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from support.agent.worker_scripts import script
from support.common.processes import ended_for_gloo, stayed
from support.local.run import LocalRun, manifest

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

REDUCES = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
import elasticjob
from elasticjob.inprocess._threads.interruption import RankShouldRestart

kind = sys.argv[1]
calls = 0

def say(*words):
    os.write(1, (" ".join(map(str, [*words, "rank", dist.get_rank(), "pid", os.getpid(), "call", calls,
                                    "at", time.monotonic()])) + "\\n").encode())

def groups():
    if kind == "mesh":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        return [mesh.get_group("replicate"), mesh.get_group("shard")]
    if kind == "split_group":  # as a device mesh does after `init_process_group(device_id=...)`
        return [distributed_c10d.split_group(None, ranks) for ranks in ([[0, 1], [2, 3]], [[0, 2], [1, 3]])]
    own, _ = dist.new_subgroups(group_size=2)
    other, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    return [own, other]

@elasticjob.restartable
def train():
    global calls
    dist.init_process_group("cpu:gloo")
    number = torch.tensor([calls + 1])
    dist.all_reduce(number, dist.ReduceOp.MAX)  # a new process begins with the call that the others make
    calls = int(number)
    found, rank = groups(), dist.get_rank()
    numbers = torch.ones(1 << 10)
    try:
        for step in range(10 ** 9 if calls < 3 else 20):
            for group in found:
                dist.all_reduce(numbers, group=group)
                numbers /= 2
            if step == 10:
                say("runs")
            if step == 20 and calls == 1 and rank == 3:
                say("faulty")
                raise ValueError("bad batch")
    except (RankShouldRestart, RuntimeError):
        say("left")
        raise
    assert numbers.mean().item() == 1
    return rank

print("returned", train(), flush=True)
dist.destroy_process_group()
"""


def processes(run: LocalRun, call: int) -> dict[int, int]:
    """Return the process ids by rank of the round in which the ranks make this call."""
    matches = [run.wait_for(rf"runs rank (\d) pid (\d+) call {call} ") for _ in range(4)]
    return {int(match[1]): int(match[2]) for match in matches}


@pytest.mark.timeout(480)
@pytest.mark.parametrize(
    "kind",
    ["mesh", *(pytest.param(kind, marks=pytest.mark.deep) for kind in ("split_group", "new_subgroups"))],
)
def test_ranks_that_wait_in_a_subgroup_keep_their_processes(kind: str, tmp_path: Path) -> None:
    """One rank raises; then one is killed while another one is silent: only a break ends the others' wait for that."""
    spec: dict[str, Any] = {"preload": ["torch", "torch._dynamo"], "stopGraceSeconds": 60}
    job = manifest([*script(tmp_path, REDUCES), kind], replicas=4, **spec)
    with LocalRun(job, tmp_path) as run:
        first = processes(run, 1)
        second = processes(run, 2)
        faulty = float(re.findall(r"faulty rank 3 .* at (\S+)", run.text)[0])
        left = [float(at) for at in re.findall(r"left rank [012] .* call 1 at (\S+)", run.text)]
        print("seconds from the exception to the end of all waits:", max(left) - faulty, "of one:", min(left) - faulty)
        assert all(stayed(first[rank], second[rank], run.text) for rank in range(4)), "all processes stay"
        assert len(left) + len(ended_for_gloo(run.text)) >= 3

        os.kill(second[2], signal.SIGSTOP)
        killed = time.monotonic()
        os.kill(second[1], signal.SIGKILL)
        for _ in (0, 3):  # a process whose operation gloo has lost ends itself
            at = run.wait_for("left rank [03] .* call 2 at (.*)|gloo has lost an operation", 30)[1]
            print("seconds from SIGKILL to the end of a wait for a silent rank:", at and float(at) - killed)
        os.kill(second[2], signal.SIGCONT)
        third = processes(run, 3)
        assert [stayed(second[rank], third[rank], run.text) for rank in range(4)] == [True, False, True, True]
        assert run.exit_code(120) == 0, run.text

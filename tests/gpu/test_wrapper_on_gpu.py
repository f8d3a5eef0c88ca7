"""`elasticjob.inprocess.Wrapper` over nccl on a real GPU, under torchrun. Ranks share it, as hosts of their own."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

import elasticjob
from support.common.child_process import ChildProcess

TRAINS = """
import os
os.environ["NCCL_HOSTID"] = str(os.getpid())
import torch
import torch.distributed as dist
from elasticjob.inprocess import AbortTorchDistributed, CallWrapper, CudaHealthCheck, Wrapper

device = torch.device("cuda", 0)

@Wrapper(abort=AbortTorchDistributed(), health_check=CudaHealthCheck())
def train(call: CallWrapper):
    dist.init_process_group("nccl", device_id=device)
    ones = torch.ones(1 << 20, device=device)
    for step in range(20):
        if (dist.get_rank(), step, call.iteration) == (1, 10, 0):
            raise RuntimeError("a fault of rank 1")
        dist.all_reduce(ones)
        ones /= dist.get_world_size()
        torch.cuda.synchronize()
    dist.destroy_process_group()
    return f"rank {os.environ['RANK']} pid {os.getpid()} iteration {call.iteration} mean {ones.mean().item():g}"

print(train() + "\\n", end="", flush=True)
"""


@pytest.mark.timeout(240)
def test_a_rank_that_waits_in_a_collective_of_nccl_goes_on_in_its_process(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TRAINS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environ = {**os.environ, "PYTHONPATH": str(Path(elasticjob.__file__).parents[1])}
    with ChildProcess([*command, str(tmp_path / "script.py")], env=environ) as torchrun:
        assert torchrun.exit_code(200) == 0, torchrun.text
        found = re.findall(r"rank (\d) pid \d+ iteration 1 mean 1$", torchrun.text, re.MULTILINE)
        assert sorted(found) == ["0", "1"]

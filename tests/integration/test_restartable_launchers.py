"""A function with `@elasticjob.restartable` under the launchers that are no agent of a job on a cluster."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import elasticjob
from support.common.torchrun import Torchrun

pytestmark = pytest.mark.torch
pytest.importorskip("torch")
ROOT = str(Path(elasticjob.__file__).parents[1])

LAUNCHES = """
import os
import torch
import torch.distributed as dist
import elasticjob

calls = 0

@elasticjob.restartable
def train(base):
    global calls
    calls += 1
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    if calls == 1 and dist.get_rank() == 1:
        raise ValueError("bad batch")
    dist.barrier()
    dist.destroy_process_group()
    return base + int(total), calls

if __name__ == "__main__":
    result = elasticjob.launch(train, 5, nodes=2)
    print(result.state.value, sorted(result.return_values.items()))
"""


def test_launch_calls_the_function_again_in_the_same_processes(tmp_path: Path) -> None:
    """The values are those of the last call."""
    (tmp_path / "program.py").write_text(LAUNCHES)
    env = {**os.environ, "PYTHONPATH": ROOT}
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "SUCCEEDED [(0, (7, 2)), (1, (7, 2))]", done.stdout + done.stderr
    assert "rank 1 died: ValueError: bad batch" in done.stdout + done.stderr


TRAINS = """
import os, sys, time
import torch
import torch.distributed as dist
import elasticjob

calls = 0

@elasticjob.restartable
def train():
    global calls
    calls += 1
    dist.init_process_group("gloo")
    one = torch.ones(1)
    dist.all_reduce(one)
    line = f"trains {dist.get_rank()} {dist.get_world_size()} pid {os.getpid()} call {calls}"
    os.write(1, f"{line}\\n".encode())
    while one.item() > 0:
        one.fill_(0 if dist.get_rank() == 0 and os.path.exists(sys.argv[1]) else 1)
        dist.broadcast(one, 0)
        time.sleep(0.01)
    dist.destroy_process_group()

train()
"""


def trains(node: Torchrun) -> tuple[int, int]:
    """Wait until a worker of this node trains in a world of 2; return its process id and the number of the call."""
    found = node.wait_for(r"trains \d 2 pid (\d+) call (\d+)")
    return int(found[1]), int(found[2])


def test_under_torchrun_the_function_is_called_once_in_each_process(tmp_path: Path) -> None:
    """torchrun starts its workers itself and ends all of them after a failure: the handler cannot keep a process."""
    (tmp_path / "train.py").write_text(TRAINS)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    options = [
        "--rdzv-backend=elasticjob", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=job", "--local-addr=127.0.0.1",
        "--monitor-interval=0.1", "--nnodes=2", "--max-restarts=3", str(tmp_path / "train.py"), str(tmp_path / "done"),
    ]  # fmt: skip
    with Torchrun(*options) as host, Torchrun(*options) as other:
        first = [trains(node) for node in (host, other)]
        os.kill(first[1][0], signal.SIGKILL)
        second = [trains(node) for node in (host, other)]
        (tmp_path / "done").touch()
        assert [host.exit_code(), other.exit_code()] == [0, 0], host.text + other.text
    assert [call for _, call in (*first, *second)] == [1, 1, 1, 1]
    assert len({pid for pid, _ in (*first, *second)}) == 4
    assert not re.search("Traceback.*elasticjob", host.text + other.text)

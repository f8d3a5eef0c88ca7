"""What a commit of `elasticjob.ShardedState` in every step costs: `torchrun --nproc-per-node 4 sharded_commit.py`.

Each rank counts as a node of its own, so that all shards are copied to another process. Blocks of steps with and
without commits alternate. The model is that of examples/sharded.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "agent"), str(ROOT / "examples" / "sharded")]
CUDA = torch.cuda.is_available()
_COMMITS = 20
"""Commits without steps between them."""


def main() -> None:
    options = read_options()
    rank = int(os.environ["RANK"])
    os.environ["GROUP_RANK"] = str(rank)
    if CUDA:
        os.environ["NCCL_HOSTID"] = str(rank)  # ranks may share a GPU only if they claim to be on other hosts

    import elasticjob

    example: Any = importlib.import_module("train")
    device = torch.device("cuda", 0) if CUDA else torch.device("cpu")
    dist.init_process_group("nccl" if CUDA else "gloo")
    model = example.Transformer(options.width, options.layers).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    state = elasticjob.ShardedState(model=model, optimizer=optimizer)
    state.sync()
    tokens = torch.randint(example.WORDS, (options.batch, example.LENGTH + 1), device=device)
    wall: dict[bool, list[float]] = {False: [], True: []}
    cpu: dict[bool, list[float]] = {False: [], True: []}
    commits = []
    for number in range(2 * options.blocks + 2):
        with_commit = number % 2 == 1
        dist.barrier()
        begun = time.perf_counter(), time.process_time()
        for _ in range(options.steps):
            optimizer.zero_grad()
            scores = model(tokens[:, :-1])
            torch.nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            state.step += 1
            if CUDA:
                torch.cuda.synchronize()
            if with_commit:
                commit_begun = time.perf_counter()
                state.commit()
                commits.append(time.perf_counter() - commit_begun)
        if state._copier is not None:
            state._copier.wait()  # the last copy belongs to this block
        if number >= 2:  # the first two blocks warm up
            wall[with_commit].append((time.perf_counter() - begun[0]) / options.steps)
            cpu[with_commit].append((time.process_time() - begun[1]) / options.steps)
    dist.barrier()
    begun = time.perf_counter(), time.process_time()
    for _ in range(_COMMITS):
        state.step += 1
        state.commit()
    if state._copier is not None:
        state._copier.wait()
    alone = (time.perf_counter() - begun[0]) / _COMMITS, (time.process_time() - begun[1]) / _COMMITS
    parameters = sum(parameter.numel() for parameter in model.parameters())
    every = [torch.tensor([*alone, statistics.median(cpu[False])]) for _ in range(dist.get_world_size())]
    if not CUDA:
        dist.all_gather(every, every[rank])
    wall_alone, cpu_alone, cpu_step = torch.stack(every).mean(0).tolist()
    if rank == 0:
        size = state._layout.size if state._layout is not None else 0
        print(
            f"{parameters / 1e6:.1f} M parameters, {size / 2**20:.0f} MiB a shard, "
            f"{options.batch * example.LENGTH} tokens a rank and step; "
            f"commit() {statistics.median(commits) * 1e3:.1f} ms"
        )
        for name, seconds in (("wall clock", wall), ("processor", cpu)):
            plain, committed = (statistics.median(seconds[key]) for key in (False, True))
            cost = f"{100 * (committed / plain - 1):+.1f} %"
            print(f"{name}: a step {plain * 1e3:.1f} ms, with a commit {committed * 1e3:.1f} ms: {cost}")
        print(
            f"a commit and its copy alone: {wall_alone * 1e3:.1f} ms, processor {cpu_alone * 1e3:.1f} ms, "
            f"{100 * cpu_alone / cpu_step:.1f} % of that of a step (mean of the ranks)"
        )
    dist.destroy_process_group()


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=64, help="samples of a rank in a step")
    parser.add_argument("--steps", type=int, default=4, help="steps of a block")
    parser.add_argument("--blocks", type=int, default=6, help="blocks of each kind")
    return parser.parse_args()


if __name__ == "__main__":
    main()

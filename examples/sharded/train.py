"""FSDP2 training that continues from the memory of the other nodes when a node is lost: `elasticjob.ShardedState`."""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import elasticjob

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if CUDA else torch.device("cpu")
BATCH = 24
"""Samples of a step on all ranks together: a multiple of each world size."""
WORDS, LENGTH = 64, 12


def main() -> None:
    options = read_options()
    if CUDA:
        torch.cuda.set_device(DEVICE)
    function = elasticjob.restartable(train) if options.in_process else train
    function(options)


def train(options: argparse.Namespace) -> None:
    """Train in one round: all that belongs to its process groups is built here."""
    dist.init_process_group("nccl" if CUDA else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Transformer(options.width, options.layers).to(DEVICE)
    mesh = device_mesh(world, options.replicas)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=1000)

    state = elasticjob.ShardedState(model=model, optimizer=optimizer, scheduler=scheduler, step=0)
    restored = state.sync()  # False: no state in memory; load your own checkpoint here, if there is one
    print(f"rank={rank} world={world} begins after step={state.step} restored={restored} pid={os.getpid()}", flush=True)
    while state.step < options.steps:
        tokens = batch(state.step)[rank::world].to(DEVICE)
        optimizer.zero_grad()
        scores = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        scheduler.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        state.step += 1
        state.commit()  # the loss of a node costs at most one committed step
        print(f"step={state.step} loss={mean.item() / world:.6f} world={world} rank={rank}", flush=True)
        elasticjob.progress(state.step)
        time.sleep(options.step_delay)
    dist.destroy_process_group()


def device_mesh(world: int, replicas: int) -> DeviceMesh:
    """Return a mesh for FSDP, or for HSDP if the world can be divided by the number of replicas."""
    if replicas > 1 and world % replicas == 0 and world > replicas:
        return init_device_mesh(DEVICE.type, (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(DEVICE.type, (world,), mesh_dim_names=("shard",))


class Transformer(torch.nn.Module):
    """A language model."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, width)
        self.positions = torch.nn.Parameter(torch.zeros(LENGTH, width))
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.scores = torch.nn.Linear(width, WORDS)
        self.register_buffer("mask", torch.nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens) + self.positions
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.mask, is_causal=True)
        scores: torch.Tensor = self.scores(hidden)
        return scores


def batch(step: int) -> torch.Tensor:
    """Return the token ids of all ranks in a step. They depend on the step only."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(WORDS, (BATCH, 1), generator=generator)
    stride = torch.randint(1, 4, (BATCH, 1), generator=generator)
    return (first + stride * torch.arange(LENGTH + 1)) % WORDS


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--width", type=int, default=32, help="a multiple of 4")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=1, help="more than 1: HSDP with so many replicas")
    parser.add_argument("--in-process", action="store_true", help="processes survive the end of a round")
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to wait after each step")
    return parser.parse_args()


if __name__ == "__main__":
    main()

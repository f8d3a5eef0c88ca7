"""A pretraining loop with FSDP2: shards in the memory of the nodes, checkpoints for the loss of all of them.

The model is created on the meta device, sharded block by block, and then initialized or loaded. Each step has the same
sequences at any number of workers.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import elasticjob

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if CUDA else torch.device("cpu")
WORDS, LENGTH, WIDTH = 64, 16, 32


@elasticjob.restartable
def train(options: argparse.Namespace) -> None:
    """Train in one round. The mesh of a sharded model belongs to the round, so the model is built here."""
    if CUDA:
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl" if CUDA else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))

    dataset = Sequences(options.samples)
    sampler = elasticjob.ElasticSampler(dataset, seed=0)
    batches = elasticjob.microbatches(options.global_batch, sampler, max_size=options.max_size)
    loader = DataLoader(dataset, batch_sampler=batches, generator=torch.Generator())
    state = elasticjob.ShardedState(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, step=0)
    parts = {"scheduler": scheduler, "sampler": sampler}
    if not state.sync() and options.checkpoints:  # no node has a state: the job begins, or all nodes were lost
        state.step = load_newest_checkpoint(options.checkpoints, model, optimizer, parts)

    while sampler.epoch < options.epochs:
        for step in batches.steps(loader):  # the rest of the epoch
            optimizer.zero_grad()
            loss = torch.zeros((), device=DEVICE)
            for batch in step:
                tokens = batch.data.to(DEVICE)
                with batch.gradient_sync(model):  # only the last micro-batch averages gradients over the ranks
                    scores = model(tokens[:, :-1])
                    weighted = cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten()) * batch.weight
                    weighted.backward()
                loss += weighted.detach()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            state.step += 1
            if state.step % options.commit_every == 0:
                state.commit()
            dist.all_reduce(loss)
            if rank == 0:
                line = f"step={state.step} loss={loss.item() / world:.6f} world={world}"
                print(f"{line} pid={os.getpid()} time={time.time():.4f}", flush=True)
            if options.checkpoints and state.step % options.checkpoint_every == 0:
                save_checkpoint(options.checkpoints, state.step, model, optimizer, parts)
            elasticjob.progress(state.step)
            time.sleep(options.step_delay)
    dist.destroy_process_group()


class Block(torch.nn.Module):
    """A transformer block: attention to earlier tokens, and a network of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList([torch.nn.RMSNorm(WIDTH), torch.nn.RMSNorm(WIDTH)])
        self.queries_keys_values = torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.output = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.SiLU(), torch.nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = self.queries_keys_values(self.norms[0](hidden)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        hidden = hidden + self.output(attended.transpose(1, 2).flatten(-2))
        return hidden + self.layers(self.norms[1](hidden))


class Transformer(torch.nn.Module):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, WIDTH)
        self.positions = torch.nn.Embedding(LENGTH, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.scores = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            hidden = block(hidden)
        scores: torch.Tensor = self.scores(hidden)
        return scores


def build_model() -> Transformer:
    """Return the model, sharded over all ranks, with initial weights that are the same at any world size."""
    with torch.device("meta"):
        model = Transformer()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device=DEVICE)
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if "norms" in name:
            torch.nn.init.ones_(parameter)
        elif name.endswith("bias"):
            torch.nn.init.zeros_(parameter)
        else:
            torch.manual_seed(number)
            whole = torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5
            parameter.data.copy_(
                dist.tensor.distribute_tensor(whole.to(DEVICE), parameter.device_mesh, parameter.placements)
            )
    return model


class Sequences(torch.utils.data.Dataset):
    """Tokens that grow by the same number, modulo WORDS."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return (index + (1 + index % 7) * torch.arange(LENGTH + 1)) % WORDS


def save_checkpoint(folder: Path, step: int, model: Any, optimizer: Any, parts: dict[str, Any]) -> None:
    """Write a checkpoint that can be loaded at any world size. A checkpoint with a file `.metadata` is complete."""
    dcp.save(checkpoint_content(step, model, optimizer, parts), checkpoint_id=folder / f"step-{step}")


def load_newest_checkpoint(folder: Path, model: Any, optimizer: Any, parts: dict[str, Any]) -> int:
    """Load the newest complete checkpoint, if there is one. Return its step."""
    steps = [int(path.parent.name.removeprefix("step-")) for path in folder.glob("step-*/.metadata")]
    if not steps:
        return 0
    content = checkpoint_content(0, model, optimizer, parts)
    dcp.load(content, checkpoint_id=folder / f"step-{max(steps)}")
    set_state_dict(model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"])
    for name, part in parts.items():
        part.load_state_dict(content[name])
    return int(content["step"])


def checkpoint_content(step: int, model: Any, optimizer: Any, parts: dict[str, Any]) -> dict[str, Any]:
    shards, optimizer_shards = get_state_dict(model, optimizer)
    states = {name: part.state_dict() for name, part in parts.items()}
    return {"step": step, "model": shards, "optimizer": optimizer_shards, **states}


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--samples", type=int, default=500, help="samples of an epoch")
    parser.add_argument("--global-batch", type=int, default=24, help="samples of a step on all workers together")
    parser.add_argument("--max-size", type=int, default=8, help="samples of a forward pass on a worker, at most")
    parser.add_argument("--commit-every", type=int, default=1, help="steps between commits to memory")
    parser.add_argument("--checkpoints", type=Path, help="folder that all pods share")
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to wait after each step")
    return parser.parse_args()


if __name__ == "__main__":
    train(read_options())

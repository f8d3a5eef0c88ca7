"""The same training at any world size, with real torch processes: weights equal those of a single process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

SCRIPT = """
import multiprocessing, os, sys, torch, torch._dynamo, elasticjob  # imported once: the ranks are forked
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # before torch 2.6
    fully_shard = None

SAMPLES, BATCH = 29, 9  # four steps an epoch, the last one with two samples
ROUNDS = [(3, 2), (1, 1), (2, 3), (3, 100)]  # (world size, steps)

def mean_loss(model, data):
    return torch.nn.functional.mse_loss(model(data[0]), data[1])

def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)

def reference(dataset):
    '''Train in one process on whole global batches. Return the weights after each step.'''
    model, optimizer = make()
    sampler = elasticjob.ElasticSampler(dataset, seed=3, rank=0, world_size=1)
    weights = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for indices in torch.tensor(list(sampler)).split(BATCH):
            optimizer.zero_grad()
            mean_loss(model, dataset[indices]).backward()
            optimizer.step()
            weights.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone())
    return weights

def check_sharded(dataset):
    '''FSDP2 gathers parameters in each forward pass: all ranks must have the same number of micro-batches.'''
    (model, _), (sharded, _) = make(), make()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    batches = elasticjob.microbatches(SAMPLES, elasticjob.ElasticSampler(dataset), max_size=4)
    for step in batches.steps(DataLoader(dataset, batch_sampler=batches)):
        for batch in step:
            with batch.gradient_sync(sharded):
                (mean_loss(sharded, batch.data) * batch.weight).backward()
    mean_loss(model, dataset[:]).backward()
    for one, other in zip(model.parameters(), sharded.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad.full_tensor(), atol=1e-12)

def run(rank):
    values = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    dataset = TensorDataset(values, values.sin().sum(1, keepdim=True))
    expected = reference(dataset)
    model, optimizer = make()
    sampler = elasticjob.ElasticSampler(dataset, seed=3)
    state = elasticjob.State(model=model, optimizer=optimizer, sampler=sampler)

    def train(step, wrap):
        optimizer.zero_grad()
        used = torch.zeros(())
        for batch in step:
            used += batch.samples
            with batch.gradient_sync(wrap):
                (mean_loss(wrap, batch.data) * batch.weight).backward()
        optimizer.step()
        dist.all_reduce(used)
        assert used == step.samples
        state.step += 1
        found = torch.nn.utils.parameters_to_vector(model.parameters())
        assert torch.allclose(found, expected[state.step - 1], atol=1e-12), (state.step, dist.get_world_size())

    for number, (world_size, limit) in enumerate(ROUNDS):
        if rank >= world_size:
            continue
        dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}{number}", rank=rank, world_size=world_size)
        state.sync()
        batches = elasticjob.microbatches(BATCH, sampler, max_size=2)
        loader = DataLoader(dataset, batch_sampler=batches)
        wrap = DistributedDataParallel(model)
        end = state.step + limit
        while sampler.epoch < 2 and state.step < end:
            for step in batches.steps(loader):
                train(step, wrap)
                if state.step == end:
                    break
        state.commit()
        if world_size == 2 and fully_shard is not None:
            check_sharded(dataset)
        dist.destroy_process_group()
    assert (state.step, sampler.epoch, sampler.consumed) == (8, 2, 0)

ranks = [multiprocessing.get_context("fork").Process(target=run, args=(rank,), daemon=True) for rank in range(3)]
for rank in ranks:
    rank.start()
for rank in ranks:
    rank.join(200)
print([rank.exitcode for rank in ranks])
"""


def test_weights_equal_those_of_one_process_at_any_world_size(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LOCAL_RANK": "0"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "rendezvous")]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert process.stdout.strip() == "[0, 0, 0]", process.stderr


REPLICAS = """
import multiprocessing, sys, torch, elasticjob
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

def refusal(sampler):
    try:
        list(sampler)
    except ValueError as error:
        return str(error)

def run(rank):
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    group = mesh["dp"].get_group()
    expected = list(range(rank // 2, 8, 2))
    for source in (mesh["dp"], group, lambda: mesh["dp"], lambda: group):
        sampler = elasticjob.ElasticSampler(8, shuffle=False, data_parallel=source)
        assert list(sampler) == expected, (rank, list(sampler))
    batches = elasticjob.microbatches(4, sampler, max_size=1)
    loader = DataLoader(range(8), batch_sampler=batches, num_workers=1)
    steps = [[(batch.data.item(), batch.weight) for batch in step] for step in batches.steps(loader)]
    assert steps == [[(sample, 0.5) for sample in half] for half in (expected[:2], expected[2:])], steps
    stream = elasticjob.ElasticIterable(range(8), data_parallel=lambda: mesh["dp"])
    batches = elasticjob.microbatches(4, stream)
    loader = DataLoader(batches, batch_size=None, num_workers=1)
    assert [batch.data.tolist() for step in batches.steps(loader) for batch in step] == [expected[:2], expected[2:]]

    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    elasticjob.scale_learning_rate(optimizer, base_world_size=1, data_parallel=mesh["dp"])
    weight.grad = torch.ones(())
    optimizer.step()
    assert weight.item() == -2, "two replicas, four ranks"

    whole = elasticjob.ElasticSampler(8, data_parallel=lambda: mesh)
    assert "a mesh of 2 dimensions: pass one of them" in refusal(whole)
    first = dist.new_group([0])
    without = refusal(elasticjob.ElasticSampler(8, data_parallel=lambda: first))
    assert without is None if rank == 0 else "a process group without this process" in without, without
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}2", rank=rank, world_size=4)
    for source in (group, mesh["dp"]):
        old = elasticjob.ElasticSampler(8, data_parallel=source)
        assert "has ended with its round: pass a function" in refusal(old)
    dist.barrier()
    dist.destroy_process_group()

ranks = [multiprocessing.get_context("fork").Process(target=run, args=(rank,)) for rank in range(4)]
for rank in ranks:
    rank.start()
for rank in ranks:
    rank.join(200)
print([rank.exitcode for rank in ranks])
"""


def test_the_ranks_of_a_model_replica_get_the_same_samples(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LOCAL_RANK": "0"}
    command = [sys.executable, "-c", REPLICAS, str(tmp_path / "rendezvous")]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert process.stdout.strip() == "[0, 0, 0, 0]", process.stderr

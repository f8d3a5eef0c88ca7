"""Callbacks that are created once in a process decide alike on ranks that survive a fault and on those that are new."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.common.ports import free_port

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

ROUNDS = """
import multiprocessing, os, sys, torch, torch._dynamo  # imported once: the ranks are forked
import torch.distributed as dist

class Rounds:
    '''What ends a round: an error on all ranks in step 4; in the next round, one after the training is stopped.'''
    def __init__(self, number):
        self.number = number
    def in_step(self, done):
        if (self.number, done) == (0, 3):
            raise InterruptedError
    def stopped(self):
        if self.number == 1:
            raise InterruptedError

def run(name, ranks):
    '''Train in one round after the other, with the rank of each; None: without this process.'''
    objects = make()
    for number, rank in enumerate(ranks):
        if rank is None:
            continue
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_PORT=ports[number])
        try:
            result = fit(Rounds(number), *objects)
        except InterruptedError:
            result = "interrupted"
        os.write(1, f"{name} round {number} {result} {describe(*objects)}\\n".encode())  # in one piece
        if dist.is_initialized():
            dist.destroy_process_group()

ports = sys.argv[2].split(",")
os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", TORCHELASTIC_RUN_ID="test")
os.environ.update(GROUP_RANK="0", ROLE_RANK="0", ACCELERATE_USE_CPU="1")
torch.set_num_threads(1)
# The first rank of the first round is lost, and a new process takes its place.
names = {"lost": (0, None, None), "stays": (1, 1, 1), "new": (None, 0, 0)}
processes = [multiprocessing.get_context("fork").Process(target=run, args=item, daemon=True) for item in names.items()]
for process in processes:
    process.start()
for process in processes:
    process.join(200)
print([process.exitcode for process in processes])
"""

TRAINER = """
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments
from elasticjob.frameworks.accelerate_rounds import begin_accelerate_round
from elasticjob.frameworks.huggingface import ElasticTrainer, ElasticTrainerCallback
import sys, torch

class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
    def forward(self, x, labels):
        return {"loss": (self.weight - x).square().mean(), "logits": x}

class Counts(TrainerCallback):
    def __init__(self):
        self.steps = 0
    def on_step_end(self, args, state, control, **_):
        self.steps += 1

class Interrupt(TrainerCallback):
    def __init__(self, rounds):
        self.rounds = rounds
    def on_pre_optimizer_step(self, args, state, control, **_):
        self.rounds.in_step(state.global_step)
    def on_train_end(self, args, state, control, **_):
        self.rounds.stopped()

data = [{"x": torch.ones(1), "labels": torch.ones(1)} for _ in range(40)]

def make():
    return Network(), ElasticTrainerCallback(global_batch=4, commit_steps=10**6), EarlyStoppingCallback(4), Counts()

def fit(rounds, model, kept, stopping, counts):
    begin_accelerate_round()
    arguments = TrainingArguments(
        output_dir=sys.argv[1], num_train_epochs=10, per_device_train_batch_size=2, learning_rate=0.0, use_cpu=True,
        eval_strategy="steps", eval_steps=1, metric_for_best_model="loss", greater_is_better=False,
        save_strategy="no", report_to=[], disable_tqdm=True, log_level="error",
    )
    trainer = ElasticTrainer(
        model=model, args=arguments, train_dataset=data, eval_dataset=data[:4],
        callbacks=[kept, stopping, counts, Interrupt(rounds)],
    )
    trainer.train()
    return trainer.state.global_step

def describe(model, kept, stopping, counts):
    return stopping.early_stopping_patience_counter, counts.steps
"""

LIGHTNING = """
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from torch.utils.data import DataLoader, TensorDataset
from elasticjob.frameworks.lightning import ElasticLightningCallback

class Network(LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen = []
    def training_step(self, batch, batch_idx):
        self.seen += batch[0].flatten().int().tolist()
        return (self.weight - batch[0]).square().mean()
    def validation_step(self, batch, batch_idx):
        self.log("value", self.weight.square().mean(), sync_dist=True)
    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches == 100  # sets up the data before the state is restored
        return torch.optim.SGD(self.parameters(), lr=0.0)

class Counts(Callback):
    def __init__(self):
        self.steps = 0
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.steps += 1

class Interrupt(Callback):
    def __init__(self, rounds):
        self.rounds = rounds
    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.rounds.in_step(trainer.global_step)
    def on_train_end(self, trainer, module):
        os.write(1, f"rank {trainer.global_rank} saw {module.seen}\\n".encode())
        self.rounds.stopped()

data = TensorDataset(torch.arange(40.0)[:, None])

def make():
    kept = ElasticLightningCallback(data, global_batch=4, batch_size=2, shuffle=False, commit_steps=10**6)
    return Network(), kept, EarlyStopping("value", patience=4, check_on_train_epoch_end=False), Counts()

def fit(rounds, module, kept, stopping, counts):
    trainer = Trainer(
        **kept.trainer_arguments(), max_epochs=10, val_check_interval=1, accelerator="cpu", logger=False,
        callbacks=[kept, stopping, counts, Interrupt(rounds)], enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0,
    )
    trainer.fit(module, kept.loader(), DataLoader(data, batch_size=40))
    return trainer.global_step

def describe(module, kept, stopping, counts):
    return stopping.wait_count, counts.steps
"""


@pytest.mark.parametrize("framework", [TRAINER, LIGHTNING], ids=["trainer", "lightning"])
def test_all_ranks_stop_after_the_same_step_as_without_a_fault(framework: str, tmp_path: Path) -> None:
    """The metric never improves: four evaluations after the first one end the training, in step 5."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": "agent"}
    ports = ",".join(str(free_port()) for _ in range(3))
    process = subprocess.run(
        [sys.executable, "-c", framework + ROUNDS, str(tmp_path), ports], env=environment,
        capture_output=True, text=True, timeout=400, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert process.stdout.endswith("[0, 0, 0]\n"), process.stdout + process.stderr
    found = re.findall(r"(\w+) round (\d) (\w+) \((\d+), (\d+)\)", process.stdout)
    # Name, round, last step, evaluations without improvement, steps that the other callback has counted.
    assert sorted(found) == [
        ("lost", "0", "interrupted", "2", "3"),
        ("new", "1", "interrupted", "4", "2"),
        ("new", "2", "5", "4", "0"),
        ("stays", "0", "interrupted", "2", "3"),
        ("stays", "1", "interrupted", "4", "2"),
        ("stays", "2", "5", "4", "0"),
    ], process.stdout + process.stderr
    if framework is LIGHTNING:
        assert "rank 0 saw [12, 14, 16, 18]\n" in process.stdout, "the new process"
    assert "Counts: steps changed in an earlier round, and is as it was created again" in process.stderr

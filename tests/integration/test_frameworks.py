"""The examples for training frameworks: a lost worker and a change of the world size leave the training as it was."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from support.common.processes import agent_over
from support.local.run import LocalRun, manifest

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples"
ARGUMENTS = ["--epochs=5", "--samples=220", "--global-batch=24", "--max-size=8"]
STEPS = 50
"""Five epochs of ten steps. The last step of an epoch has four samples, in fewer micro-batches than the others."""
PRELOAD = {
    "elastic_data": ["torch", "torch._dynamo"],
    "trainer": ["torch", "torch._dynamo", "transformers.trainer", "transformers.models.llama.modeling_llama"],
    "accelerate": ["torch", "torch._dynamo", "accelerate"],
    "lightning": ["torch", "torch._dynamo", "lightning.pytorch"],
    "fsdp2": ["torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"],
}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": "agent"}
START = 240.0
"""Seconds for the imports of a framework on a busy machine."""


def command(example: str, *more: str) -> list[str]:
    """Return the command of an example. Whole models are not committed: lost ranks get the state of the others."""
    commits = "--commit-every=1" if example == "fsdp2" else "--commit-every=100000"
    return [sys.executable, str(EXAMPLES / example / "train.py"), *ARGUMENTS, commits, *more]


@cache
def undisturbed(example: str) -> dict[int, float]:
    """Return the loss of each step in a single process without an agent."""
    script = [sys.executable, "-m", "torch.distributed.run", "--standalone", *command(example)[1:]]
    return dict(losses(subprocess.check_output(script, text=True, env=ENVIRONMENT, cwd=EXAMPLES.parent)))


def losses(output: str) -> list[tuple[int, float]]:
    """Return (step, loss) of each line that the rank 0 of the time printed."""
    return [(int(step), float(loss)) for step, loss in re.findall(r"step=(\d+) .*?loss=([\d.]+) world=", output)]


TRAINER = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments
from elasticjob.frameworks.huggingface import ElasticTrainer, ElasticTrainerCallback

class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 26
    def __getitem__(self, index):
        tokens = (index + torch.arange(8)) % 16
        return {"input_ids": tokens, "labels": tokens}

def make():
    torch.manual_seed(0)
    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, attention_dropout=0.3, attn_implementation="eager", **size))
    model.model.embed_tokens.requires_grad_(False)
    return model, ElasticTrainerCallback(global_batch=8, commit_steps=10**6, frozen_parameters=False)

class Interrupt(TrainerCallback):
    def __init__(self, model, step, where):
        self.step, self.where, self.backward_passes = step, where, 0
    def on_step_end(self, args, state, control, **_):
        print("step", state.global_step, round(state.epoch, 3), flush=True)
        if (self.step, self.where) == (state.global_step, "after"):
            raise InterruptedError
    def on_substep_end(self, args, state, control, **_):
        if (self.step, self.where) == (state.global_step + 1, "inside"):
            raise InterruptedError

def fit(model, kept, interrupt):
    arguments = TrainingArguments(
        output_dir=sys.argv[1], num_train_epochs=3, per_device_train_batch_size=3, learning_rate=0.01, use_cpu=True,
        save_strategy="no", report_to=[], disable_tqdm=True, logging_steps=1, log_level="error",
    )
    trainer = ElasticTrainer(model=model, args=arguments, train_dataset=Tokens(), callbacks=[kept, interrupt])
    trainer.train()
    return [entry["step"] for entry in trainer.state.log_history if "loss" in entry]
"""

LIGHTNING = """
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset
from elasticjob.frameworks.lightning import ElasticLightningCallback

class Network(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
        self.validated = []
    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).square().mean()
    def validation_step(self, batch, batch_idx):
        self.validated.append(self.trainer.global_step)
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

values = TensorDataset(torch.randn(26, 3, generator=torch.Generator().manual_seed(1)))

def make():
    torch.manual_seed(0)
    module = Network()
    module.layers[0].requires_grad_(False)
    options = {"global_batch": 8, "batch_size": 3, "commit_steps": 10**6, "frozen_parameters": False}
    return module, ElasticLightningCallback(values, **options)

class Interrupt(Callback):
    def __init__(self, module, step, where):
        self.step, self.where = step, where
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        last = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        self.inside = (self.step, self.where) == (trainer.global_step + 1, "inside") and last
    def on_before_backward(self, trainer, module, loss):
        if self.inside:
            raise InterruptedError
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            done = batch_idx + 1 + trainer.current_epoch * trainer.num_training_batches
            print("step", trainer.global_step, round(done / trainer.num_training_batches, 3), flush=True)
            if (self.step, self.where) == (trainer.global_step, "after"):
                raise InterruptedError

def fit(module, kept, interrupt):
    trainer = Trainer(
        **kept.trainer_arguments(), max_epochs=3, callbacks=[kept, interrupt], accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )
    trainer.fit(module, kept.loader(), DataLoader(values, batch_size=26, generator=torch.Generator()))
    return module.validated
"""

ROUNDS = """
from contextlib import suppress

def train(interruptions):
    model, kept = make()
    for step, where in interruptions:
        with suppress(InterruptedError):
            fit(model, kept, Interrupt(model, step, where))
    print("reports", fit(model, kept, Interrupt(model, 0, "")))
    try:
        fit(make()[0], kept, Interrupt(model, 0, ""))
    except ValueError as error:
        print("refused:", error)
    return torch.nn.utils.parameters_to_vector(model.parameters())

whole = train([])
print("interrupted")
parts = train([(3, "after"), (6, "inside"), (8, "after"), (9, "inside"), (12, "after")])
print("equal", torch.equal(whole, parts))
"""


@pytest.mark.parametrize(
    ("framework", "whole_reports", "reports"),
    [
        # Logged steps: a step that has not been logged when it is interrupted is missing in the history.
        (TRAINER, [*range(1, 13)], [1, 2, 4, 6, 7, 9, 10, 11]),
        # Steps after which it was validated.
        (LIGHTNING, [4, 8, 12], [4]),
    ],
    ids=["trainer", "lightning"],
)
def test_a_new_trainer_continues_at_the_step_in_the_same_process(
    framework: str, whole_reports: list[int], reports: list[int], tmp_path: Path
) -> None:
    """Interruptions come inside of steps, between them, at the end of an epoch, and at the end of the training."""
    output = subprocess.check_output(
        [sys.executable, "-c", framework + ROUNDS, str(tmp_path)], text=True, env=ENVIRONMENT, cwd=EXAMPLES.parent
    )
    whole, parts = output.split("interrupted\n")
    steps = re.compile(r"^step (.*)", re.MULTILINE)
    assert steps.findall(whole) == [f"{step} {round(step / 4, 3)}" for step in range(1, 13)]
    assert steps.findall(parts) == steps.findall(whole)
    assert f"reports {whole_reports}\n" in whole
    assert f"reports {reports}\n" in parts
    assert re.search(
        "refused: this (trainer has another|is another) mod.*: create .* outside of the restartable", parts
    )
    assert parts.endswith("equal True\n"), "also the random numbers of dropout"


LIMITED = LIGHTNING.replace("max_epochs=3,", "max_epochs=3, limit_train_batches=6,").replace(
    "        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)",
    "        print('expects', self.trainer.estimated_stepping_batches)  # sets up the data early\n"
    "        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)",
)
LIMITED_ROUNDS = """
from contextlib import suppress

def train(interruptions):
    model, kept = make()
    for step, where in interruptions:
        with suppress(InterruptedError):
            fit(model, kept, Interrupt(model, step, where))
    fit(model, kept, Interrupt(model, 0, ""))
    return torch.nn.utils.parameters_to_vector(model.parameters())

whole = train([])
print("interrupted")
parts = train([(1, "after"), (2, "inside"), (2, "after"), (4, "inside"), (6, "after")])
print("equal", torch.equal(whole, parts))
"""


def test_a_limit_of_batches_gives_the_same_steps_after_interruptions() -> None:
    """Six micro-batches an epoch are two of its four steps."""
    output = subprocess.check_output(
        [sys.executable, "-c", LIMITED + LIMITED_ROUNDS], text=True, env=ENVIRONMENT, cwd=EXAMPLES.parent
    )
    whole, parts = output.split("interrupted\n")
    steps = re.compile(r"^step (\d+)", re.MULTILINE)
    assert steps.findall(whole) == [str(step) for step in range(1, 7)]
    assert steps.findall(parts) == steps.findall(whole)
    assert set(re.findall(r"expects (\d+)", output)) == {"6"}
    assert parts.endswith("equal True\n")


DEEP = "elastic_data", "lightning", "accelerate", "fsdp2"


@pytest.mark.parametrize(
    "example", [pytest.param(name, marks=[pytest.mark.deep] if name in DEEP else []) for name in PRELOAD]
)
def test_a_killed_worker_and_a_drained_node_leave_the_training_as_it_was(example: str, tmp_path: Path) -> None:
    """No checkpoint is written or read. The new process of a lost rank 0 gets its state from the other processes."""
    expected = undisturbed(example)
    assert list(expected) == list(range(1, STEPS + 1))

    job = manifest(
        command(example, "--step-delay=0.1"), replicas=3, preload=PRELOAD[example],
        elasticPolicy={"minReplicas": 2, "maxReplicas": 3}, failurePolicy={"maxRestarts": 5},
    )  # fmt: skip
    with LocalRun(job, tmp_path) as run:
        killed = int(run.wait_for(r"step=5 .*world=3 pid=(\d+)", START)[1])
        os.kill(killed, signal.SIGKILL)
        survivor = int(run.wait_for(r"step=1\d .*world=\d pid=(\d+)", START)[1])
        os.kill(agent_over(survivor), signal.SIGTERM)
        run.wait_for(r"step=\d+ .*world=2 ", START)
        assert run.exit_code(START) == 0, run.text
    found = losses(run.text)
    assert dict(found) == pytest.approx({step: expected[step] for step, _ in found}, abs=2e-4)
    steps = [step for step, _ in found]
    assert all(after >= before for before, after in pairwise(steps)), run.text
    assert steps[-1] == STEPS
    assert len(steps) - len(set(steps)) <= 1, "the step in progress when a worker is killed is done again"
    assert STEPS - len(set(steps)) <= 1, "the killed worker may have done a step without printing it"


@pytest.mark.deep
def test_the_loss_of_all_nodes_costs_the_steps_since_the_last_checkpoint(tmp_path: Path) -> None:
    """The checkpoint of two workers is loaded by three."""
    saves = (f"--checkpoints={tmp_path}", "--checkpoint-every=5", "--step-delay=0.1")

    def job(replicas: int) -> dict[str, object]:
        return manifest(command("fsdp2", *saves), replicas=replicas, preload=PRELOAD["fsdp2"])

    with LocalRun(job(2), tmp_path) as run:
        run.wait_for("step=12 .* world=2", START)
        run.signal(signal.SIGKILL)
    with LocalRun(job(3), tmp_path) as run:
        assert run.exit_code(START) == 0, run.text
    found = losses(run.text)
    first = found[0][0]
    assert first > 10, "the checkpoint of step 10 was complete"
    assert (first - 1) % 5 == 0
    expected = undisturbed("fsdp2")
    assert [step for step, _ in found] == list(range(first, STEPS + 1))
    assert dict(found) == pytest.approx({step: expected[step] for step, _ in found}, abs=2e-4)


@pytest.mark.parametrize("example", [pytest.param("trainer", marks=pytest.mark.deep), "lightning"])
def test_a_callback_saves_the_state_at_the_end_of_a_job_and_the_next_job_continues(
    example: str, tmp_path: Path
) -> None:
    """The second job has another number of workers, and trains as if there had been one job only."""
    path, expected = tmp_path / "state", undisturbed(example)
    with LocalRun(manifest(command(example, f"--path={path}", "--step-delay=0.1"), replicas=1), tmp_path) as run:
        run.wait_for("step=12 .* world=1", START)
        run.signal(signal.SIGTERM)
        run.exit_code(START)
    done = losses(run.text)
    with LocalRun(manifest(command(example, f"--path={path}"), replicas=2), tmp_path) as run:
        assert run.exit_code(START) == 0, run.text
    found = losses(run.text)
    assert done[-1][0] <= found[0][0] <= done[-1][0] + 2, "a step may have been done and not printed"
    assert [step for step, _ in found] == list(range(found[0][0], STEPS + 1))
    assert dict(found) == pytest.approx({step: expected[step] for step, _ in found}, abs=2e-4)

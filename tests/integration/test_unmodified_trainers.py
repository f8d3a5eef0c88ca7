"""Scripts that do nothing for elasticjob: planned ends lose no step, and the status shows the progress."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from support.local.run import LocalRun, manifest

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

START = 240.0
"""Seconds for the imports of a framework on a busy machine."""
TRAINER = """
import os, sys, time
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        tokens = (index + torch.arange(8)) % 16
        return {"input_ids": tokens, "labels": tokens}

class Show(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        print("did", state.global_step, "rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"],
              "agent", os.getppid(), flush=True)
        time.sleep(0.05)
        if os.path.exists(os.path.join(sys.argv[1], "done")):
            control.should_training_stop = True

torch.manual_seed(0)
size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
args = TrainingArguments(
    os.path.join(sys.argv[1], "out"), per_device_train_batch_size=2, max_steps=100000, use_cpu=True,
    disable_tqdm=True, logging_steps=10, report_to="none", **eval(sys.argv[2]),
)
model = LlamaForCausalLM(LlamaConfig(vocab_size=16, **size))
trainer = Trainer(model, args, train_dataset=Tokens(), callbacks=[Show()])
trainer.train()
print("trained to", trainer.state.global_step, flush=True)
"""


def trains(folder: Path, script: str, arguments: dict[str, Any], **spec: Any) -> dict[str, object]:
    (folder / "train.py").write_text(script)
    command = [sys.executable, str(folder / "train.py"), str(folder), repr(arguments)]
    return manifest(command, elasticPolicy={"minReplicas": 1, "maxReplicas": 2}, replicas=2, **spec)


def steps_of(text: str, rank: int) -> list[int]:
    return [int(step) for step in re.findall(rf"did (\d+) rank {rank} ", text)]


def drained(job: dict[str, object], folder: Path, checkpoint: str) -> tuple[str, list[int]]:
    """Drain the pod of rank 1 while the job trains, and end it once it has gone on from a checkpoint of this name.

    Return its output and the steps of rank 0, of which none is lost.
    """
    with LocalRun(job, folder) as run:
        agent = int(run.wait_for(r"did [1-9]\d* rank 1 of 2 agent (\d+)", START)[1])
        os.kill(agent, signal.SIGTERM)
        run.wait_for("done: Left", START)
        run.wait_for(rf"goes on from .*{checkpoint}", START)
        run.wait_for(r"did \d+ rank 0 ", START)
        (folder / "done").touch()
        assert run.exit_code() == 0, run.text
    steps = steps_of(run.text, 0)
    assert steps == list(range(1, len(steps) + 1)), run.text
    assert "succeeded; 0 restarts" in run.text
    return run.text, steps


@pytest.mark.parametrize(
    "preload",
    [pytest.param([], id="exec", marks=pytest.mark.deep), pytest.param(["torch", "transformers.trainer"], id="fork")],
)
def test_a_trainer_that_is_drained_loses_no_step(tmp_path: Path, preload: list[str]) -> None:
    job = trains(tmp_path, TRAINER, {"save_steps": 1000}, preload=preload)
    text, _ = drained(job, tmp_path, r"checkpoint-\d+")
    assert "trained to" in text


LIGHTNING = """
import os, sys
import torch
from {package} import {kind}

if "{kind}" == "Fabric":
    fabric = Fabric(accelerator="cpu", devices={devices}, num_nodes=4)
    fabric.launch()
    model = torch.nn.Linear(2, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters()))
    fabric.backward(model(torch.ones(4, 2)).sum())
    optimizer.step()
    print("trained as", fabric.global_rank, "of", fabric.world_size, flush=True)
else:
    trainer = Trainer(
        accelerator="cpu", devices={devices}, num_nodes=4, max_steps=1, logger=False, enable_progress_bar=False,
        enable_checkpointing=False,
    )
    from {package}.demos.boring_classes import BoringModel
    trainer.fit(BoringModel())
    print("trained as", trainer.global_rank, "of", trainer.world_size, flush=True)
"""


@pytest.mark.parametrize(
    ("package", "kind", "devices"),
    [
        pytest.param("lightning.pytorch", "Trainer", 1, marks=pytest.mark.deep),
        ("pytorch_lightning", "Trainer", '"auto"'),
        ("lightning.fabric", "Fabric", 1),
    ],
)
def test_lightning_trains_on_the_nodes_that_there_are(tmp_path: Path, package: str, kind: str, devices: object) -> None:
    script = LIGHTNING.format(package=package, kind=kind, devices=devices)
    with LocalRun(trains(tmp_path, script, {}), tmp_path) as run:
        assert run.exit_code(START) == 0, run.text
    assert all(f"trained as {rank} of 2" in run.text for rank in range(2)), run.text
    assert "trains: step 1 is the first one that was reported" in run.text


def test_another_number_of_devices_than_workers_fails_the_job_at_once(tmp_path: Path) -> None:
    script = LIGHTNING.format(package="lightning.fabric", kind="Fabric", devices=3)
    with LocalRun(trains(tmp_path, script, {}, failurePolicy={"maxRestarts": 3}), tmp_path) as run:
        assert run.exit_code(START) != 0, run.text
    assert "set spec.nprocPerNode: 3" in run.text, run.text
    assert "0 restarts" in run.text, run.text


@pytest.mark.deep
def test_a_trainer_stays_as_it_is_if_the_job_wants_that(tmp_path: Path) -> None:
    shows = "print([type(callback).__name__ for callback in trainer.callback_handler.callbacks])"
    script = TRAINER.replace("max_steps=100000", "max_steps=3") + shows
    for name, shown in (("Auto", True), ("None", False)):
        folder = tmp_path / name
        folder.mkdir()
        with LocalRun(trains(folder, script, {}, trainerIntegration=name), folder) as run:
            assert run.exit_code(START) == 0, run.text
        assert ("SavingStop" in run.text) is shown, run.text
        assert ("KubeflowCallback" in run.text) is shown, run.text


LIGHTNING_TRAINING = """
import os, sys, time
import torch
from {package} import LightningModule, Trainer

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch):
        return self.layer(batch).square().mean()

    def on_train_batch_end(self, *_):
        self.log("size", float(self.trainer.world_size))
        print("did", self.trainer.global_step, "rank", self.global_rank, "of", self.trainer.world_size,
              "agent", os.getppid(), flush=True)
        time.sleep(0.05)
        self.trainer.should_stop = self.trainer.strategy.reduce_boolean_decision(
            os.path.exists(os.path.join(sys.argv[1], "done"))
        )

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

loader = torch.utils.data.DataLoader(torch.arange(100.0)[:, None], 2)
trainer = Trainer(
    accelerator="cpu", devices="auto", max_epochs=100000, default_root_dir=sys.argv[1], enable_progress_bar=False,
)
trainer.fit(Module(), loader)
print("trained to", trainer.global_step, flush=True)
"""


@pytest.mark.parametrize(
    ("package", "preload"),
    [
        pytest.param("pytorch_lightning", [], id="exec", marks=pytest.mark.deep),
        pytest.param("lightning.pytorch", ["torch", "lightning.pytorch"], id="fork"),
    ],
)
def test_a_lightning_trainer_that_is_drained_loses_no_step(tmp_path: Path, package: str, preload: list[str]) -> None:
    job = trains(tmp_path, LIGHTNING_TRAINING.format(package=package), {}, preload=preload)
    text, steps = drained(job, tmp_path, r"step=\d+\.ckpt")
    assert f"trained to {steps[-1]}" in text

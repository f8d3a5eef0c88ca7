"""Trainers of Hugging Face that are the user's own, and losses of each kind, beside a plain loop of gradient steps.

`test_frameworks.py` has a model of transformers, whose loss is divided by the number of labels of a step.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]
pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
import torch
from transformers import Trainer, TrainingArguments
from elasticjob.frameworks.huggingface import ElasticTrainerCallback, ElasticTrainerMixin

SAMPLES, BATCH, EPOCHS, RATE = 26, 8, 2, 0.05

class Values(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(SAMPLES, 3, dtype=torch.float64, generator=generator)
        self.labels = self.inputs.sin().sum(1, keepdim=True)
    def __len__(self):
        return SAMPLES
    def __getitem__(self, index):
        return {"inputs": self.inputs[index], "labels": self.labels[index]}

class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 1, dtype=torch.float64)
    def forward(self, inputs, labels=None):  # without num_items_in_batch
        logits = self.layer(inputs)
        loss = {} if labels is None else {"loss": torch.nn.functional.mse_loss(logits, labels)}
        return {**loss, "logits": logits}

class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = (outputs["logits"] - inputs["labels"]).square().mean()
        return (loss, outputs) if return_outputs else loss

class Elastic(ElasticTrainerMixin, Trainer):
    pass

class ElasticOwnLoss(ElasticTrainerMixin, OwnLoss):
    pass

def over_labels(outputs, labels, num_items_in_batch=None):
    counts = labels != -100
    return ((outputs["logits"] - labels).square() * counts).sum() / num_items_in_batch

def train(kind, **more):
    model = Network()
    kept = ElasticTrainerCallback(global_batch=BATCH, shuffle=False)
    arguments = TrainingArguments(
        output_dir=sys.argv[1], num_train_epochs=EPOCHS, per_device_train_batch_size=2, learning_rate=RATE,
        lr_scheduler_type="constant", optim="sgd", max_grad_norm=0, use_cpu=True, save_strategy="no", report_to=[],
        disable_tqdm=True, log_level="error", logging_strategy="no", ddp_find_unused_parameters=False,
    )
    kind(model=model, args=arguments, train_dataset=Values(), callbacks=[kept], **more).train()
    return model

def plain_loop():
    values, model = Values(), Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(EPOCHS):
        for inputs, labels in zip(values.inputs.split(BATCH), values.labels.split(BATCH)):
            optimizer.zero_grad()
            model(inputs, labels)["loss"].backward()
            optimizer.step()
    return model

def vector(model):
    return torch.nn.utils.parameters_to_vector(model.parameters())

expected = vector(plain_loop())
found = {
    "model": train(Elastic), "own": train(ElasticOwnLoss), "labels": train(Elastic, compute_loss_func=over_labels)
}
for name, model in found.items():
    difference = (vector(model) - expected).abs().max().item()
    result = "differs" if difference > 1e-12 else "equal"
    print(f"{name} {result} {difference}\\n", end="", flush=True)  # in one piece: all ranks print
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.deep), 3])
def test_each_kind_of_loss_is_the_mean_over_the_steps_samples(workers: int, tmp_path: Path) -> None:
    """The last step of an epoch has two samples: fewer than ranks, and in fewer micro-batches than the others."""
    (tmp_path / "script.py").write_text(SCRIPT)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT / "agent")}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    done = subprocess.run(
        [*command, str(tmp_path / "script.py"), str(tmp_path)], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # The Trainer of another rank prints the end of its line apart: a result may follow on the same line.
    results = re.findall(r"(model|own|labels) (equal|differs)", done.stdout)
    assert sorted(results) == sorted([(kind, "equal") for kind in ("model", "own", "labels")] * workers), done.stdout


REFUSALS = """
import sys
import torch
from transformers import Trainer, TrainingArguments
from elasticjob.frameworks.huggingface import ElasticTrainer, ElasticTrainerCallback

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([])

class Values(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return {"inputs": torch.ones(3), "labels": torch.ones(1)}

def attempt(kind=ElasticTrainer, dataset=Values(), callbacks=None, train=False, callback={}, **arguments):
    settings = {"output_dir": sys.argv[1], "use_cpu": True, "report_to": [], "max_steps": 1, "disable_tqdm": True}
    try:
        if callbacks is None:
            callbacks = [ElasticTrainerCallback(**{"global_batch": 2, **callback})]
        trainer = kind(
            model=torch.nn.Linear(3, 1), args=TrainingArguments(**settings, **arguments), train_dataset=dataset,
            callbacks=callbacks,
        )
        if train:
            trainer.train()
        print("accepted")
    except ValueError as error:
        print("refused:", error, flush=True)

attempt()
attempt(callbacks=[])
attempt(Trainer, train=True)
attempt(dataset=Stream())
attempt(average_tokens_across_devices=False)
attempt(callback={"global_batch": 0})
"""


def test_what_does_not_fit_is_refused_by_a_message_that_says_what_to_use(tmp_path: Path) -> None:
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT / "agent")}
    done = subprocess.run(
        [sys.executable, "-c", REFUSALS, str(tmp_path)], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(("accepted", "refused"))]
    expected = [
        "accepted",
        "refused: this trainer needs an ElasticTrainerCallback: pass it in callbacks=[...]",
        "refused: ElasticTrainerCallback needs an ElasticTrainer, or a Trainer with ElasticTrainerMixin",
        "refused: ElasticTrainer: the training dataset has no length: pass a dataset with __len__",
        "refused: ElasticTrainer: it needs average_tokens_across_devices=True, since ranks have uneven shares",
    ]
    assert lines[:-1] == expected, done.stdout
    assert lines[-1].startswith("refused: global_batch is 0")

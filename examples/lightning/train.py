"""PyTorch Lightning with a constant global batch, which continues in the same process when a rank is lost."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import TensorDataset

import elasticjob
from elasticjob.frameworks.lightning import ElasticLightningCallback


def main() -> None:
    options = read_options()
    torch.manual_seed(0)
    module = Network()
    dataset = make_dataset(options.samples)
    sizes = {"global_batch": options.global_batch, "batch_size": options.max_size}
    kept = ElasticLightningCallback(dataset, **sizes, commit_steps=options.commit_every, path=options.path)

    @elasticjob.restartable
    def train() -> None:
        """Train in one round. It is called again in the next one; what is built above stays."""
        trainer = Trainer(
            **kept.trainer_arguments(),
            max_epochs=options.epochs,
            callbacks=[kept, PrintSteps(kept, options.step_delay)],
            accelerator="auto",
            logger=False,
            enable_checkpointing=False,  # the state is in memory, and in `path`
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, kept.loader())

    train()


class Network(LightningModule):
    """An ordinary module: its loss is the mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.layers(inputs), targets)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class PrintSteps(Callback):
    """Prints each step with the mean loss of its samples."""

    def __init__(self, kept: ElasticLightningCallback, delay: float) -> None:
        self._kept = kept
        self._delay = delay
        self._loss = torch.zeros(())

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._loss = torch.zeros((), device=module.device)
        self._weight = self._kept.weight

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._loss += outputs["loss"] * trainer.accumulate_grad_batches * self._weight  # Lightning has divided it
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        if dist.is_initialized():
            dist.all_reduce(self._loss)
        if trainer.is_global_zero:
            world = trainer.world_size
            line = f"step={trainer.global_step} epoch={trainer.current_epoch} loss={self._loss.item() / world:.6f}"
            print(f"{line} world={world} pid={os.getpid()} time={time.time():.4f}", flush=True)
        time.sleep(self._delay)


def make_dataset(samples: int) -> TensorDataset:
    """Return inputs of shape (samples, 16) and targets of shape (samples, 1), the same on every rank."""
    inputs = torch.randn(samples, 16, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--samples", type=int, default=500, help="samples of an epoch")
    parser.add_argument("--global-batch", type=int, default=24, help="samples of a step on all workers together")
    parser.add_argument("--max-size", type=int, default=8, help="samples of a forward pass on a worker, at most")
    parser.add_argument("--commit-every", type=int, default=20, help="steps between commits")
    parser.add_argument("--path", help="file to which the state is saved when the job ends, unless it succeeds")
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to wait after each step")
    return parser.parse_args()


if __name__ == "__main__":
    main()

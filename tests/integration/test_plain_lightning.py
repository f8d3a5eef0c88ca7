"""A Lightning script that does nothing for elasticjob: a planned end anywhere changes no step and no sample."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer import trainer as trainer_module
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

from elasticjob._runtime.agent.start_workers.in_workers import lightning_status, lightning_stop
from elasticjob.frameworks import own_callbacks, plain_lightning
from elasticjob.training import progress_channel

pytestmark = pytest.mark.torch

STEPS = 9


class Module(pl.LightningModule):  # type: ignore[misc]  # lightning is not checked here
    """Records the samples of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[tuple[int, list[int]]] = []
        self.validated: list[int] = []

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen.append((self.trainer.global_step, batch.flatten().int().tolist()))
        loss: torch.Tensor = self.layer(batch).square().mean()
        return loss

    def validation_step(self, batch: torch.Tensor) -> None:
        self.validated.append(self.trainer.global_step)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


class Hooks(pl.Callback):  # type: ignore[misc]
    """Counts what a Trainer calls."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.batches += 1


class Order(torch.utils.data.Sampler):  # type: ignore[misc]
    """A sampler that shuffles each epoch in another way, as DistributedSampler does."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(10, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def __len__(self) -> int:
        return 10


class Channel:
    """The agent, which ends the round after a step."""

    def __init__(self) -> None:
        self.last = 10**6
        self.reports: list[tuple[Any, ...]] = []

    def progress(self, step: int, *details: Any) -> None:
        self.reports.append((step, *details))
        if step >= self.last:
            for save in progress_channel.channel.callbacks:
                save()
            raise progress_channel.Stopped(0)

    def report_begin(self, step: int) -> None:
        self.reports.append(("begin", step))

    def report_end(self, step: int, *details: Any) -> None:
        self.reports.append(("end", step, *details))


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Channel:
    """Make this process a worker: Lightning is patched, and the script does not use elasticjob."""
    for kind, names in (
        (pl.Trainer, ("__init__", "fit", "save_checkpoint")),
        (_CheckpointConnector, ("resume_start",)),
    ):
        for name in names:
            monkeypatch.setattr(kind, name, getattr(kind, name))
    lightning_status.show_progress(trainer_module)
    lightning_stop.go_on(trainer_module)
    found = Channel()
    for name in ("progress", "report_begin", "report_end"):
        monkeypatch.setattr(progress_channel, name, getattr(found, name))
    monkeypatch.setattr(plain_lightning, "uses_elasticjob", lambda: False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("RANK", "0")
    new_process(monkeypatch)
    return found


def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_lightning, "begun_trainings", 0)
    monkeypatch.setattr(progress_channel.channel, "callbacks", [])
    monkeypatch.setattr(own_callbacks, "registered_saves", [])


def script(folder: Path, loader: str, options: dict[str, Any], path: str | None = None) -> tuple[Module, Any, bool]:
    """Run a script; return its module, its Trainer, and whether it has come to its end."""
    torch.manual_seed(0)
    data = torch.arange(10.0)[:, None]
    loaders: dict[str, Any] = {
        "plain": lambda: DataLoader(data, 2, sampler=Order()),
        "workers": lambda: DataLoader(data, 2, sampler=Order(), num_workers=1, persistent_workers=True),
        "stateful": lambda: StatefulDataLoader(data, 2),
        "two": lambda: {"a": DataLoader(data, 2), "b": DataLoader(data[:8], 2)},
    }
    module = Module()
    if loader == "two":
        step, changed = module.training_step, cast("Any", module)
        changed.training_step = lambda batch: step(batch["a"] + 100 * batch["b"])
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=STEPS, max_epochs=-1, default_root_dir=folder, logger=False,
        num_sanity_val_steps=0, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[Hooks(), ModelCheckpoint(every_n_train_steps=1000)], **options,
    )  # fmt: skip
    try:
        trainer.fit(module, loaders[loader](), DataLoader(data[:2]), ckpt_path=path)
    except SystemExit:
        return module, trainer, False
    return module, trainer, True


@pytest.mark.parametrize(
    ("loader", "options"),
    [
        ("plain", {"val_check_interval": 2}),
        ("plain", {"accumulate_grad_batches": 2}),
        ("workers", {}),
        ("stateful", {}),
        ("two", {}),
    ],
    ids=["validation in an epoch", "accumulation", "workers", "a loader with a state", "two loaders"],
)
def test_a_planned_end_changes_no_step_and_no_sample(
    loader: str, options: dict[str, Any], channel: Channel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, undisturbed, _ = script(tmp_path / "whole", loader, options)
    for last in (3, 5, STEPS - 1):
        folder = tmp_path / str(last)
        channel.last = last
        new_process(monkeypatch)
        first, stopped, over = script(folder, loader, options)
        assert not over
        channel.last = 10**6
        new_process(monkeypatch)
        second, trainer, over = script(folder, loader, options)
        assert over
        assert first.seen + second.seen == whole.seen
        assert first.validated + second.validated == whole.validated
        assert torch.equal(second.layer.weight, whole.layer.weight)
        assert trainer.current_epoch == undisturbed.current_epoch
        hooks = [next(c for c in t.callbacks if isinstance(c, Hooks)).batches for t in (stopped, trainer)]
        assert sum(hooks) == len(whole.seen)

"""Train a small network on handwritten digits, on one process or many.

    python train.py                                  # one process
    torchrun --nproc-per-node=4 train.py             # four
    python train.py --checkpoint /shared/digits      # resumes where the last run stopped

The global batch size does not depend on the number of processes: the world size changes the speed, not the results.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset, random_split

DIGITS = Path(__file__).with_name("digits.csv.gz")
TEST_SAMPLES = 297


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=96, help="samples per step, over all processes")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to wait after each step")
    parser.add_argument("--log-every", type=int, default=1, help="steps")
    parser.add_argument("--checkpoint", type=Path, help="directory that all processes share")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps")
    parser.add_argument("--data", type=Path, default=DIGITS, help="CSV file: 64 pixels from 0 to 16, and the digit")
    return parser.parse_args()


def load_digits(path: Path) -> tuple[Dataset[Any], Dataset[Any]]:
    """Training and test samples: float images of shape (64,) from 0 to 1, and labels."""
    table = torch.from_numpy(np.loadtxt(path, delimiter=",", dtype=np.float32))
    samples = TensorDataset(table[:, :64] / 16, table[:, 64].long())
    split = [len(samples) - TEST_SAMPLES, TEST_SAMPLES]
    train, test = random_split(samples, split, generator=torch.Generator().manual_seed(0))
    return train, test


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


class Trainer:
    """Model, optimizer and progress: `step`, `epoch`, and the number of samples `seen` in this epoch."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.distributed = "RANK" in os.environ
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(self.device)
        if self.distributed:
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
        self.rank = dist.get_rank() if self.distributed else 0
        self.world = dist.get_world_size() if self.distributed else 1
        self.train, self.test = load_digits(options.data)
        self.module = network().to(self.device)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=options.lr)
        self.step = self.epoch = self.seen = 0
        self.restore()
        self.model = DistributedDataParallel(self.module) if self.distributed else self.module
        self.total = torch.zeros((), device=self.device)

    @property
    def file(self) -> Path | None:
        folder: Path | None = self.options.checkpoint
        return folder / "digits.pt" if folder else None

    def restore(self) -> None:
        """Load the checkpoint that rank 0 finds, on all ranks."""
        found: list[Any] = [None]
        if self.rank == 0 and self.file and self.file.exists():
            found[0] = torch.load(self.file, map_location="cpu", weights_only=True)
        if self.distributed:
            dist.broadcast_object_list(found)
        if found[0] is None:
            return
        self.module.load_state_dict(found[0]["model"])
        self.optimizer.load_state_dict(found[0]["optimizer"])
        self.step, self.epoch, self.seen = found[0]["progress"]
        self.log(f"resumed from step={self.step}")

    def save(self) -> None:
        """Replace the checkpoint atomically, on rank 0."""
        if self.rank != 0 or not self.file:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        partial = self.file.with_suffix(f".{os.getpid()}.partial")
        progress = (self.step, self.epoch, self.seen)
        torch.save(
            {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict(), "progress": progress}, partial
        )
        partial.replace(self.file)

    def batches(self) -> DataLoader[Any]:
        """Return the rest of this epoch. The order depends only on the epoch, not on the number of processes."""
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(self.epoch))
        rest = Subset(self.train, order[self.seen :].tolist())
        sampler: DistributedSampler[Any] = DistributedSampler(rest, self.world, self.rank, shuffle=False)
        return DataLoader(rest, batch_size=max(1, self.options.batch // self.world), sampler=sampler)

    def run(self) -> None:
        while self.epoch < self.options.epochs:
            for images, labels in self.batches():
                self.one_step(images.to(self.device), labels.to(self.device))
            self.epoch, self.seen = self.epoch + 1, 0
        self.save()
        if self.rank == 0:
            self.log(f"accuracy={self.accuracy():.4f}")

    def one_step(self, images: Tensor, labels: Tensor) -> None:
        loss = nn.functional.cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        self.seen += len(labels) * self.world
        if self.step % self.options.log_every == 0:
            self.log(f"step={self.step} epoch={self.epoch} loss={self.mean(loss.detach()):.4f}")
        if self.step % self.options.checkpoint_every == 0:
            self.save()
        if self.options.step_delay:
            time.sleep(self.options.step_delay)

    def mean(self, value: Tensor) -> float:
        """Return the mean over all processes."""
        # The tensor is reused: if Python releases a tensor that gloo still holds, gloo's thread needs the GIL to free
        # it. torch 2.6 can then deadlock when the model is released: it waits for that thread and holds the GIL.
        self.total.copy_(value)
        if self.distributed:
            dist.all_reduce(self.total)
        return float(self.total.item()) / self.world

    def accuracy(self) -> float:
        """Return the share of test images that are classified correctly."""
        with torch.no_grad():
            images, labels = next(iter(DataLoader(self.test, batch_size=TEST_SAMPLES)))
            hits = self.module(images.to(self.device)).argmax(1).cpu() == labels
        return float(hits.float().mean().item())

    def log(self, text: str) -> None:
        print(f"{text} rank={self.rank} world={self.world} time={time.time():.3f}", flush=True)


def main() -> None:
    trainer = Trainer(parse())
    trainer.run()
    if trainer.distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

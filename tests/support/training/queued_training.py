"""The training of `faulty_training --queued-device`: weights that are known exactly, on a device behind the host.

Only what the device has done is compared: the weights at the begin of each round, and at the end. The loop never reads
a tensor, so the host runs ahead of the device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import elasticjob
from support.training.faulty_training import FORM_TIMEOUT, RankWithFaults
from support.training.queued_device import QueuedSGD, device, install

ITEMS = 12
"""Numbers that are added in a step, on all ranks together."""
COMMIT_EVERY, STOP_EVERY = 7, 25
"""Steps. Both wait for the device."""


class QueuedTraining(RankWithFaults):
    """What outlives a call of the function."""

    def __init__(self, folder: Path, delay: float) -> None:
        super().__init__(folder, delay)
        install(folder)
        self.weights = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
        module = torch.nn.Module()
        module.weights = self.weights
        self.optimizer = QueuedSGD(module.parameters())
        self.state = elasticjob.State(module=module, optimizer=self.optimizer, step=0)

    def train(self, steps: int) -> None:
        """Train in one round."""
        self.point("called")
        dist.init_process_group("gloo", timeout=FORM_TIMEOUT)
        self.pairs = dist.new_group(range(dist.get_world_size()))
        gradients = dist.new_group(backend="queued")
        self.point("formed")
        self.state.sync()
        self.record("begin", "-", self._checked_weight())
        self.point("synced")
        while self.state.step < steps and (self.state.step % STOP_EVERY or not self.stop_requested()):
            self._step(gradients)
            self.record("step", (0.0).hex(), weight_after(self.state.step))
            self.point("step")
            if self.state.step % COMMIT_EVERY == 0:
                self.state.commit(non_blocking=self.state.step % (2 * COMMIT_EVERY) == 0)
            elasticjob.progress(self.state.step)
        self._checked_weight()
        dist.destroy_process_group()

    def _step(self, gradients: Any) -> None:
        self.optimizer.zero_grad()
        self.point("forward")
        self.weights.grad = gradient = torch.empty_like(self.weights)
        part = part_of_step(self.state.step, dist.get_rank(), dist.get_world_size())
        device.launch(lambda: gradient.fill_(part))
        self.point("backward")
        dist.all_reduce(gradient, group=gradients)
        self.optimizer.step()
        self.point("optimizer")
        self.state.step += 1

    def _checked_weight(self) -> float:
        """Return the weight; AssertionError: the weights are not those of the step."""
        device.synchronize()
        weights, expected = self.weights.tolist(), weight_after(self.state.step)
        assert weights == [expected] * len(weights), f"step {self.state.step}: {weights} and not {expected}"
        return expected


def part_of_step(step: int, rank: int, world: int) -> float:
    """Return what a rank adds in a step. The sum over all ranks is the same, however many they are."""
    return float(sum((7 * step + 5 * item) % 11 for item in range(ITEMS)[rank::world]))


def weight_after(steps: int) -> float:
    """Return each weight after so many steps."""
    return -sum((part_of_step(step, 0, 1) for step in range(steps)), 0.0)

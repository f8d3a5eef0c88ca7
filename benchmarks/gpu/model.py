"""The model of the rows: transformer layers of width 512, trained with bf16 autocast and AdamW."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu.device import DEVICE


class Model:
    """Network and optimizer on the device, and inputs for a step."""

    def __init__(self, *, small: bool, batch: int = 8) -> None:
        """`small`: for a rehearsal on CPUs. `batch`: sequences of a rank in a step."""
        torch.manual_seed(0)
        layers, width, length = (1, 16, 4) if small else (8, 512, 128)
        layer = torch.nn.TransformerEncoderLayer(width, width // 8, 4 * width, dropout=0.0, batch_first=True)
        self.network = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=1e-4)
        self._sample = torch.randn(1, length, width, device=DEVICE)
        self.batch = batch

    def step(self, network: Any) -> None:
        """Queue one step: both passes of `network`, which is this one or wraps it, and the optimizer's."""
        self.optimizer.zero_grad()
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = network(self._sample.expand(self.batch, -1, -1)).float().square().mean()
        loss.backward()
        self.optimizer.step()

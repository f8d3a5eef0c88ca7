"""What a first step needs from CUDA: it loads each kernel when that is first used."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional
from torch.optim.adamw import adamw

KERNELS_LIMIT = 2.0
"""Seconds after which no more kernels are loaded: others may wait for this process by then."""
_WIDTH, _HEADS, _ROWS = 256, 4, 32


def load_kernels(device: str, clock: Callable[[], float] = time.monotonic) -> None:
    """Run what the first step of most models runs, because CUDA loads each kernel when it is first used.

    One H100 took 0.8 s for the first step of a transformer in a new process. No module and no optimizer is called,
    whose hooks the script would notice.
    """
    end = clock() + KERNELS_LIMIT
    for autocast in (True, False):
        for _ in _steps(device, autocast=autocast):
            if clock() > end:
                return


def _steps(device: str, *, autocast: bool) -> Iterator[None]:
    """Run both passes of a block of a transformer; with autocast also AdamW in its two forms. Yield after each."""

    def tensor(*shape: int) -> Any:
        return torch.full(shape, 0.01, dtype=torch.float32, device=device).requires_grad_()

    weights, projection = tensor(3 * _WIDTH, _WIDTH), tensor(_WIDTH, _WIDTH)
    bias, scale = tensor(3 * _WIDTH), tensor(_WIDTH)
    inputs = torch.ones(2, _ROWS, _WIDTH, dtype=torch.float32, device=device)
    labels = torch.zeros(2 * _ROWS, dtype=torch.int64, device=device)
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        rows = functional.linear(functional.layer_norm(inputs, (_WIDTH,), scale), weights, bias)
        query, key, value = (part.unflatten(-1, (_HEADS, -1)).transpose(1, 2) for part in rows.chunk(3, -1))
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        scores = functional.gelu(functional.linear(attended, projection))
        loss = functional.cross_entropy(scores.flatten(0, 1).float(), labels)
    yield
    parameters = [weights, projection, bias, scale]
    gradients = list(torch.autograd.grad(loss, parameters))
    yield
    for form, counted_on in (({"foreach": True}, "cpu"), ({"fused": True}, device)) if autocast else ():
        moments = [[torch.zeros_like(each) for each in parameters] for _ in range(2)]
        counts = [torch.zeros((), dtype=torch.float32, device=counted_on) for _ in parameters]
        with torch.no_grad():
            adamw(
                parameters, gradients, moments[0], moments[1], [], counts, **form,
                amsgrad=False, beta1=0.9, beta2=0.99, lr=1e-3, weight_decay=0.1, eps=1e-8, maximize=False,
            )  # fmt: skip
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        yield

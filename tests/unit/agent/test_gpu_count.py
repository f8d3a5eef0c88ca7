"""Imports that ask torch for the number of GPUs do not use one: a fork asks. torch is a fake here."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable

import pytest

from elasticjob._runtime.agent.start_workers.fork_server.gpu_count import count_gpus_in_forks


class FakeCuda(types.ModuleType):
    """`torch.cuda` with three GPUs; it notes each process that asks the driver."""

    device_count: Callable[[], int]

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        self.asked: list[int] = []
        self.device_count = self._ask_driver

    def _ask_driver(self) -> int:
        self.asked.append(1)
        return 3


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setitem(sys.modules, "torch.cuda", fake)
    return fake


def test_a_fork_asks_the_driver(cuda: FakeCuda) -> None:
    with count_gpus_in_forks():
        assert cuda.device_count() == 3
        assert cuda.asked == []


def test_a_module_that_keeps_the_function_asks_the_driver_itself_later(cuda: FakeCuda) -> None:
    own = cuda.device_count
    with count_gpus_in_forks():
        kept = cuda.device_count
    assert cuda.device_count == own
    assert kept() == 3
    assert cuda.asked == [1]


def test_torch_may_be_imported_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.cuda", raising=False)
    with count_gpus_in_forks() as gpus:
        gpus.replace_torchs()
        fake = FakeCuda()
        monkeypatch.setitem(sys.modules, "torch.cuda", fake)
        gpus.replace_torchs()
        gpus.replace_torchs()
        assert fake.device_count() == 3
        assert fake.asked == []
    assert fake.device_count() == 3
    assert fake.asked == [1]


def test_no_gpu_is_counted_where_torch_cannot_count(cuda: FakeCuda) -> None:
    cuda.device_count = lambda: 1 // 0
    with count_gpus_in_forks():
        assert cuda.device_count() == 0

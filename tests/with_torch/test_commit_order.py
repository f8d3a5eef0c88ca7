"""A block is complete only after the devices have copied its tensors."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import elasticjob
from elasticjob._runtime.contract.snapshot_format import state_block
from elasticjob.training import pinned_memory
from elasticjob.training.replicated.state import internals
from elasticjob.training.snapshot_values import state_tree

pytestmark = pytest.mark.torch


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The copies of which a device was waited for, and the headers that were written, in order."""
    found: list[str] = []
    finish_write = state_block.finish_write

    def wait(devices: set[Any]) -> None:
        found.append(f"wait for {', '.join(map(str, devices)) or 'nothing'}")

    def finish(descriptor: int, header: state_block.BlockHeader) -> None:
        found.append("header")
        finish_write(descriptor, header)

    monkeypatch.setattr(state_tree, "wait_for_copies", wait)
    monkeypatch.setattr(state_block, "finish_write", finish)
    return found


def commit(state: Any) -> None:
    state.commit()


def commit_beside_steps(state: Any) -> None:
    state.commit(non_blocking=True)
    internals(state).background.wait()


def end_process(state: Any) -> None:
    state.step += 1
    internals(state).copy_live()


@pytest.mark.parametrize("action", [commit, commit_beside_steps, end_process])
def test_the_header_comes_after_the_wait(action: Callable[[Any], None], order: list[str]) -> None:
    network = torch.nn.Linear(1 << 10, 1 << 9)
    state = elasticjob.State(network=network, optimizer=torch.optim.SGD(network.parameters(), momentum=0.9), step=0)
    state.sync()
    action(state)
    assert order[-2:] == ["wait for cpu", "header"]
    assert order.count("header") == 1


class OnGpu:
    """Tensors of a GPU, whose copy fails."""

    device = torch.device("cuda", 1)
    dtype = torch.float32
    shape = torch.Size([4])

    def numel(self) -> int:
        return 4

    def detach(self) -> Any:
        raise RuntimeError("an error of the device")

    def is_conj(self) -> bool:
        return False

    def is_neg(self) -> bool:
        return False


def test_a_copy_that_fails_is_waited_for(order: list[str]) -> None:
    """An interruption may come while copies are queued, and the memory is written again soon."""
    with pytest.raises(RuntimeError, match="an error of the device"):
        state_tree.write_tensors([(0, OnGpu())], bytearray(64), 0)  # type: ignore[arg-type]
    assert order == ["wait for cuda:1"]


def test_the_stream_of_this_thread_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []

    def current_stream(device: Any) -> Any:
        return SimpleNamespace(synchronize=lambda: waited.append(str(device)))

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    pinned_memory.wait_for_copies([torch.device("cpu"), torch.device("cuda", 1)])
    assert waited == ["cuda:1"]


@pytest.mark.parametrize(
    ("tensor", "queued"),
    [
        (SimpleNamespace(device=torch.device("cuda"), is_conj=lambda: False, is_neg=lambda: False), True),
        (SimpleNamespace(device=torch.device("cuda"), is_conj=lambda: True, is_neg=lambda: False), False),
        (SimpleNamespace(device=torch.device("cuda"), is_conj=lambda: False, is_neg=lambda: True), False),
        (torch.zeros(1), False),
    ],
)
def test_copies_that_are_queued(tensor: Any, queued: bool) -> None:
    assert state_tree.can_be_queued(tensor) == queued

"""Queued work of an accelerator is done before a worker reports that it has stopped."""

from __future__ import annotations

import atexit
import os
import socket
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from elasticjob._runtime.contract.shared_memory.progress_page import NO_LIMIT, PAGE_SIZE, PageWord, open_page
from elasticjob.training import devices, progress_channel
from elasticjob.training.agent_connection import AgentConnection


@dataclass(frozen=True)
class Device:
    """A torch.device."""

    index: int
    type: str = "cuda"


class Queue:
    """A module such as torch.cuda."""

    def __init__(self, *, initialized: bool = True) -> None:
        self.initialized = initialized
        self.done = 0

    def is_initialized(self) -> bool:
        return self.initialized

    def synchronize(self) -> None:
        self.done += 1


def torch_with(queue: Queue, *, accelerator: str | None = "npu") -> Any:
    current = SimpleNamespace(type=accelerator) if accelerator else None
    return SimpleNamespace(npu=queue, cuda=queue, accelerator=SimpleNamespace(current_accelerator=lambda: current))


@pytest.mark.parametrize("accelerator", ["npu", None])
@pytest.mark.parametrize("initialized", [True, False])
def test_only_a_device_in_use_is_synchronized(
    initialized: bool, accelerator: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(initialized=initialized)
    monkeypatch.setitem(sys.modules, "torch", torch_with(queue, accelerator=accelerator))
    devices.synchronize_device()
    assert queue.done == int(initialized)


def test_every_gpu_of_the_process_is_synchronized_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that never calls `set_device` works on a GPU that is not the current one."""
    synchronized: list[int] = []
    cuda = SimpleNamespace(is_initialized=lambda: True, device_count=lambda: 8, synchronize=synchronized.append)
    has_context = SimpleNamespace(_cuda_hasPrimaryContext=lambda device: device == 3)
    current = SimpleNamespace(current_accelerator=lambda: SimpleNamespace(type="cuda"))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, _C=has_context, accelerator=current))
    devices.synchronize_device()
    assert synchronized == [3]


def test_threads_that_copy_use_one_stream_for_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    set_streams: list[str] = []
    cuda = SimpleNamespace(Stream=lambda device: f"stream of {device.index}", set_stream=set_streams.append)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    streams: dict[Any, str] = {}
    monkeypatch.setattr(devices, "streams_by_device", streams)
    for _ in range(2):
        devices.own_streams([Device(3), Device(5), Device(0, "cpu")])()
    assert set_streams == 2 * ["stream of 3", "stream of 5"]
    assert len(streams) == 2


def test_torch_without_accelerators_as_before_2_6(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=queue))
    devices.synchronize_device()
    assert queue.done == 1


def test_torch_2_6_raises_where_there_is_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    def current_accelerator() -> None:
        raise RuntimeError("Cannot access accelerator device when none is available.")

    queue = Queue(initialized=False)
    torch = SimpleNamespace(cuda=queue, accelerator=SimpleNamespace(current_accelerator=current_accelerator))
    monkeypatch.setitem(sys.modules, "torch", torch)
    devices.synchronize_device()
    assert queue.done == 0


def test_a_script_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    devices.synchronize_device()
    assert "torch" not in sys.modules


def test_a_worker_synchronizes_its_device_at_the_last_step_before_it_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    page = os.memfd_create("page")
    os.ftruncate(page, PAGE_SIZE)
    words, queue, done = open_page(page), Queue(), []
    words[PageWord.LIMIT] = NO_LIMIT
    monkeypatch.setitem(sys.modules, "torch", torch_with(queue))
    agent, process = socket.socketpair()
    channel = progress_channel.ProgressChannel()
    channel.connection = AgentConnection(words, process)
    channel.callbacks.append(lambda: done.append(queue.done))
    monkeypatch.setattr(progress_channel, "channel", channel)
    monkeypatch.setattr(atexit, "register", lambda _function: None)
    progress_channel.progress(4)
    assert queue.done == 0, "no step waits for the device but the last"
    words[PageWord.LIMIT] = 5
    with pytest.raises(progress_channel.Stopped):
        progress_channel.progress(5)
    assert done == [1]
    agent.close()
    process.close()

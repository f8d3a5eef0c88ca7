"""What a process does ahead of its first round, and that its script does not notice."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.distributed import distributed_c10d  # noqa: E402
from torch.nn.modules.module import (  # noqa: E402
    register_module_forward_pre_hook,
    register_module_full_backward_pre_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: E402

from elasticjob.inprocess._groups.process_groups import ProcessGroups  # noqa: E402
from elasticjob.inprocess._restartable import warm_up as warm_up_module  # noqa: E402
from elasticjob.inprocess._restartable.warm_up import warm_up  # noqa: E402


@pytest.fixture(autouse=True)
def leaves_group() -> Iterator[None]:
    yield
    ProcessGroups().leave()


@pytest.fixture
def steps() -> Iterator[list[str]]:
    """What modules and optimizers have done."""
    seen: list[str] = []
    handles = [
        register_module_forward_pre_hook(lambda module, _: seen.append(type(module).__name__)),
        register_module_full_backward_pre_hook(lambda module, *_: seen.append(f"backward of {type(module).__name__}")),
        register_optimizer_step_post_hook(lambda *_: seen.append("a step")),
    ]
    yield seen
    for handle in handles:
        handle.remove()


PASSES = ["DistributedDataParallel", "Linear", "backward of Linear", "backward of DistributedDataParallel"]


def test_it_forms_a_group_and_reduces_gradients(steps: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """An optimizer's step would be a step of the training to hooks of the script, and to the agent."""
    warm_up()
    assert dist.get_world_size() == 1
    assert sorted(steps) == sorted(PASSES)
    assert capsys.readouterr().err == ""


def test_random_numbers_are_those_of_a_process_that_was_not_warmed_up() -> None:
    torch.manual_seed(3)
    random.seed(3)
    expected = torch.rand(4).tolist(), random.random()
    torch.manual_seed(3)
    random.seed(3)
    warm_up()
    assert (torch.rand(4).tolist(), random.random()) == expected


def test_the_defaults_of_a_script_do_not_matter(steps: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.no_grad():
            warm_up()
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert sorted(steps) == sorted(PASSES)
    assert capsys.readouterr().err == ""


def test_a_failure_is_reported_and_the_next_group_is_the_first_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks meet under the number of their group: one that has counted another group would wait for ever."""

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no address")

    monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", fails)
    warm_up()
    assert "the first round of this process will take longer: no address" in capsys.readouterr().err
    monkeypatch.undo()
    ProcessGroups().leave()
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    assert dist.group.WORLD is not None
    assert dist.group.WORLD.group_name == "0"


@pytest.mark.parametrize(
    ("current", "reserved", "used"),
    [(0, [0, 0], 0), (0, [512, 0], 0), (0, [0, 512], 1), (1, [512, 512], 1), (3, [0, 0, 512, 0], 2)],
)
def test_it_uses_the_gpu_on_which_the_script_has_memory(current: int, reserved: list[int], used: int) -> None:
    """A script may name its device in each call and leave the current one at 0, which is that of another rank."""
    assert warm_up_module.gpu_to_use(current, reserved) == torch.device("cuda", used)


def test_a_gpu_that_does_not_answer_keeps_no_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The CPU stands for it. The process forms its groups, and what comes of the GPU later does not touch them."""
    answer, ended, reduce_gradients = threading.Event(), threading.Event(), warm_up_module.reduce_gradients
    main = threading.main_thread()

    def reduce_late(network: Any, device: Any, group: Any) -> None:
        if threading.current_thread() is main:
            return reduce_gradients(network, device, group)
        try:
            answer.wait()
            reduce_gradients(network, device, group)
        finally:
            ended.set()
        return None

    monkeypatch.setattr(warm_up_module, "gpu_of_process", lambda: torch.device("cpu"))
    monkeypatch.setattr(warm_up_module, "reduce_gradients", reduce_late)
    monkeypatch.setattr(warm_up_module, "GPU_TIMEOUT", 0.05)
    assert not warm_up()
    assert "cpu has not done a small step with gloo within 0.05 s; this process goes on" in capsys.readouterr().err
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    assert group.group_name == "0"
    torch.manual_seed(3)
    before = torch.get_rng_state()
    answer.set()
    assert ended.wait(60)
    assert dist.group.WORLD is group
    assert torch.equal(torch.get_rng_state(), before)
    dist.barrier()


def test_a_gpu_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    reduce_gradients = warm_up_module.reduce_gradients

    def fails_on_gpu(network: Any, device: Any, group: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("CUDA error: out of memory")
        reduce_gradients(network, device, group)

    monkeypatch.setattr(warm_up_module, "gpu_of_process", lambda: torch.device("cpu"))
    monkeypatch.setattr(warm_up_module, "reduce_gradients", fails_on_gpu)
    assert warm_up()
    assert "will take longer: CUDA error: out of memory" in capsys.readouterr().err

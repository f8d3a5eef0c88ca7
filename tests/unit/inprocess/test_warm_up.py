"""What a process does ahead of its first round, and that its script does not notice."""

from __future__ import annotations

import random
from collections.abc import Iterator

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

from elasticjob.inprocess.process_groups import ProcessGroups  # noqa: E402
from elasticjob.inprocess.warm_up import warm_up  # noqa: E402


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

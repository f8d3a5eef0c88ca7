"""What is run ahead of the first step on a GPU."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from torch.nn.modules.module import register_module_forward_pre_hook  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: E402

from elasticjob.inprocess._restartable.kernels import KERNELS_LIMIT, load_kernels  # noqa: E402


def test_kernels_are_loaded_without_a_module_or_an_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    """The defaults of the script do not matter, and its random numbers are not used."""
    steps: list[str] = []
    handles = [
        register_module_forward_pre_hook(lambda module, _: steps.append(type(module).__name__)),
        register_optimizer_step_post_hook(lambda *_: steps.append("a step")),
    ]
    torch.manual_seed(3)
    expected = torch.rand(4).tolist()
    torch.manual_seed(3)
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        load_kernels("cpu")
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
        for handle in handles:
            handle.remove()
    assert steps == []
    assert torch.rand(4).tolist() == expected
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("function", ["addmm", "_fused_adamw_", "_foreach_lerp_", "_foreach_norm"])
def test_what_the_first_step_of_a_model_runs(function: str) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        load_kernels("cpu")
    assert any(function in event.key for event in profile.key_averages()), [e.key for e in profile.key_averages()]


def test_loading_kernels_ends_after_its_limit() -> None:
    """Others may wait for this process."""
    times = iter([0.0, 0.5, KERNELS_LIMIT + 0.1])
    load_kernels("cpu", lambda: next(times))
    assert next(times, None) is None

"""The learning rate follows the world size within `optimizer.step()` only."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
import torch

from elasticjob.data.learning_rate import scale_learning_rate

pytestmark = pytest.mark.torch


def run(world_sizes: list[int], rule: str, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return how far SGD with a gradient of 1 moves in each step. A scheduler halves lr after each step."""
    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    scale_learning_rate(optimizer, base_world_size=2, rule=rule)  # type: ignore[arg-type]
    moved = []
    for number, world_size in enumerate(world_sizes):
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        before = weight.item()
        weight.grad = torch.ones(())
        optimizer.step()
        moved.append(before - weight.item())
        assert optimizer.param_groups[0]["lr"] == 0.5**number
        scheduler.step()
    return moved


def test_each_step_uses_the_world_size_of_its_round(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run([2, 4, 1, 2], "linear", monkeypatch) == pytest.approx([1.0, 1.0, 0.125, 0.125])
    assert run([2, 8, 2], "sqrt", monkeypatch) == pytest.approx([1.0, 1.0, 0.25])


def test_a_step_that_fails_does_not_leave_a_scaled_rate_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scale_learning_rate(optimizer, base_world_size=2)

    def closure() -> float:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        optimizer.step(closure)
    weight.grad = torch.ones(())
    optimizer.step()
    assert (weight.item(), optimizer.param_groups[0]["lr"]) == (-2.0, 1.0)


@pytest.mark.parametrize(("rule", "base"), [("cubic", 1), ("linear", 0)])
def test_unknown_rules_and_sizes_are_refused(rule: str, base: int) -> None:
    with pytest.raises(ValueError, match=f"rule is '{rule}' and base_world_size is {base}"):
        scale_learning_rate(None, base_world_size=base, rule=rule)  # type: ignore[arg-type]

"""Trainers of Lightning that the callback cannot follow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.torch
strategies = pytest.importorskip("lightning.pytorch.strategies")

from elasticjob.frameworks.lightning import _check_trainer  # noqa: E402
from elasticjob.frameworks.step_batches import StepBatches  # noqa: E402

BATCHES = SimpleNamespace(micro_batches=2)


def check(strategy: str = "DDPStrategy", *, automatic: bool = True, accumulated: int = 2) -> None:
    """Check a trainer with a strategy that is not set up."""
    trainer = SimpleNamespace(
        strategy=object.__new__(getattr(strategies, strategy)), accumulate_grad_batches=accumulated
    )
    module: Any = SimpleNamespace(automatic_optimization=automatic)
    batches: StepBatches = BATCHES  # type: ignore[assignment]
    _check_trainer(trainer, module, batches)


def test_ddp_with_the_callbacks_arguments_is_followed() -> None:
    check()


@pytest.mark.parametrize("strategy", ["FSDPStrategy", "DeepSpeedStrategy", "SingleDeviceStrategy"])
def test_other_strategies_are_refused(strategy: str) -> None:
    """That of DeepSpeed is derived from that of DDP."""
    with pytest.raises(ValueError, match=r"create the Trainer with \*\*callback.trainer_arguments\(\) in each round"):
        check(strategy)


def test_another_accumulation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"trainer_arguments\(\)"):
        check(accumulated=3)


def test_manual_optimization_is_refused() -> None:
    with pytest.raises(ValueError, match="automatic_optimization = False: use a training loop of your own with State"):
        check(automatic=False)

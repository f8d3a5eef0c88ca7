"""Trainers of Lightning that the callback cannot follow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.torch
strategies = pytest.importorskip("lightning.pytorch.strategies")
callbacks = pytest.importorskip("lightning.pytorch.callbacks")

from elasticjob.data.sampler import ElasticSampler  # noqa: E402
from elasticjob.frameworks.lightning_callbacks import check_callbacks  # noqa: E402
from elasticjob.frameworks.lightning_options import check_trainer, step_limit  # noqa: E402
from elasticjob.frameworks.step_batches import StepBatches  # noqa: E402

BATCHES = SimpleNamespace(micro_batches=2)


def check(strategy: str = "DDPStrategy", *, automatic: bool = True, accumulated: int = 2, overfit: float = 0.0) -> None:
    """Check a trainer with a strategy that is not set up."""
    trainer = SimpleNamespace(
        strategy=object.__new__(getattr(strategies, strategy)),
        accumulate_grad_batches=accumulated,
        overfit_batches=overfit,
    )
    module: Any = SimpleNamespace(automatic_optimization=automatic)
    batches: StepBatches = BATCHES  # type: ignore[assignment]
    check_trainer(trainer, module, batches)


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


def test_another_order_of_the_samples_is_refused() -> None:
    with pytest.raises(ValueError, match=r"overfit_batches=.* write limit_train_batches"):
        check(overfit=0.5)


@pytest.mark.parametrize(("limit", "steps"), [(1.0, 0), (0.5, 2), (0.99, 3), (1, 1), (2, 1), (3, 2), (100, 50), (0, 0)])
def test_a_limit_of_batches_is_one_of_whole_steps(limit: float, steps: int) -> None:
    """An epoch has four steps of two micro-batches."""
    assert step_limit(limit, make_batches())[0] == steps


def test_a_limit_that_leaves_no_step_is_refused() -> None:
    with pytest.raises(ValueError, match=r"limit_train_batches=0.2 leaves no step: an epoch has 4"):
        step_limit(0.2, make_batches())


def make_batches() -> StepBatches:
    return StepBatches(ElasticSampler(26, rank=0, world_size=1), 8, max_size=4)


@pytest.mark.parametrize(
    ("callback", "advice"),
    [
        (callbacks.GradientAccumulationScheduler({0: 1, 4: 2}), "steps have global_batch samples"),
        (callbacks.BatchSizeFinder(), "set batch_size of the ElasticLightningCallback"),
        (callbacks.LearningRateFinder(), "run it before, in a Trainer of its own"),
        (callbacks.StochasticWeightAveraging(0.1), "AveragedModel as an attribute of the module"),
        (callbacks.WeightAveraging(), "WeightAveraging keeps its state in checkpoints"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_callbacks_that_change_steps_or_cannot_be_kept_are_refused(callback: Any, advice: str) -> None:
    check_callbacks([callbacks.EarlyStopping("loss"), callbacks.ModelCheckpoint()])
    with pytest.raises(ValueError, match=advice):
        check_callbacks([callback])

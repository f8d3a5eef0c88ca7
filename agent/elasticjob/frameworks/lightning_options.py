"""Settings of a Lightning Trainer that decide which data and which steps there are: followed, or refused by name.

Imports lightning.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from elasticjob.frameworks.step_batches import StepBatches

_ALL = 1.0


def check_trainer(trainer: Any, pl_module: Any, batches: StepBatches) -> None:
    """ValueError for settings that the callback cannot follow."""
    if not pl_module.automatic_optimization:
        raise ValueError("the module has automatic_optimization = False: use a training loop of your own with State")
    # The strategy of DeepSpeed is derived from it, and shards what it trains.
    ddp = isinstance(trainer.strategy, DDPStrategy) and "DeepSpeed" not in type(trainer.strategy).__name__
    if not ddp or trainer.accumulate_grad_batches != batches.micro_batches:
        raise ValueError("create the Trainer with **callback.trainer_arguments() in each round")
    if trainer.overfit_batches:
        raise ValueError(
            "Trainer(overfit_batches=...) replaces the order of the samples: write limit_train_batches, and pass "
            "shuffle=False to ElasticLightningCallback"
        )


def check_loader(trainer: Any, batches: StepBatches) -> None:
    """ValueError if the trainer reads other batches than those of the callback."""
    loaders = trainer.fit_loop._combined_loader.flattened
    if any(getattr(loader, "batch_sampler", None) is not batches for loader in loaders):
        raise ValueError("the training data is not that of ElasticLightningCallback: pass callback.loader() to fit")


def step_limit(limit: float, batches: StepBatches) -> tuple[int, str]:
    """Return how many steps of an epoch `limit_train_batches` leaves, and what the user has written; 0: all.

    A fraction is one of the steps. A number counts the micro-batches of a rank, as Lightning does: it is converted in
    the round in which the training begins, to as many whole steps as have them, and later rounds do as many.
    """
    if limit in (0, None) or (limit == _ALL and isinstance(limit, float)):
        return 0, ""
    option = f"limit_train_batches={limit}"
    if isinstance(limit, float):
        steps = int(batches.all_steps * limit)
        if not steps:
            raise ValueError(f"{option} leaves no step: an epoch has {batches.all_steps}")
        return steps, option
    return -(-limit // batches.micro_batches), option

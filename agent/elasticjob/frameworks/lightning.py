"""elasticjob in PyTorch Lightning: state in memory, and the same data and global batch at any world size.

Imports lightning.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy

from elasticjob.data.sampler import ElasticSampler
from elasticjob.frameworks.callback_attributes import CallbackAttributes
from elasticjob.frameworks.lightning_callbacks import ADVICE, CallbackStates, check_callbacks, exports_state
from elasticjob.frameworks.lightning_options import check_loader, check_trainer, step_limit
from elasticjob.frameworks.step_batches import StepBatches
from elasticjob.training import progress_channel
from elasticjob.training.replicated.state import State


class ElasticLightningCallback(Callback):  # type: ignore[misc]  # lightning is not checked here
    """Keeps the training of a LightningModule in memory across rounds, and reports its steps.

    Create it once in a process. In each round, pass it to a new Trainer, with `**callback.trainer_arguments()`. It
    holds the module, its optimizer and schedulers, random states, the `state_dict` of other callbacks, and the position
    in the data, from which it derives the counters of Lightning's loops. At a planned end all ranks stop after the same
    step, with its validation.

    Example:
        >>> callback = ElasticLightningCallback(torch.ones(8, 2), global_batch=4, batch_size=2)
        >>> options = callback.trainer_arguments()  # Trainer(**options, callbacks=[callback])
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch: int,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        commit_steps: int = 50,
        path: str | None = None,
        save_minutes: float | None = None,
        frozen_parameters: bool = True,
    ) -> None:
        """Begin with the first sample of epoch 0.

        Args:
            dataset: A map-style dataset.
            global_batch: Samples of a step on all ranks together.
            batch_size: Samples of a micro-batch on one rank, at most.
            seed: With the epoch, it decides the order of the samples.
            shuffle: Shuffle the samples in each epoch.
            commit_steps: Commit the state after every so many steps.
            path: As for `elasticjob.State`.
            save_minutes: As for `elasticjob.State`.
            frozen_parameters: As for `elasticjob.State`.
        """
        self._dataset = dataset
        self._batches = StepBatches(ElasticSampler(dataset, seed=seed, shuffle=shuffle), global_batch, batch_size)
        self._commit_steps = commit_steps
        self._options: dict[str, Any] = {
            "path": path,
            "save_minutes": save_minutes,
            "frozen_parameters": frozen_parameters,
        }
        self._module: Any = None
        self._optimizers: list[Any] = []
        self._schedulers: list[Any] = []
        self._callbacks = CallbackStates()
        self._attributes = CallbackAttributes()
        self._state: State | None = None
        self._micro_batch = 0
        self._changed = False
        """Whether a validation or the end of an epoch came after the last step was counted."""
        self._limited: weakref.ref[Any] | None = None
        """The trainer whose `limit_train_batches` has been read."""

    @property
    def weight(self) -> float:
        """Weight of the micro-batch in `training_step`. The callback applies it to the gradient.

        The sum of loss * weight over the micro-batches of a step and all ranks, divided by the world size, is the mean
        loss over the samples of the step.
        """
        return self._batches.weights()[self._micro_batch]

    def trainer_arguments(self) -> dict[str, Any]:
        """Return what the Trainer of this round needs: devices and nodes, DDP, gradient accumulation, no own sampler.

        They replace these arguments of yours.
        """
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return {
            "devices": local,
            "num_nodes": int(os.environ.get("WORLD_SIZE", "1")) // local,
            "strategy": DDPStrategy(init_sync=False),  # `restore` brings all ranks to the newest state instead
            "accumulate_grad_batches": self._batches.micro_batches,
            "use_distributed_sampler": False,
        }

    def loader(self, **options: Any) -> Any:
        """Return the data loader for `fit`, with these options of `DataLoader`."""
        return self._batches.loader(self._dataset, **options)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Follow `limit_train_batches`, before the module asks how many steps there are."""
        if stage != "fit":
            return
        others = [callback for callback in trainer.callbacks if callback is not self]
        check_callbacks(others)
        self._attributes.begin_round([each for each in others if not exports_state(each)], ADVICE)
        if trainer.limit_train_batches:
            self._limit_steps(trainer)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Bring all ranks to the newest state of any of them."""
        check_trainer(trainer, pl_module, self._batches)
        self._callbacks.begin_round(trainer.callbacks)
        if self._state is None:
            self._create_state(trainer, pl_module)
        elif pl_module is not self._module:
            raise ValueError("this is another module: create it outside of the restartable function")
        else:
            trainer.strategy.optimizers = self._optimizers
            trainer.strategy.lr_scheduler_configs = self._schedulers
        assert self._state is not None  # noqa: S101  # for mypy
        self._state.sync()
        trainer.should_stop = self._callbacks.stopped
        self._changed = False
        # It may have been set up by trainer.estimated_stepping_batches, at the position of before.
        trainer.fit_loop._combined_loader = None
        for optimizer in self._optimizers:
            _move_state(optimizer)
        if self._state.step:
            loops = trainer.fit_loop
            loops.load_state_dict(_counters(loops.state_dict(), self._state.step, self._batches))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Report the last step, whose validation is done, before the first micro-batch of the next one."""
        self._micro_batch = batch_idx % self._batches.micro_batches
        if self._micro_batch == 0:
            self._count_changes(trainer)
            progress_channel.progress(trainer.global_step)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Weight the gradient of this micro-batch. Lightning has divided the loss by the number of micro-batches."""
        factor = self.weight * trainer.accumulate_grad_batches
        if factor != 1.0:
            loss.register_hook(lambda gradient: gradient * factor)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count the step after its last micro-batch."""
        if self._state is None or (batch_idx + 1) % self._batches.micro_batches:
            return
        self._batches.advance()
        self._count(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Note that callbacks and schedulers may have changed since the step was counted."""
        self._changed = self._changed or not trainer.sanity_checking

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Note the same."""
        self._changed = True

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """ValueError for other data than that of `loader`."""
        check_loader(trainer, self._batches)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Report the last step of the training."""
        self._count_changes(trainer)
        progress_channel.progress(trainer.global_step)

    def _limit_steps(self, trainer: Any) -> None:
        if self._limited is None or self._limited() is not trainer:
            self._limited = weakref.ref(trainer)
            self._batches.limit_steps(*step_limit(trainer.limit_train_batches, self._batches))
        trainer.limit_train_batches = 1.0  # of the loader, whose epochs have these steps only

    def _count_changes(self, trainer: Any) -> None:
        """Count the last step again, with what a validation and the end of its epoch have changed."""
        if self._changed and self._state is not None:
            self._count(trainer)

    def _count(self, trainer: Any) -> None:
        """Let the state as it is now be that of the step."""
        assert self._state is not None  # noqa: S101  # for mypy
        self._changed = False
        self._callbacks.stopped = bool(trainer.should_stop)
        self._state.step = trainer.global_step
        if self._state.step % self._commit_steps == 0:
            self._state.commit()

    def _create_state(self, trainer: Any, pl_module: Any) -> None:
        self._module = pl_module
        self._optimizers, self._schedulers = trainer.strategy.optimizers, trainer.strategy.lr_scheduler_configs
        for optimizer in self._optimizers:
            optimizer.step = _with_closure_first(optimizer.step)
        self._state = State(
            module=pl_module,
            batches=self._batches,
            callbacks=self._callbacks,
            **{f"optimizer{index}": optimizer for index, optimizer in enumerate(self._optimizers)},
            **{f"scheduler{index}": config.scheduler for index, config in enumerate(self._schedulers)},
            **self._options,
        )


def _with_closure_first(step: Callable[..., Any]) -> Callable[..., Any]:
    """Let the forward and backward pass, which Lightning does in the closure, end before the optimizer's step begins.

    A State counts everything in `step` as a change of the model.
    """

    @functools.wraps(step)
    def run(closure: Callable[[], Any] | None = None) -> Any:
        loss = closure() if closure is not None else None
        step()
        return loss

    return run


def _move_state(optimizer: Any) -> None:
    """Move the optimizer's state to the devices of its parameters: at the end of a round Lightning moves both."""
    if any(parameter.device.type != "cpu" for group in optimizer.param_groups for parameter in group["params"]):
        optimizer.load_state_dict(optimizer.state_dict())


def _counters(loops: dict[str, Any], step: int, batches: StepBatches) -> dict[str, Any]:
    """Return the state of Lightning's loops as after `step` steps, in the form of its checkpoints."""
    epochs, in_epoch = batches.epoch, batches.steps_in_epoch
    begun = epochs + (1 if in_epoch else 0)
    epoch = {"ready": begun, "started": begun, "processed": epochs, "completed": epochs}
    loops["epoch_progress"] = {"total": dict(epoch), "current": dict(epoch)}
    batch = {
        "total": _all_stages(step * batches.micro_batches),
        "current": _all_stages(in_epoch * batches.micro_batches),
    }
    loops["epoch_loop.batch_progress"] = {**batch, "is_last_batch": False}
    optimizer = loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    for counter in (optimizer["step"], optimizer["zero_grad"]):
        for part, count in (("total", step), ("current", in_epoch)):
            counter[part].update(dict.fromkeys(counter[part], count))
    loops["epoch_loop.state_dict"]["_batches_that_stepped"] = step
    return loops


def _all_stages(count: int) -> dict[str, int]:
    return dict.fromkeys(("ready", "started", "processed", "completed"), count)

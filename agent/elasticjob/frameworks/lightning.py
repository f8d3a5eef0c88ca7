"""elasticjob in PyTorch Lightning: state in memory, and the same data and global batch at any world size.

Imports lightning.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy

from elasticjob.data.sampler import ElasticSampler
from elasticjob.frameworks.step_batches import StepBatches
from elasticjob.training import progress_channel
from elasticjob.training.replicated.state import State


class ElasticLightningCallback(Callback):  # type: ignore[misc]  # lightning is not checked here
    """Keeps the training of a LightningModule in memory across rounds, and reports its steps.

    Create it once in a process. In each round, pass it to a new Trainer, with `**callback.trainer_arguments()`. It
    holds the module, its optimizer and schedulers, random states, and the position in the data, from which it derives
    the counters of Lightning's loops. At a planned end all ranks stop after the same step, with its validation.
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
        """`dataset`: map-style. `global_batch`: samples of a step on all ranks together.

        `batch_size`: samples of a micro-batch on one rank, at most. `seed`, `shuffle`: order of the samples.
        `commit_steps`: commit the state after every so many steps. `path`, `save_minutes`, `frozen_parameters`: as for
        `elasticjob.State`.
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
        self._state: State | None = None
        self._micro_batch = 0

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

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Bring all ranks to the newest state of any of them."""
        _check_trainer(trainer, pl_module, self._batches)
        if self._state is None:
            self._create_state(trainer, pl_module)
        elif pl_module is not self._module:
            raise ValueError("this is another module: create it outside of the restartable function")
        else:
            trainer.strategy.optimizers = self._optimizers
            trainer.strategy.lr_scheduler_configs = self._schedulers
        assert self._state is not None  # noqa: S101  # for mypy
        self._state.sync()
        for optimizer in self._optimizers:
            _move_state(optimizer)
        if self._state.step:
            loops = trainer.fit_loop
            loops.load_state_dict(_counters(loops.state_dict(), self._state.step, self._batches))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Report the last step, whose validation is done, before the first micro-batch of the next one."""
        self._micro_batch = batch_idx % self._batches.micro_batches
        if self._micro_batch == 0:
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
        self._state.step = trainer.global_step
        if self._state.step % self._commit_steps == 0:
            self._state.commit()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Report the last step of the training."""
        progress_channel.progress(trainer.global_step)

    def _create_state(self, trainer: Any, pl_module: Any) -> None:
        self._module = pl_module
        self._optimizers, self._schedulers = trainer.strategy.optimizers, trainer.strategy.lr_scheduler_configs
        for optimizer in self._optimizers:
            optimizer.step = _with_closure_first(optimizer.step)
        self._state = State(
            module=pl_module,
            batches=self._batches,
            **{f"optimizer{index}": optimizer for index, optimizer in enumerate(self._optimizers)},
            **{f"scheduler{index}": config.scheduler for index, config in enumerate(self._schedulers)},
            **self._options,
        )


def _check_trainer(trainer: Any, pl_module: Any, batches: StepBatches) -> None:
    """ValueError for settings that the callback cannot follow."""
    if not pl_module.automatic_optimization:
        raise ValueError("the module has automatic_optimization = False: use a training loop of your own with State")
    # The strategy of DeepSpeed is derived from it, and shards what it trains.
    ddp = isinstance(trainer.strategy, DDPStrategy) and "DeepSpeed" not in type(trainer.strategy).__name__
    if not ddp or trainer.accumulate_grad_batches != batches.micro_batches:
        raise ValueError("create the Trainer with **callback.trainer_arguments() in each round")


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

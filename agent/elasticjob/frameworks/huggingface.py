"""elasticjob in Hugging Face's Trainer: state in memory, and the same data and global batch at any world size.

Imports transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from elasticjob.data.sampler import ElasticSampler
from elasticjob.frameworks.step_batches import StepBatches
from elasticjob.training import progress_channel
from elasticjob.training.replicated.state import State

_KEPT_FIELDS = (
    "epoch",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
_IGNORED_LABEL = -100
"""What the losses of transformers leave out."""


class ElasticTrainerCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not checked here
    """Keeps the training of an `ElasticTrainer` in memory across rounds, and reports its steps.

    Create it once in a process, and pass it to the trainer of each round, in `callbacks`. It holds model, optimizer,
    scheduler, random states, the position in the data, and from the TrainerState the step, the logs and the best
    metric. At a planned end all ranks stop after the same step, with its evaluation and log.
    """

    def __init__(
        self,
        *,
        global_batch: int,
        seed: int = 0,
        shuffle: bool = True,
        commit_steps: int = 50,
        path: str | None = None,
        save_minutes: float | None = None,
        frozen_parameters: bool = True,
    ) -> None:
        """`global_batch`: samples of a step on all ranks together. `seed`, `shuffle`: order of the samples.

        `commit_steps`: commit the state after every so many steps. `path`, `save_minutes`, `frozen_parameters`: as for
        `elasticjob.State`.
        """
        self.batches: StepBatches | None = None
        """Which samples this rank takes; None before the first trainer."""
        self._global_batch = global_batch
        self._order: dict[str, Any] = {"seed": seed, "shuffle": shuffle}
        self._commit_steps = commit_steps
        self._options: dict[str, Any] = {
            "path": path,
            "save_minutes": save_minutes,
            "frozen_parameters": frozen_parameters,
        }
        self._fields = _TrainerFields()
        self._model: Any = None
        self._optimizers: tuple[Any, Any] = (None, None)
        self._state: State | None = None

    def attach(self, trainer: Any) -> StepBatches:
        """Take the trainer of a new round: it continues with the optimizer and the scheduler of the last one.

        ValueError if the trainer has another model, or settings that do not fit.
        """
        _check_trainer(trainer)
        if self.batches is None:
            sampler = ElasticSampler(trainer.train_dataset, **self._order)
            self.batches = StepBatches(sampler, self._global_batch, trainer.args.train_batch_size)
        if self._state is not None:
            if trainer.model is not self._model:
                raise ValueError("this trainer has another model: create the model outside of the restartable function")
            trainer.optimizer, trainer.lr_scheduler = self._optimizers
        return self.batches

    def restore(self, trainer: Any) -> None:
        """Bring the trainer to the newest state of any rank. Its optimizer and scheduler exist, its DDP model not."""
        self._fields.of = trainer.state
        if self._state is None:
            self._model, self._optimizers = trainer.model, (trainer.optimizer, trainer.lr_scheduler)
            self._state = State(
                model=trainer.model,
                optimizer=trainer.optimizer,
                scheduler=trainer.lr_scheduler,
                batches=self.batches,
                trainer=self._fields,
                **self._options,
            )
        self._state.sync()
        trainer.state.global_step = self._state.step
        if self.batches is not None:
            self.batches.finished = self._state.step >= trainer.state.max_steps

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """ValueError in a trainer that does not restore the state."""
        if self._state is None:
            raise ValueError("ElasticTrainerCallback needs an ElasticTrainer, or a Trainer with ElasticTrainerMixin")

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the last step: its evaluation and log are done."""
        progress_channel.progress(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the step."""
        if self._state is None or self.batches is None:
            return
        self.batches.advance()
        state.epoch = state.global_step / self.batches.steps_per_epoch
        self._state.step = state.global_step
        if state.global_step % self._commit_steps == 0:
            self._state.commit()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the last step of the training."""
        progress_channel.progress(state.global_step)


class ElasticTrainerMixin:
    """Makes a Trainer elastic: `class MyTrainer(ElasticTrainerMixin, Trainer)`, with an `ElasticTrainerCallback`.

    Each step has the callback's `global_batch` samples on all ranks together, in micro-batches of at most
    `per_device_train_batch_size`. `gradient_accumulation_steps` follows from that and is overwritten. The loss of a
    step is the mean over its samples, or over its labels if the model's loss takes `num_items_in_batch`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Arguments of Trainer. ValueError without an `ElasticTrainerCallback` in `callbacks`."""
        super().__init__(*args, **kwargs)
        self._elastic = _find_callback(_of(self).callback_handler.callbacks)
        self._batches = self._elastic.attach(self)
        self._factor = 1.0
        self._weights: Iterator[float] = iter(())
        _of(self).args.gradient_accumulation_steps = self._batches.micro_batches

    def get_train_dataloader(self) -> Any:
        """Return a data loader that continues at the position that all ranks have reached."""
        usual = _super(self).get_train_dataloader()
        options = ("collate_fn", "num_workers", "pin_memory", "persistent_workers", "prefetch_factor", "worker_init_fn")
        return self._batches.loader(usual.dataset, **{name: getattr(usual, name) for name in options})

    def create_optimizer(self, model: Any = None) -> Any:
        """Create the optimizer, and in `train` restore the state: afterwards DDP may copy the weights of rank 0."""
        optimizer = _super(self).create_optimizer(model)
        trainer = _of(self)
        if trainer.is_in_train:
            trainer.create_scheduler(num_training_steps=trainer.state.max_steps)
            self._elastic.restore(trainer)
        return optimizer

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        """Take the micro-batches of a step. Labels of those with weight 0 do not count."""
        weights = self._batches.weights()
        self._weights = iter(weights)
        return _super(self).get_batch_samples(self._labelled(weights, epoch_iterator), num_batches, device)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Do the forward and backward pass of a micro-batch with its weight."""
        weight = next(self._weights)
        self._factor = 1.0 if num_items_in_batch is not None else weight * self._divisor()
        try:
            return _super(self).training_step(model, inputs, num_items_in_batch)
        finally:
            self._factor = 1.0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        """Return the loss, weighted in a training step."""
        result = _super(self).compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)
        return result if return_outputs or self._factor == 1.0 else result * self._factor

    def _counts_labels(self) -> bool:
        """Return whether the loss is divided by the number of labels of the step on all ranks."""
        return bool(_of(self).model_accepts_loss_kwargs or _of(self).compute_loss_func is not None)

    def _divisor(self) -> int:
        """Return by what Trainer divides the loss of a micro-batch."""
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        undivided = scaled if scaled is not None else _of(self).compute_loss_func is not None
        return 1 if undivided else self._batches.micro_batches

    def _labelled(self, weights: list[float], batches: Iterator[Any]) -> Iterator[Any]:
        for weight, batch in zip(weights, batches, strict=False):
            labels = batch.get("labels") if isinstance(batch, Mapping) else None
            if weight == 0 and self._counts_labels() and isinstance(labels, torch.Tensor):
                yield {**batch, "labels": torch.full_like(labels, _IGNORED_LABEL)}
            else:
                yield batch


class ElasticTrainer(ElasticTrainerMixin, Trainer):  # type: ignore[misc]  # transformers is not checked here
    """Trainer with the mixin."""


class _TrainerFields:
    """The part of a State that comes from the TrainerState. The step is the State's own."""

    def __init__(self) -> None:
        self.of: Any = None
        """The TrainerState of this round."""
        self._encoded: tuple[int, str] = (0, "[]")

    def state_dict(self) -> dict[str, str]:
        fields = {name: getattr(self.of, name) for name in _KEPT_FIELDS if name != "log_history"}
        return {"fields": json.dumps(fields), "log_history": self._log_history()}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        for name, value in json.loads(state["fields"]).items():
            setattr(self.of, name, value)
        self.of.log_history = json.loads(state["log_history"])
        self._encoded = (len(self.of.log_history), state["log_history"])

    def _log_history(self) -> str:
        """Return the logs as JSON. They only grow, and are encoded when they have."""
        logs = self.of.log_history
        if len(logs) != self._encoded[0]:
            self._encoded = (len(logs), json.dumps(logs))
        return self._encoded[1]


def _find_callback(callbacks: list[Any]) -> ElasticTrainerCallback:
    for callback in callbacks:
        if isinstance(callback, ElasticTrainerCallback):
            return callback
    raise ValueError("this trainer needs an ElasticTrainerCallback: pass it in callbacks=[...]")


def _check_trainer(trainer: Any) -> None:
    """ValueError if the trainer divides its data or its loss in a way that does not fit."""
    if not hasattr(trainer.train_dataset, "__len__"):
        raise ValueError("the training dataset has no length: ElasticTrainer needs a dataset with __len__")
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ValueError("ElasticTrainer cannot keep sharded models: use a training loop with elasticjob.ShardedState")
    if not trainer.args.average_tokens_across_devices:
        raise ValueError("ElasticTrainer needs average_tokens_across_devices=True, since ranks have uneven shares")


def _of(mixin: Any) -> Any:
    """Return the mixin's object as the Trainer that it is."""
    return mixin


def _super(mixin: Any) -> Any:
    """Return the Trainer behind the mixin."""
    return super(ElasticTrainerMixin, mixin)

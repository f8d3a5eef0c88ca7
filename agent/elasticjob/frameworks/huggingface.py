"""elasticjob in Hugging Face's Trainer: state in memory, and the same data and global batch at any world size.

Imports transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from elasticjob.data.sampler import ElasticSampler
from elasticjob.frameworks._huggingface.fields import ADVICE, TrainerFields
from elasticjob.frameworks._huggingface.options import Order, check_training_options, sampler_arguments
from elasticjob.frameworks.callback_attributes import CallbackAttributes
from elasticjob.frameworks.step_batches import StepBatches
from elasticjob.training import progress_channel
from elasticjob.training.replicated.state import State

_IGNORED_LABEL = -100
"""What the losses of transformers leave out."""


class ElasticTrainerCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not checked here
    """Keeps the training of an `ElasticTrainer` in memory across rounds, and reports its steps.

    Create it once in a process, and pass it to the trainer of each round, in `callbacks`. It holds model, optimizer,
    scheduler, random states, the position in the data, from the TrainerState the step, the logs and the best metric,
    and what other callbacks export (`state()`), such as EarlyStoppingCallback. At a planned end all ranks stop after
    the same step, with its evaluation and log.

    Example:
        >>> callback = ElasticTrainerCallback(global_batch=32)  # ElasticTrainer(..., callbacks=[callback])
    """

    def __init__(
        self,
        *,
        global_batch: int,
        seed: int = 0,
        shuffle: bool = True,
        order: Order | None = None,
        commit_steps: int = 50,
        path: str | None = None,
        save_minutes: float | None = None,
        frozen_parameters: bool = True,
    ) -> None:
        """Begin with the first sample of epoch 0.

        Args:
            global_batch: Samples of a step on all ranks together.
            seed: As for `elasticjob.ElasticSampler`. The `data_seed` of TrainingArguments takes its place if given.
            shuffle: As for `elasticjob.ElasticSampler`. The `train_sampling_strategy` of TrainingArguments takes the
                place of `shuffle` and `order` if given.
            order: As for `elasticjob.ElasticSampler`.
            commit_steps: Commit the state after every so many steps.
            path: As for `elasticjob.State`.
            save_minutes: As for `elasticjob.State`.
            frozen_parameters: As for `elasticjob.State`.
        """
        self.batches: StepBatches | None = None
        """Which samples this rank takes; None before the first trainer."""
        self._global_batch = global_batch
        self._order: dict[str, Any] = {"seed": seed, "shuffle": shuffle, "order": order}
        self._commit_steps = commit_steps
        self._options: dict[str, Any] = {
            "path": path,
            "save_minutes": save_minutes,
            "frozen_parameters": frozen_parameters,
        }
        self._fields = TrainerFields()
        self._attributes = CallbackAttributes()
        self._evaluated = False
        """Whether there was an evaluation since the last step was counted."""
        self._model: Any = None
        self._optimizers: tuple[Any, Any] = (None, None)
        self._state: State | None = None

    def attach(self, trainer: Any) -> StepBatches:
        """Take the trainer of a new round: it continues with the optimizer and the scheduler of the last one.

        ValueError if the trainer has another model, or settings that do not fit.
        """
        check_training_options(trainer, ElasticTrainerMixin)
        others = [callback for callback in trainer.callback_handler.callbacks if callback is not self]
        self._attributes.begin_round(filter(_exports_nothing, others), ADVICE)
        if self.batches is None:
            self.batches = self._create_batches(trainer)
        if self._state is not None:
            if trainer.model is not self._model:
                raise ValueError("this trainer has another model: create the model outside of the restartable function")
            trainer.optimizer, trainer.lr_scheduler = self._optimizers
        return self.batches

    def restore(self, trainer: Any) -> None:
        """Bring the trainer to the newest state of any rank. Its optimizer and scheduler exist, its DDP model not."""
        self._fields.begin_round(trainer.state, trainer.callback_handler.callbacks)
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
        self._evaluated = False
        trainer.state.global_step = self._state.step
        if self._state.step:
            trainer.args.eval_on_start = False
        if self.batches is not None:
            self.batches.finished = self._fields.stopped or self._state.step >= trainer.state.max_steps

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """ValueError in a trainer that does not restore the state."""
        if self._state is None:
            raise ValueError("ElasticTrainerCallback needs an ElasticTrainer, or a Trainer with ElasticTrainerMixin")

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the last step: its evaluation and log are done."""
        self._count_evaluation(state, control)
        progress_channel.progress(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the step."""
        if self._state is None or self.batches is None:
            return
        self.batches.advance()
        state.epoch = state.global_step / self.batches.steps_per_epoch
        self._count(state, control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note that callbacks, the best metric and schedulers may have changed since the step was counted."""
        self._evaluated = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """In a training that was stopped before, do not evaluate and save again."""
        if self._fields.stopped and self.batches is not None and self.batches.finished:
            control.should_log = control.should_evaluate = control.should_save = False

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the last step of the training, without a commit: the weights may be those of the best step."""
        self._count_evaluation(state, control, commit=False)
        progress_channel.progress(state.global_step)

    def _create_batches(self, trainer: Any) -> StepBatches:
        order = sampler_arguments(trainer, **self._order, global_batch=self._global_batch)
        sampler = ElasticSampler(trainer.train_dataset, **order)
        batches = StepBatches(sampler, self._global_batch, trainer.args.train_batch_size)
        if trainer.args.dataloader_drop_last:
            if sampler.length < self._global_batch:
                raise ValueError(
                    f"ElasticTrainer: dataloader_drop_last=True leaves no step of {self._global_batch} samples: the "
                    f"dataset has {sampler.length}"
                )
            batches.limit_steps(sampler.length // self._global_batch, "dataloader_drop_last=True")
        return batches

    def _count_evaluation(self, state: Any, control: Any, *, commit: bool = True) -> None:
        """Count the last step again, if its evaluation or a decision to stop the training belongs to it."""
        if self._state is not None and (self._evaluated or _is_stopped(state, control) != self._fields.stopped):
            self._count(state, control, commit=commit and state.global_step > 0)

    def _count(self, state: Any, control: Any, *, commit: bool = True) -> None:
        """Let the state as it is now be that of the step."""
        assert self._state is not None  # noqa: S101  # for mypy
        self._fields.stopped = _is_stopped(state, control)
        self._evaluated = False
        self._state.step = state.global_step
        if commit and state.global_step % self._commit_steps == 0:
            self._state.commit()


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
        self.step_batches = self._elastic.attach(self)
        self._factor = 1.0
        self._weighted = False
        self._weights: Iterator[float] = iter(())
        _of(self).args.gradient_accumulation_steps = self.step_batches.micro_batches

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as Trainer does. ValueError for `resume_from_checkpoint`: the state comes from the callback."""
        if resume_from_checkpoint:
            raise ValueError(
                "ElasticTrainer: leave out resume_from_checkpoint, because the callback restores the training; to "
                "begin with the weights of a checkpoint, load them into the model"
            )
        return _super(self).train(None, *args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """Return a data loader that continues at the position that all ranks have reached."""
        usual = _super(self).get_train_dataloader()
        options = (
            "collate_fn",
            "num_workers",
            "pin_memory",
            "persistent_workers",
            "prefetch_factor",
            "worker_init_fn",
            "multiprocessing_context",
        )
        return self.step_batches.loader(usual.dataset, **{name: getattr(usual, name) for name in options})

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
        weights = self.step_batches.weights()
        self._weights = iter(weights)
        return _super(self).get_batch_samples(self._labelled(weights, epoch_iterator), num_batches, device)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Do the forward and backward pass of a micro-batch with its weight."""
        weight = next(self._weights)
        mean = num_items_in_batch is None or getattr(self, "loss_is_scaled_for_ga", None) is False
        self._factor = weight * self._divisor() if mean else 1.0
        self._weighted = False
        try:
            loss = _super(self).training_step(model, inputs, num_items_in_batch)
        finally:
            self._factor = 1.0
        if not self._weighted:
            raise RuntimeError(
                f"{type(self).__name__}.compute_loss does not call that of ElasticTrainerMixin, which weights the loss:"
                " let it be in a class behind the mixin, class MyElasticTrainer(ElasticTrainerMixin, MyTrainer)"
            )
        return loss

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        """Return the loss, weighted in a training step."""
        result = _super(self).compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)
        self._weighted = True
        return result if return_outputs or self._factor == 1.0 else result * self._factor

    def _counts_labels(self) -> bool:
        """Return whether the loss is divided by the number of labels of the step on all ranks."""
        return bool(_of(self).model_accepts_loss_kwargs or _of(self).compute_loss_func is not None)

    def _divisor(self) -> int:
        """Return by what Trainer divides the loss of a micro-batch."""
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        undivided = scaled if scaled is not None else _of(self).compute_loss_func is not None
        return 1 if undivided else self.step_batches.micro_batches

    def _labelled(self, weights: list[float], batches: Iterator[Any]) -> Iterator[Any]:
        for weight, batch in zip(weights, batches, strict=False):
            labels = batch.get("labels") if isinstance(batch, Mapping) else None
            if weight == 0 and self._counts_labels() and isinstance(labels, torch.Tensor):
                yield {**batch, "labels": torch.full_like(labels, _IGNORED_LABEL)}
            else:
                yield batch


class ElasticTrainer(ElasticTrainerMixin, Trainer):  # type: ignore[misc]  # transformers is not checked here
    """Trainer with the mixin."""


def _find_callback(callbacks: list[Any]) -> ElasticTrainerCallback:
    for callback in callbacks:
        if isinstance(callback, ElasticTrainerCallback):
            return callback
    raise ValueError("this trainer needs an ElasticTrainerCallback: pass it in callbacks=[...]")


def _is_stopped(state: Any, control: Any) -> bool:
    """Return whether a callback ends the training before its last step."""
    return bool(control.should_training_stop) and state.global_step < state.max_steps


def _exports_nothing(callback: Any) -> bool:
    return not isinstance(callback, ExportableState)


def _of(mixin: Any) -> Any:
    """Return the mixin's object as the Trainer that it is."""
    return mixin


def _super(mixin: Any) -> Any:
    """Return the Trainer behind the mixin."""
    return super(ElasticTrainerMixin, mixin)

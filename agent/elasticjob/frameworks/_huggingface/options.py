"""Settings of a Trainer that decide which data and which steps there are: followed, or refused by name.

Imports transformers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.trainer_pt_utils import get_length_grouped_indices

Order = Callable[[int], Sequence[int]]

_OWN_ORDER = "for an order of your own, pass ElasticTrainerCallback(order=...), a function that returns its indices"


def check_training_options(trainer: Any, mixin: type) -> None:
    """ValueError for settings and overridden methods that `mixin` cannot follow: they would be ignored."""
    for refused, text in _refusals(trainer):
        if refused:
            raise ValueError(f"ElasticTrainer: {text}")
    advice = "pass the dataset and the data_collator to the trainer"
    _check_method(trainer, mixin, "_get_train_sampler", _OWN_ORDER)
    _check_method(trainer, mixin, "get_train_dataloader", f"{advice}; {_OWN_ORDER}")
    _check_method(trainer, mixin, "_get_dataloader", f"{advice}; {_OWN_ORDER}")


def sampler_arguments(
    trainer: Any, *, seed: int, shuffle: bool, order: Order | None, global_batch: int
) -> dict[str, Any]:
    """Return the arguments of the ElasticSampler for the trainer's `train_sampling_strategy` and `data_seed`.

    `seed`, `shuffle`, `order`: those of the callback. ValueError if both say something else.
    """
    args = trainer.args
    seed = seed if args.data_seed is None else args.data_seed
    strategy = args.train_sampling_strategy
    if order is not None and strategy != "random":
        raise ValueError(f"ElasticTrainer: train_sampling_strategy={strategy!r} has an order: leave out order=...")
    if strategy == "group_by_length":
        order = _length_groups(trainer._get_train_sampler().lengths, global_batch, seed)
    return {"seed": seed, "shuffle": shuffle and strategy != "sequential", "order": order}


def _length_groups(lengths: Sequence[int], global_batch: int, seed: int) -> Order:
    """Return an order in which the samples of a step have similar lengths; the same at any world size."""

    def order(epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(random.Random(f"{seed} {epoch}").getrandbits(63))  # noqa: S311
        found: list[int] = get_length_grouped_indices(lengths, global_batch, generator=generator)
        return found

    return order


def _refusals(trainer: Any) -> list[tuple[bool, str]]:
    """Return whether each reason applies, and what to write instead."""
    args, accelerator = trainer.args, trainer.args.accelerator_config
    model_parallel = (trainer.get_tp_size(), trainer.get_cp_size(), trainer.get_sp_size())
    return [
        (
            not hasattr(trainer.train_dataset, "__len__"),
            "the training dataset has no length: pass a dataset with __len__",
        ),
        (
            bool(trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled),
            "it cannot keep sharded models: use a training loop with elasticjob.ShardedState",
        ),
        (
            any(size > 1 for size in model_parallel),
            "it cannot keep models that several ranks hold together (tp_size, cp_size, sp_size): use a training loop "
            "with elasticjob.ShardedState and ElasticSampler(data_parallel=...)",
        ),
        (
            not args.average_tokens_across_devices,
            "it needs average_tokens_across_devices=True, since ranks have uneven shares",
        ),
        (
            args.auto_find_batch_size,
            "auto_find_batch_size=True would change the micro-batches of one rank only: leave it out, and set "
            "per_device_train_batch_size to what fits; steps keep their global_batch",
        ),
        (
            args.train_sampling_strategy == "batch_rebalance",
            'train_sampling_strategy="batch_rebalance" deals samples to a fixed number of ranks: use "group_by_length"',
        ),
        (
            not args.dataloader_in_order,
            "dataloader_in_order=False would give micro-batches the weights of others: leave it out",
        ),
        (
            bool(accelerator.split_batches),
            "split_batches=True in accelerator_config: leave it out; global_batch is the batch of all ranks already",
        ),
        (
            bool(accelerator.dispatch_batches),
            "dispatch_batches=True in accelerator_config: leave it out; each rank reads its own samples",
        ),
        (
            "layerwise" in str(getattr(args.optim, "value", args.optim)),
            f"optim={str(getattr(args.optim, 'value', args.optim))!r} changes weights in the backward pass, before "
            "the step is complete: use the optimizer without layerwise",
        ),
    ]


def _check_method(trainer: Any, mixin: type, name: str, advice: str) -> None:
    """ValueError if a class of the user has a method of its own that is not called, or not in full."""
    for owner in type(trainer).__mro__:
        if name in vars(owner) and owner is not mixin and not owner.__module__.startswith("transformers."):
            raise ValueError(f"ElasticTrainer: {owner.__name__}.{name} would be ignored: remove it. {advice}")

"""Bring the data of a Lightning Trainer to the batch in the middle of an epoch at which a checkpoint was saved.

Lightning restores its counters and, for loaders with a `state_dict`, their position. Other loaders would begin again
with the first batch of the epoch. The attributes of Lightning's loops that are used here are private.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset


def restore_position(fit_loop: Any, world_size: int, saved_world_size: int) -> None:
    """Let the next batch be the one after those that the epoch has had; call it before the first batch is fetched.

    With another number of ranks an epoch has another number of batches: the same part of it is left out.
    """
    fetcher, progress = fit_loop._data_fetcher, fit_loop.epoch_loop.batch_progress.current
    loaders = fetcher.combined_loader.flattened
    if fetcher.length is None or any(_has_position(loader) for loader in loaders):
        return
    done = _done_batches(fit_loop, world_size, saved_world_size)
    for name in ("ready", "started", "processed", "completed"):
        setattr(progress, name, done)
    fetcher.combined_loader.reset()  # workers have the order of the sampler before Lightning has set its epoch
    if len(loaders) == 1 and _can_skip(loaders[0]):
        with _beginning_at(loaders[0], done):
            fetcher.iterator = iter(fetcher.combined_loader)
    else:
        fetcher.iterator = iter(fetcher.combined_loader)
        for _ in islice(fetcher.iterator, done):
            pass
    fetcher.fetched = done


def _done_batches(fit_loop: Any, world_size: int, saved_world_size: int) -> int:
    """Return how many batches of the epoch this rank has had, at its present number of ranks."""
    done: int = fit_loop.epoch_loop.batch_progress.current.ready
    if world_size == saved_world_size:
        return done
    steps: int = max(1, fit_loop.trainer.accumulate_grad_batches)
    left_out: int = min(done * saved_world_size // world_size, fit_loop._data_fetcher.length - 1)
    return max(0, left_out) // steps * steps


def _has_position(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _can_skip(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


class _Rest:
    """A sampler whose first iteration leaves out its first elements; its length stays, because it is that of an epoch.

    Workers that stay iterate over it in later epochs too. Iterators that nothing is taken from do not count.
    """

    def __init__(self, sampler: Any, start: int) -> None:
        self._sampler = sampler
        self._start = start

    def __iter__(self) -> Iterator[Any]:
        start, self._start = self._start, 0
        yield from islice(iter(self._sampler), start, None)

    def __len__(self) -> int:
        return len(self._sampler)


@contextmanager
def _beginning_at(loader: Any, batch: int) -> Iterator[None]:
    """Let an iterator of the loader that is created here begin with this batch; nothing before it is loaded."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = getattr(loader, name)
    object.__setattr__(loader, name, _Rest(sampler, batch))  # DataLoader refuses a new sampler
    try:
        yield
    finally:
        object.__setattr__(loader, name, sampler)

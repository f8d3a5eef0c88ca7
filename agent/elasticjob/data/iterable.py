"""`elasticjob.ElasticIterable`: each sample of an iterable dataset once an epoch, at any world size. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from elasticjob.data.epoch_position import EpochPosition
from elasticjob.data.ranks import Ranks
from elasticjob.data.step_plan import rank_positions


class ElasticIterable(EpochPosition, IterableDataset):  # type: ignore[misc]  # torch has no types here
    """Deals the samples of a dataset that can only be iterated, from the position that all ranks have reached.

    Keep it in an `elasticjob.State`, as an `ElasticSampler`. For training, use it with `elasticjob.microbatches`. A
    data loader can also iterate it alone, `DataLoader(stream, batch_size=32)`: each data loader worker of each rank
    then yields the samples of its stride. That is right for an evaluation; the numbers of batches differ.

    Every data loader worker of every rank reads the whole dataset and keeps its part; to resume, it skips what is
    consumed. Do costly work on a sample (decoding, tokenization) in `transform`, which sees kept samples only.

    The dataset must yield the same samples in the same order in every process and every time, for the same epoch. If
    it has `set_epoch`, that is called before each iteration. It must not divide itself among ranks. If it divides
    itself among data loader workers, as those of Hugging Face do, use `num_workers` 0 or 1.

    Example:
        >>> stream = elasticjob.ElasticIterable(range(6), transform=str, rank=0, world_size=2)
        >>> list(stream)
        ['0', '2', '4']
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        *,
        transform: Callable[[Any], Any] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        data_parallel: Any = None,
    ) -> None:
        """Begin with the first sample of epoch 0.

        Args:
            dataset: The samples, in the same order each time.
            transform: Called with each sample that this rank keeps.
            rank: As for `ElasticSampler`.
            world_size: As for `ElasticSampler`.
            data_parallel: As for `ElasticSampler`.

        Raises:
            TypeError: The dataset is an iterator, which ends after one epoch.
        """
        if isinstance(dataset, Iterator):
            raise TypeError("the dataset is an iterator, which can be read only once: pass an object with __iter__")
        super().__init__()
        self.ranks = Ranks(rank, world_size, data_parallel)
        self._dataset = dataset
        self._transform = transform

    def __iter__(self) -> Iterator[Any]:
        rank, world_size = self.ranks.current()
        worker, workers = data_loader_worker()
        start = rank_positions(0, world_size * workers, rank, world_size)[worker]
        return map(self.transformed, islice(self.remaining(), start, None, world_size * workers))

    def remaining(self) -> Iterator[Any]:
        """Yield the samples of all ranks in the rest of the epoch. RuntimeError if the dataset has become shorter."""
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(self.epoch)
        samples = iter(self._dataset)
        skipped = sum(1 for _ in islice(samples, self.consumed))
        if skipped < self.consumed:
            raise RuntimeError(
                f"the dataset ended after {skipped} samples, of which {self.consumed} were consumed already: it must "
                "yield the same samples in every process and every time"
            )
        yield from samples

    def transformed(self, sample: Any) -> Any:
        """Return what the user's transform makes of a sample."""
        return sample if self._transform is None else self._transform(sample)


def data_loader_worker() -> tuple[int, int]:
    """Return the index of this data loader worker and the number of workers; (0, 1) in the training process."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)

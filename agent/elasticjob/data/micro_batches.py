"""`elasticjob.microbatches`: the same global batch in every step, at any world size. Imports torch."""

from __future__ import annotations

from elasticjob.data.iterable import ElasticIterable
from elasticjob.data.micro_batch_sampler import MicroBatchSampler
from elasticjob.data.micro_batch_stream import Collate, MicroBatchStream
from elasticjob.data.sampler import ElasticSampler


def microbatches(
    global_batch: int,
    source: ElasticSampler | ElasticIterable,
    *,
    max_size: int | None = None,
    collate_fn: Collate | None = None,
) -> MicroBatchSampler | MicroBatchStream:
    """Return what makes a data loader yield micro-batches, and a training loop steps of `global_batch` samples.

    Each step has `global_batch` samples on all ranks together, and fewer only at the end of an epoch, at any world
    size. Each rank takes its part in as few micro-batches of at most `max_size` samples as possible (None: in one).

    All ranks have the same number of steps and of micro-batches. A micro-batch without samples (a last step with fewer
    samples than ranks, for example) holds one sample of the step that another rank has too, with weight 0: the rank
    takes part in all collectives and adds nothing to the gradient. The number can change between rounds.

    Args:
        global_batch: Samples of a step on all ranks together.
        source: The sampler or stream, which the steps move.
        max_size: Samples of a micro-batch on one rank, at most. None: no limit.
        collate_fn: Makes a batch of a list of samples of an ElasticIterable. For an ElasticSampler, pass it to the
            loader.

    Returns:
        The `batch_sampler` of a DataLoader; for an ElasticIterable, the dataset of `DataLoader(batches, None)`.

    Raises:
        ValueError: A size is below 1, or `collate_fn` comes with an ElasticSampler.

    Example:
        >>> dataset = torch.ones(8, 2)
        >>> model = torch.nn.Linear(2, 1)
        >>> sampler = elasticjob.ElasticSampler(dataset)
        >>> batches = elasticjob.microbatches(4, sampler, max_size=2)
        >>> loader = torch.utils.data.DataLoader(dataset, batch_sampler=batches)
        >>> for step in batches.steps(loader):
        ...     for batch in step:
        ...         with batch.gradient_sync(model):
        ...             (model(batch.data).mean() * batch.weight).backward()
        >>> sampler.epoch
        1
    """
    if global_batch < 1 or (max_size is not None and max_size < 1):
        raise ValueError(f"global_batch is {global_batch} and max_size is {max_size}: want 1 or more")
    if isinstance(source, ElasticIterable):
        return MicroBatchStream(global_batch, source, max_size, collate_fn)
    if collate_fn is not None:
        raise ValueError("pass collate_fn to the data loader of the ElasticSampler's dataset")
    return MicroBatchSampler(global_batch, source, max_size)

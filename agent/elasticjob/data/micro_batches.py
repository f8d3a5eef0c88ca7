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

        batches = elasticjob.microbatches(96, sampler, max_size=16)
        loader = DataLoader(dataset, batch_sampler=batches)     # of an ElasticIterable: DataLoader(batches, None)
        for step in batches.steps(loader):
            for batch in step:
                with batch.gradient_sync(model):
                    (mean_loss(model, batch.data) * batch.weight).backward()
            optimizer.step()

    All ranks have the same number of steps and of micro-batches. A micro-batch without samples (a last step with fewer
    samples than ranks, for example) holds one sample of the step that another rank has too, with weight 0: the rank
    takes part in all collectives and adds nothing to the gradient. The number can change between rounds.

    `collate_fn` makes a batch of a list of samples of an ElasticIterable; for an ElasticSampler, pass it to the loader.
    ValueError for sizes below 1.
    """
    if global_batch < 1 or (max_size is not None and max_size < 1):
        raise ValueError(f"global_batch is {global_batch} and max_size is {max_size}: want 1 or more")
    if isinstance(source, ElasticIterable):
        return MicroBatchStream(global_batch, source, max_size, collate_fn)
    if collate_fn is not None:
        raise ValueError("pass collate_fn to the data loader of the ElasticSampler's dataset")
    return MicroBatchSampler(global_batch, source, max_size)

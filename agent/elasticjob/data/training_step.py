"""One optimizer step as the micro-batches of this rank. It moves the position of its source. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from elasticjob.data.epoch_position import EpochPosition
from elasticjob.data.step_plan import PlannedBatch


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward pass of this rank needs."""

    data: Any
    """The batch, as the data loader collated it."""
    samples: int
    """Number of samples of `data` that count. If it is 0, `data` is one sample of another rank and `weight` is 0."""
    weight: float
    """Multiply the mean loss of this micro-batch by it. The losses of a step then add up to world size times the mean
    over the step's samples on all ranks, and the gradient averaged by DDP is that of this mean."""
    last: bool
    """Last micro-batch of the step. The optimizer's step follows it."""

    def gradient_sync(self, model: Any) -> AbstractContextManager[Any]:
        """Let DDP or FSDP average gradients in the last micro-batch only. Run forward and backward pass inside."""
        if hasattr(model, "set_requires_gradient_sync"):  # FSDP2
            model.set_requires_gradient_sync(self.last)
        elif hasattr(model, "no_sync") and not self.last:
            context: AbstractContextManager[Any] = model.no_sync()
            return context
        return nullcontext()


class TrainingStep:
    """Iterates once over the step's micro-batches. Their number is the same on every rank.

    The position moves when the last micro-batch is handed out: a state saved after the optimizer's step includes the
    step, and a state saved before the loop over the micro-batches does not.
    """

    def __init__(
        self, source: EpochPosition, samples: int, plan: tuple[PlannedBatch, ...], batches: Iterator[Any]
    ) -> None:
        """`batches`: yields what the data loader makes of each planned micro-batch."""
        self.samples = samples
        """Number of samples of the step on all ranks: the global batch, or less in the last step of an epoch."""
        self._source = source
        self._expected = source.state_dict()
        self._plan = iter(plan)
        self._batches = batches
        self._finished = False

    def __iter__(self) -> Iterator[MicroBatch]:
        for planned in self._plan:
            data = self._next_batch()
            if planned.last:
                self._move()
            yield MicroBatch(data, planned.stop - planned.start, planned.weight, planned.last)

    def check_finished(self) -> None:
        """RuntimeError if micro-batches are left, or if other code moved the position."""
        if not self._finished:
            raise RuntimeError("the step has micro-batches left: loop over all of them before the next step begins")
        self._check_position()

    def _next_batch(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            raise RuntimeError("the data loader ended before the epoch: is the loader made for this dataset?") from None

    def _move(self) -> None:
        self._check_position()
        self._source.advance(self.samples)
        self._expected = self._source.state_dict()
        self._finished = True

    def _check_position(self) -> None:
        if (now := self._source.state_dict()) != self._expected:
            raise RuntimeError(
                f"the position changed from {self._expected} to {now} within a loop over steps: only the loop moves "
                "it; call advance, set_epoch, load_state_dict and State.sync outside of the loop"
            )

"""How much of which epoch all ranks together have consumed."""

from __future__ import annotations

from collections.abc import Mapping

OWN_ORDER = "own_order"
"""Name of what says that a function of the user decides the order."""


class EpochPosition:
    """An epoch and a number of samples of it. Both are the same on every rank and at every world size."""

    def __init__(self, length: int | None = None, **order: int) -> None:
        """`length`: samples of an epoch; None: unknown. `order`: what else decides which sample comes when."""
        self.epoch = 0
        self.consumed = 0
        """Samples of this epoch that all ranks together have consumed."""
        self._length = length
        self._order = order if length is None else {"length": length, **order}

    def advance(self, samples: int) -> None:
        """Add the samples that all ranks together consumed in a step. At its end, the next epoch begins.

        `samples` may exceed the rest of the epoch: the last step of an epoch never continues in the next one.
        """
        if samples < 0:
            raise ValueError(f"samples is {samples}: want the number of samples of the step on all ranks, 0 or more")
        self.consumed += samples
        if self._length is not None and self.consumed >= self._length:
            self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch. If it is the current one, nothing changes: a resumed epoch goes on."""
        if epoch != self.epoch:
            self.epoch, self.consumed = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """Return the position and the order that it refers to: plain integers, the same on every rank."""
        return {"epoch": self.epoch, "consumed": self.consumed, **self._order}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to a saved position. ValueError if it refers to another order: samples would be repeated and lost."""
        names = [*self._order, *([OWN_ORDER] if OWN_ORDER in state and OWN_ORDER not in self._order else [])]
        saved = {name: state.get(name) for name in names}
        if saved != self._order:
            raise ValueError(
                f"{type(self).__name__}: the saved position is of a dataset with {_text(saved)}, but this one has "
                f"{_text(self._order)}: use the same dataset and arguments, or train without the saved state"
            )
        self.epoch, self.consumed = state["epoch"], state["consumed"]


def _text(values: Mapping[str, int | None]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())

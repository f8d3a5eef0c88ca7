"""What a State keeps of the callbacks of a Lightning Trainer. Imports lightning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)

ADVICE = (
    "to save it, give the callback state_dict and load_state_dict, as EarlyStopping has; or create it in the function"
)
_REFUSED = {
    BatchSizeFinder: "set batch_size of the ElasticLightningCallback to what fits",
    GradientAccumulationScheduler: "steps have global_batch samples; write the loop yourself to change it",
    LearningRateFinder: "it would search again in each round; run it before, in a Trainer of its own",
    StochasticWeightAveraging: "keep a torch.optim.swa_utils.AveragedModel as an attribute of the module",
}


class CallbackStates:
    """The `state_dict` of each callback that has one, and whether one has stopped the training."""

    def __init__(self) -> None:
        self.stopped = False
        """Whether a callback has ended the training (`trainer.should_stop`)."""
        self._callbacks: list[Any] = []

    def begin_round(self, callbacks: Iterable[Any]) -> None:
        """Take the callbacks of a new trainer."""
        self._callbacks = [callback for callback in callbacks if exports_state(callback)]

    def state_dict(self) -> dict[str, Any]:
        found = {callback.state_key: callback.state_dict() for callback in self._callbacks}
        return {"callbacks": found, "stopped": self.stopped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.stopped = state["stopped"]
        for callback in self._callbacks:
            if callback.state_key in state["callbacks"]:
                callback.load_state_dict(state["callbacks"][callback.state_key])


def exports_state(callback: Any) -> bool:
    """Return whether a callback has a `state_dict` of its own."""
    return type(callback).state_dict is not Callback.state_dict


def check_callbacks(callbacks: Iterable[Any]) -> None:
    """ValueError for callbacks that change what a step is, or whose state is in Lightning's checkpoints only."""
    for callback in callbacks:
        name = type(callback).__name__
        for refused, advice in _REFUSED.items():
            if isinstance(callback, refused):
                raise ValueError(f"the callback {name} does not work with ElasticLightningCallback: {advice}")
        if type(callback).on_save_checkpoint is not Callback.on_save_checkpoint:
            raise ValueError(
                f"the callback {name} keeps its state in checkpoints (on_save_checkpoint), from which no rank is "
                "restored: let its state_dict return all of it, or keep averaged weights in the module, as "
                "torch.optim.swa_utils.AveragedModel"
            )

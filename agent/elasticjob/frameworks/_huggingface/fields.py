"""What a State saves of a Trainer besides model, optimizer and position. Imports transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from transformers.trainer_callback import ExportableState

ADVICE = (
    "to save it, derive the callback from transformers.trainer_callback.ExportableState too, with a method state() as "
    "EarlyStoppingCallback has; or create the callback in the function"
)

_SAVED_FIELDS = (
    "epoch",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)


class TrainerFields:
    """Fields of the TrainerState, what callbacks export, and whether one has stopped the training.

    `global_step` is not among them: it is `State.step`.
    """

    def __init__(self) -> None:
        self.trainer_state: Any = None
        """The TrainerState of this round."""
        self.stopped = False
        """Whether a callback has ended the training (`control.should_training_stop`)."""
        self._callbacks: list[Any] = []
        self._encoded: tuple[int, str] = (0, "[]")

    def begin_round(self, state: Any, callbacks: list[Any]) -> None:
        """Take the TrainerState and the callbacks of this round's Trainer.

        Its other fields, such as max_steps, are not restored because they depend on the round.
        """
        self.trainer_state, self._callbacks = state, callbacks

    def state_dict(self) -> dict[str, Any]:
        fields = {name: getattr(self.trainer_state, name) for name in _SAVED_FIELDS if name != "log_history"}
        return {
            "fields": json.dumps(fields),
            "log_history": self._log_history(),
            "callbacks": json.dumps([[name, _exported(callback)] for name, callback in self._exporting()]),
            "stopped": self.stopped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in json.loads(state["fields"]).items():
            setattr(self.trainer_state, name, value)
        self.trainer_state.log_history = json.loads(state["log_history"])
        self._encoded = (len(self.trainer_state.log_history), state["log_history"])
        self.stopped = state["stopped"]
        exported = json.loads(state["callbacks"])
        for name, callback in self._exporting():
            # Several of the same class differ by their order, as in Trainer's checkpoints.
            found = next((item for item in exported if item[0] == name), None)
            if found is not None:
                exported.remove(found)
                _restore(callback, found[1])

    def _exporting(self) -> Sequence[tuple[str, Any]]:
        return [(type(each).__name__, each) for each in self._callbacks if isinstance(each, ExportableState)]

    def _log_history(self) -> str:
        """Return the logs as JSON, encoded again only when they have grown."""
        logs = self.trainer_state.log_history
        if len(logs) != self._encoded[0]:
            self._encoded = (len(logs), json.dumps(logs))
        return self._encoded[1]


def _exported(callback: Any) -> Any:
    """Return what a callback exports; TypeError if that cannot be JSON."""
    state = callback.state()
    try:
        json.dumps(state)
    except (TypeError, ValueError) as error:
        name = type(callback).__name__
        raise TypeError(
            f"the state of callback {name} cannot be kept ({error}): let its state() return numbers, text, lists and "
            "dicts, such as tensor.item()"
        ) from error
    return state


def _restore(callback: Any, state: Mapping[str, Any]) -> None:
    """Give a callback what it has exported. The object stays, because the script and other callbacks may hold it."""
    if type(callback).from_state.__func__ is not ExportableState.from_state.__func__:
        vars(callback).update(vars(type(callback).from_state(state)))
        return
    own = {name: value for name, value in state.get("args", {}).items() if name in vars(callback)}
    for name, value in {**own, **state.get("attributes", {})}.items():
        setattr(callback, name, value)

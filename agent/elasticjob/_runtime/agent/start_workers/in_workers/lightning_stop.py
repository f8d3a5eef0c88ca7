"""A Trainer of Lightning goes on where this job has stopped, in a script that does nothing for it.

What is done is in `elasticjob.frameworks.plain_lightning`; the callback that stops is added by `lightning_status`.
"""

from __future__ import annotations

import functools
import sys

from .status_sender import is_wanted
from .trainers import framework

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

_CHECKPOINT_ARGUMENT = 4
"""Of `Trainer.fit`, after `self`: the position of `ckpt_path`."""


def go_on(module: ModuleType) -> None:
    """Let each `fit` of Lightning's Trainer begin with the newest checkpoint of this job, and note what it saves."""
    trainer = getattr(module, "Trainer", None)
    connectors = sys.modules.get(module.__name__.rpartition(".")[0] + ".connectors.checkpoint_connector")
    connector = getattr(connectors, "_CheckpointConnector", None)
    if trainer is None or connector is None or not is_wanted():
        return
    fit, save, resume = trainer.fit, trainer.save_checkpoint, connector.resume_start

    @functools.wraps(fit)
    def extended_fit(self: Any, *args: Any, **named: Any) -> Any:
        if (found := framework("plain_lightning")) is not None:
            given = named.get("ckpt_path", *args[_CHECKPOINT_ARGUMENT : _CHECKPOINT_ARGUMENT + 1])
            set_before = self.ckpt_path if self._checkpoint_connector._user_managed else None
            found.begin_training(self, given or set_before)
        return fit(self, *args, **named)

    @functools.wraps(save)
    def extended_save(self: Any, filepath: Any, weights_only: Any = None, *args: Any, **named: Any) -> Any:
        saved = save(self, filepath, weights_only, *args, **named)
        if not weights_only and (found := framework("plain_lightning")) is not None:
            found.note_checkpoint(self, filepath)
        return saved

    @functools.wraps(resume)
    def extended_resume(self: Any, checkpoint_path: Any = None, *args: Any, **named: Any) -> Any:
        found = framework("plain_lightning") if self.trainer.state.fn == "fit" else None
        own = None if found is None else found.checkpoint_to_load(self.trainer)
        if own is not None and named.get("weights_only", False) is None:
            named["weights_only"] = False  # this job has written it, with all that the script keeps in checkpoints
        return resume(self, own or checkpoint_path, *args, **named)

    trainer.fit, trainer.save_checkpoint, connector.resume_start = extended_fit, extended_save, extended_resume

"""A training framework stops at one step, saves and goes on, in a script that does nothing for it.

What is done is in `elasticjob.frameworks`: here it is called when a trainer is made, if this is the agent's package.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

TRAINER_INTEGRATION = "ELASTICJOB_TRAINER_INTEGRATION"
"""None: the job does not want it."""
_ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 5))  # noqa: PTH100, PTH118, PTH120
"""The folder of the agent's code."""

made = False
"""Whether this process has made a Trainer of transformers, which sends its progress itself."""


def extend_trainer(module: ModuleType) -> None:
    """Let each Trainer of transformers have `plain_trainer`'s callback, and begin where this job has stopped."""
    trainer = getattr(module, "Trainer", None)
    if trainer is None or os.environ.get(TRAINER_INTEGRATION) == "None":
        return
    init, train = trainer.__init__, trainer.train

    @functools.wraps(init)
    def extended_init(self: Any, *args: Any, **named: Any) -> None:
        global made
        made = True
        init(self, *args, **named)
        if (found := framework("plain_trainer")) is not None:
            found.add_callback(self)

    @functools.wraps(train)
    def extended_train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **named: Any) -> Any:
        if (found := framework("plain_trainer")) is not None:
            found.count_training()
            resume_from_checkpoint = resume_from_checkpoint or found.checkpoint_of_job(self) or resume_from_checkpoint
        return train(self, resume_from_checkpoint, *args, **named)

    trainer.__init__, trainer.train = extended_init, extended_train


@functools.cache
def framework(name: str) -> Any:
    """Return a module of elasticjob.frameworks; None if the program has another elasticjob, or lacks what it needs."""
    try:
        package = importlib.import_module("elasticjob")
        if os.path.dirname(os.path.abspath(str(package.__file__))) != os.path.join(_ROOT, "elasticjob"):  # noqa: PTH100, PTH118, PTH120
            return None
        return importlib.import_module(f"elasticjob.frameworks.{name}")
    except ImportError as error:
        print(f"[elasticjob] the training does not stop at one step on all ranks: {error}", file=sys.stderr)
        return None

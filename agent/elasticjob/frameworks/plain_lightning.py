"""A Lightning Trainer whose script does nothing for elasticjob: it stops at one step on all ranks, saves, and goes on.

The agent's patch of Lightning calls `add_lightning_stop` with each Trainer that is made, `begin_training` with each
`fit`, `note_checkpoint` with each checkpoint, and `checkpoint_to_load` where Lightning loads one. `package` is
lightning.pytorch or pytorch_lightning, which this module does not import.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any

from elasticjob.frameworks._plain.lightning_checkpoints import Checkpoint, JobCheckpoints
from elasticjob.frameworks._plain.lightning_position import restore_position
from elasticjob.frameworks._plain.trainings import last_metrics, say
from elasticjob.frameworks.own_callbacks import save_on_stop, uses_elasticjob
from elasticjob.training import progress_channel

_METRICS_INTERVAL = 1.0
"""Seconds from one reading of Lightning's metrics to the next."""

begun_trainings = 0
"""How many trainings this process has begun."""


def add_lightning_stop(trainer: Any, package: Any, total: Callable[[Any, Any], int | None]) -> bool:
    """Add a `LightningStop` to a Trainer; False if its script uses elasticjob itself, or saves no checkpoints.

    `total` returns the number of steps of a Trainer with a module; None: unknown.
    """
    if trainer.fast_dev_run or not any(map(_saves, trainer.checkpoint_callbacks)) or uses_elasticjob():
        return False
    kind = type("LightningStop", (LightningStop, package.Callback), {"__reduce__": lambda _: (package.Callback, ())})
    trainer.callbacks.insert(0, kind(_folder(trainer), total))
    return True


def begin_training(trainer: Any, checkpoint: Any) -> None:
    """Count a training that begins; `checkpoint`: the path that the script gives."""
    global begun_trainings
    begun_trainings += 1
    if (stop := _stop_of(trainer)) is not None:
        stop.begin(begun_trainings, goes_on=checkpoint in (None, "last"))


def note_checkpoint(trainer: Any, path: Any) -> None:
    """Note a complete checkpoint that the Trainer has written."""
    if (stop := _stop_of(trainer)) is not None:
        stop.note(trainer, os.fspath(path))


def checkpoint_to_load(trainer: Any) -> str | None:
    """Return the newest checkpoint that this job has written in this training and that all ranks have; None without.

    All ranks call it, once their group exists and Lightning knows the folders of the checkpoints.
    """
    stop = _stop_of(trainer)
    return None if stop is None else stop.choose()


class LightningStop:
    """Reports the steps of a Trainer. At a planned end all ranks save a checkpoint at the same step, and stop there.

    It comes before other callbacks. It stops before the next batch is fetched: validation, logs and checkpoints of the
    step are done then, and loaders that save their position have not gone on.
    """

    def __init__(self, folder: str, total: Callable[[Any, Any], int | None]) -> None:
        self.folder = folder
        self._total = total
        self._checkpoints: JobCheckpoints | None = None
        self._goes_on = False
        self._loaded: Checkpoint | None = None
        """The checkpoint from which the training goes on, until its data does so too."""
        self.trainer: Any = None
        """Set while it trains."""
        self._registered = False
        self._begin_step = self._reported = 0
        self._total_steps: int | None = None
        self._metrics: dict[str, Any] = {}
        self._read_at = 0.0

    def begin(self, training: int, *, goes_on: bool) -> None:
        """Begin the training with this number; `goes_on`: the script names no checkpoint of its own."""
        job = os.environ.get("TORCHELASTIC_RUN_ID", "")
        self._checkpoints = JobCheckpoints(self.folder, job, training, say)
        self._goes_on, self._loaded = goes_on, None

    def choose(self) -> str | None:
        """Return the path of the checkpoint from which the training goes on; None: what the script says."""
        if self._checkpoints is None or not self._goes_on:
            return None
        self._loaded = self._checkpoints.newest_common()
        if self._loaded is None:
            return None
        say(f"the training goes on from {self._loaded.path}, which this job has written")
        return self._loaded.path

    def note(self, trainer: Any, path: str) -> None:
        """Note a complete checkpoint; where the list cannot be written, the training goes on as without elasticjob."""
        if self.trainer is not trainer or self._checkpoints is None or not trainer.is_global_zero:
            return
        try:
            self._checkpoints.add(Checkpoint(trainer.global_step, trainer.world_size, path))
        except OSError as error:
            say(f"after a restart the training does not go on from {path}: {error}")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Report the step at which the training begins."""
        loops = trainer.fit_loop
        if self._checkpoints is None or hasattr(loops._data_fetcher, "iterator_wrapper"):
            return  # a module that fetches its batches itself is somewhere in a step then
        if not self._registered:
            self._registered = True
            save_on_stop(self._save)
        self.trainer = trainer
        self._total_steps = self._total(trainer, pl_module)
        self._begin_step = self._reported = trainer.global_step
        loops.epoch_loop._on_before_fetch = functools.partial(self._before_fetch, loops.epoch_loop._on_before_fetch)
        progress_channel.report_begin(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        """Note the metrics for the status: at this point Lightning computes none of them."""
        if self.trainer is not None and trainer.is_global_zero and time.monotonic() >= self._read_at:
            self._read_at = time.monotonic() + _METRICS_INTERVAL
            self._metrics = last_metrics(trainer.callback_metrics)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Report the last step. The training does not stop here: other callbacks have something to do at its end."""
        if self.trainer is not None:
            progress_channel.report_end(trainer.global_step, self._total_steps, self._metrics)
            self._end(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the training; `Stopped` comes here too. What other callbacks save now is not noted."""
        if self.trainer is not None:
            self._end(trainer)

    def _end(self, trainer: Any) -> None:
        self.trainer = None
        del trainer.fit_loop.epoch_loop._on_before_fetch

    def _before_fetch(self, original: Callable[[], None]) -> None:
        """Report the last step, before the first batch of the next one is fetched."""
        trainer = self.trainer
        if self._loaded is not None:
            loaded, self._loaded = self._loaded, None
            restore_position(trainer.fit_loop, trainer.world_size, loaded.world_size)
        if trainer.global_step != self._reported:
            self._reported = trainer.global_step
            progress_channel.progress(self._reported, self._total_steps, self._metrics)
        original()

    def _save(self) -> None:
        """Save a checkpoint of the step that all ranks have done, with what its validation has changed."""
        trainer, checkpoints = self.trainer, self._checkpoints
        if trainer is None or checkpoints is None or trainer.global_step == self._begin_step:
            return
        path = checkpoints.stop_path(trainer.global_step)
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            checkpoints.remove_older_stops(path)


def _stop_of(trainer: Any) -> LightningStop | None:
    return next((callback for callback in trainer.callbacks if isinstance(callback, LightningStop)), None)


def _saves(callback: Any) -> bool:
    """Return whether a ModelCheckpoint is configured to save what a training can go on from."""
    keeps = getattr(callback, "save_top_k", 1) != 0 or getattr(callback, "save_last", None)
    return bool(keeps) and not getattr(callback, "save_weights_only", False)


def _folder(trainer: Any) -> str:
    """Return the folder of the Trainer's checkpoints that is the same in each round: without a logger's version."""
    given = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks if _saves(callback)]
    logger = trainer.loggers[0].save_dir if trainer.loggers else None
    return str(next(filter(None, given), None) or logger or trainer.default_root_dir)

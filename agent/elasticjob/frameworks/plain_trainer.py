"""A Trainer whose script does nothing for elasticjob: it stops at one step on all ranks, saves, and goes on from there.

The agent's patch of transformers calls `add_callback` with each Trainer that is made, and `checkpoint_of_job` before it
trains. Imports transformers.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback

from elasticjob.frameworks._plain.trainings import last_metrics, newest_on_all_ranks, say
from elasticjob.frameworks.own_callbacks import save_on_stop, uses_elasticjob
from elasticjob.training import progress_channel

_MARK = "elasticjob-job"
"""A file in each checkpoint that a job has written: the job, and which training of the script it is of."""

begun_trainings = 0
"""How many trainings this process has begun."""


def add_callback(trainer: Any) -> None:
    """Add a `SavingStop` to a Trainer, unless its script uses elasticjob itself or saves no checkpoints."""
    if not _is_elastic(trainer) and _saves(trainer.args):
        trainer.add_callback(SavingStop(trainer))


def count_training() -> None:
    """Count a training that begins, whatever it begins from: the second one of a script is the second in each round."""
    global begun_trainings
    begun_trainings += 1


def checkpoint_of_job(trainer: Any) -> str | None:
    """Return the newest checkpoint that this job has written in this training and that all ranks have; None without.

    Checkpoints of other jobs in the same folder are not used: without elasticjob the script would begin anew too. All
    ranks call it.
    """
    callbacks = trainer.callback_handler.callbacks
    if _is_elastic(trainer) or not any(isinstance(callback, SavingStop) for callback in callbacks):
        return None
    own = _own_checkpoints(trainer.args.output_dir, _mark())
    chosen, lacking = newest_on_all_ranks(own)
    if lacking is not None:
        rank, newest = lacking
        what = f"from step {chosen}" if chosen is not None else "anew"
        say(
            f"rank {rank} does not have checkpoint-{newest} in {trainer.args.output_dir}, so the training begins"
            f" {what}: put output_dir on storage that all pods share"
        )
    if chosen is None:
        return None
    checkpoint = str(Path(trainer.args.output_dir) / f"checkpoint-{chosen}")
    say(f"the training goes on from {checkpoint}, which this job has written")
    return checkpoint


class SavingStop(TrainerCallback):  # type: ignore[misc]  # transformers is not checked here
    """Reports the steps of a Trainer. At a planned end all ranks save a checkpoint at the same step, and stop there."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._saved = -1
        """The step of the newest checkpoint, or that at which the training began."""
        self._training = False
        self._metrics: dict[str, float] = {}
        self._registered = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the step at which the training begins."""
        if not self._registered:
            self._registered = True
            save_on_stop(self._save)
        self._training, self._saved = True, state.global_step
        progress_channel.report_begin(state.global_step)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the last step: its evaluation, log and checkpoint are done, also those of the epoch's end."""
        self._report(state)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the last step."""
        self._report(state)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Note the metrics for the status."""
        numbers = {k: v for k, v in (logs or {}).items() if isinstance(v, (int, float))}
        self._metrics = last_metrics({**self._metrics, **numbers})

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Mark the checkpoint as one of this job, once all of it is written."""
        self._saved = state.global_step
        if _is_sharded(self._trainer):
            dist.barrier()  # each rank writes a part
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if args.should_save and folder.is_dir():
            (folder / _MARK).write_text(_mark())

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the last step. The weights may be those of the best step: they are not saved as those of this one."""
        if self._saved == state.global_step:
            self._report(state)
        self._training = False

    def _report(self, state: Any) -> None:
        progress_channel.progress(state.global_step, state.max_steps if state.max_steps > 0 else None, self._metrics)

    def _save(self) -> None:
        """Save a checkpoint of the step that all ranks have done, as the Trainer does when it is time to save."""
        trainer = self._trainer
        if self._training and trainer.state.global_step != self._saved:
            trainer._save_checkpoint(trainer.model_wrapped, None)
            trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)


def _is_elastic(trainer: Any) -> bool:
    """Return whether the script, the Trainer's class or one of its callbacks uses elasticjob: it has its own state."""
    classes = {*type(trainer).__mro__, *map(type, trainer.callback_handler.callbacks)} - {SavingStop}
    return uses_elasticjob() or any(kind.__module__.partition(".")[0] == "elasticjob" for kind in classes)


def _saves(args: Any) -> bool:
    """Return whether the Trainer is configured to save what a training can go on from."""
    strategy = getattr(args.save_strategy, "value", args.save_strategy)
    return strategy != "no" and not getattr(args, "save_only_model", False)


def _is_sharded(trainer: Any) -> bool:
    enabled = getattr(trainer, "is_fsdp_enabled", False) or getattr(trainer, "is_deepspeed_enabled", False)
    return enabled and dist.is_available() and dist.is_initialized()


def _own_checkpoints(folder: str, mark: str) -> list[int]:
    """Return the steps of the checkpoints in the folder that have this mark."""
    marks = Path(folder).glob(f"checkpoint-*/{_MARK}")
    named = [(path.parent.name.rpartition("-")[2], path) for path in marks]
    return sorted(int(step) for step, path in named if step.isdecimal() and path.read_text() == mark)


def _mark() -> str:
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', '')} training {begun_trainings}\n"

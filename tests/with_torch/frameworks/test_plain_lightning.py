"""Which checkpoints of a Lightning Trainer a job goes on from, and with which batch of the epoch."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from elasticjob.frameworks import plain_lightning
from elasticjob.frameworks._plain.lightning_checkpoints import Checkpoint, JobCheckpoints
from elasticjob.frameworks._plain.lightning_position import restore_position

pytestmark = pytest.mark.torch


def checkpoints(folder: Path, said: list[str] | None = None, job: str = "job", training: int = 1) -> JobCheckpoints:
    sentences: list[str] = [] if said is None else said
    return JobCheckpoints(str(folder), job, training, sentences.append)


def saved(folder: Path, step: int, name: str = "") -> Checkpoint:
    """Write a checkpoint of two ranks, of a planned end if it has no name."""
    path = folder / name if name else Path(checkpoints(folder).stop_path(step))
    path.write_text("")
    return Checkpoint(step, 2, str(path))


def test_a_training_goes_on_from_the_last_checkpoint_that_is_there(tmp_path: Path) -> None:
    assert checkpoints(tmp_path).newest_common() is None
    first, last = saved(tmp_path, 10, "a.ckpt"), saved(tmp_path, 20, "last.ckpt")
    for checkpoint in (first, last, last._replace(step=30)):
        checkpoints(tmp_path).add(checkpoint)
    assert checkpoints(tmp_path).newest_common() == last._replace(step=30)
    Path(last.path).unlink()
    assert checkpoints(tmp_path).newest_common() == first
    assert checkpoints(tmp_path, job="other").newest_common() is None
    assert checkpoints(tmp_path, training=2).newest_common() is None


def test_a_planned_end_removes_the_checkpoint_of_the_one_before_and_no_other(tmp_path: Path) -> None:
    older, mine, newest = saved(tmp_path, 10), saved(tmp_path, 15, "mine.ckpt"), saved(tmp_path, 20)
    for checkpoint in (older, mine, newest):
        checkpoints(tmp_path).add(checkpoint)
    checkpoints(tmp_path).remove_older_stops(newest.path)
    assert [path.exists() for path in map(Path, (older.path, mine.path, newest.path))] == [False, True, True]
    assert checkpoints(tmp_path).newest_common() == newest


def test_a_url_is_a_folder_too() -> None:
    folder: Any = f"memory://elasticjob-{os.getpid()}"
    found = JobCheckpoints(folder, "job", 1, print)
    assert found.newest_common() is None
    found.add(Checkpoint(3, 1, f"{folder}/elasticjob-job-training1.json"))
    assert found.newest_common() == Checkpoint(3, 1, f"{folder}/elasticjob-job-training1.json")


@pytest.mark.parametrize(
    ("other", "step", "said"), [([], None, "anew"), ([10], 10, "from step 10"), ([10, 20], 20, "")]
)
def test_all_ranks_go_on_from_the_newest_common_checkpoint(
    other: list[int], step: int | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [saved(tmp_path, each) for each in (10, 20)]
    for checkpoint in own:
        checkpoints(tmp_path).add(checkpoint)

    def gather(found: list[Any], mine: object) -> None:
        found[:] = [mine, [each for each in own if each.step in other]]

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    sentences: list[str] = []
    chosen = checkpoints(tmp_path, sentences).newest_common()
    assert (chosen.step if chosen else None) == step
    assert bool(sentences) is bool(said)
    assert all(f"rank 1 does not have {own[1].path}" in text and said in text for text in sentences)


class CombinedLoader:
    def __init__(self, loader: Any) -> None:
        self.flattened = [loader]

    def reset(self) -> None: ...

    def __iter__(self) -> Any:
        return iter(self.flattened[0])


def loops(loader: Any, done: int, accumulated: int = 1) -> Any:
    """Return the loops of a Trainer that has had so many batches of the epoch."""
    fetcher = SimpleNamespace(combined_loader=CombinedLoader(loader), length=len(loader), iterator=None, fetched=0)
    current = SimpleNamespace(ready=done, started=done, processed=done, completed=done)
    epoch_loop = SimpleNamespace(batch_progress=SimpleNamespace(current=current))
    trainer = SimpleNamespace(accumulate_grad_batches=accumulated)
    return SimpleNamespace(_data_fetcher=fetcher, epoch_loop=epoch_loop, trainer=trainer)


@pytest.mark.parametrize(
    ("saved_ranks", "ranks", "done", "accumulated", "begin"),
    [(2, 2, 3, 1, 3), (2, 1, 3, 1, 6), (1, 2, 3, 1, 1), (4, 1, 5, 1, 9), (3, 2, 3, 3, 3), (2, 1, 0, 1, 0)],
    ids=["the same size", "smaller", "larger", "beyond the end", "whole steps", "a new epoch"],
)
def test_an_epoch_goes_on_at_the_same_part_of_it(
    saved_ranks: int, ranks: int, done: int, accumulated: int, begin: int
) -> None:
    loader = DataLoader(range(10), batch_size=1)
    found = loops(loader, done, accumulated)
    restore_position(found, ranks, saved_ranks)
    fetcher = found._data_fetcher
    assert [int(batch) for batch in fetcher.iterator] == list(range(begin, 10))
    assert fetcher.fetched == begin
    assert set(vars(found.epoch_loop.batch_progress.current).values()) == {begin}
    assert [int(batch) for batch in loader] == list(range(10))


def test_a_loader_without_a_sampler_for_batches_or_of_another_kind_goes_on_too() -> None:
    for loader in (DataLoader(range(10), batch_size=None), list(range(10))):
        found = loops(loader, 4)
        restore_position(found, 1, 1)
        assert next(found._data_fetcher.iterator) == 4


def trainer_with(*checkpoint_callbacks: Any, loggers: tuple[Any, ...] = (), fast: bool = False) -> Any:
    return SimpleNamespace(
        checkpoint_callbacks=checkpoint_callbacks, callbacks=["other"], fast_dev_run=fast, loggers=loggers,
        default_root_dir="/root",
    )  # fmt: skip


def model_checkpoint(**settings: Any) -> Any:
    return SimpleNamespace(
        **{"dirpath": None, "save_top_k": 1, "save_last": None, "save_weights_only": False} | settings
    )


@pytest.mark.parametrize(
    ("trainer", "folder"),
    [
        (trainer_with(model_checkpoint()), "/root"),
        (trainer_with(model_checkpoint(), loggers=(SimpleNamespace(save_dir="/logs"),)), "/logs"),
        (trainer_with(model_checkpoint(), model_checkpoint(dirpath="/data")), "/data"),
        (trainer_with(model_checkpoint(save_top_k=0, save_last=True)), "/root"),
        (trainer_with(), None),
        (trainer_with(model_checkpoint(save_top_k=0)), None),
        (trainer_with(model_checkpoint(save_weights_only=True)), None),
        (trainer_with(model_checkpoint(), fast=True), None),
    ],
)
def test_only_a_trainer_that_saves_gets_the_callback(
    trainer: Any, folder: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = SimpleNamespace(Callback=type("Callback", (), {}))
    monkeypatch.setattr(plain_lightning, "uses_elasticjob", lambda: True)
    assert not plain_lightning.add_lightning_stop(trainer, package, lambda *_: None)
    monkeypatch.setattr(plain_lightning, "uses_elasticjob", lambda: False)
    assert plain_lightning.add_lightning_stop(trainer, package, lambda *_: None) is (folder is not None)
    assert len(trainer.callbacks) == 1 + (folder is not None)
    assert folder is None or trainer.callbacks[0].folder == folder


def test_a_list_that_cannot_be_written_does_not_end_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    stop = plain_lightning.LightningStop(str(tmp_path / "file" / "folder"), lambda *_: None)
    stop.begin(1, goes_on=True)
    trainer = SimpleNamespace(is_global_zero=True, global_step=3, world_size=1)
    stop.trainer = trainer
    stop.note(trainer, "a.ckpt")
    assert "does not go on from a.ckpt" in capsys.readouterr().err

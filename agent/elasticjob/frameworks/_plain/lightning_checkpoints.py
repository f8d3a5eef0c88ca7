"""Which checkpoints a job has written in a training of Lightning: a list in a file that all rounds find.

Imports torch and, for folders that are URLs, fsspec.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from elasticjob.frameworks._plain.trainings import newest_on_all_ranks

_KEPT = 20
"""Entries of the list: checkpoints that Lightning has deleted are among them."""


class Checkpoint(NamedTuple):
    """One checkpoint of the list."""

    step: int
    world_size: int
    path: str


class JobCheckpoints:
    """The checkpoints of this job's training with this number, newest last."""

    def __init__(self, folder: str, job: str, training: int, say: Callable[[str], None]) -> None:
        """`folder`: where the list and the checkpoints of planned ends are. `say` tells the user a sentence."""
        self.folder = folder
        self._name = f"elasticjob-{job}-training{training}"
        self._say = say

    def stop_path(self, step: int) -> str:
        """Return the path of the checkpoint of a planned end."""
        return os.path.join(self.folder, f"{self._name}-step={step}.ckpt")  # noqa: PTH118  # may be a URL

    def add(self, checkpoint: Checkpoint) -> None:
        """Add a checkpoint that is written. Rank 0 calls it."""
        others = [each for each in self._read() if each.path != checkpoint.path]
        self._write([*others, checkpoint])

    def remove_older_stops(self, path: str) -> None:
        """Delete the checkpoints of earlier planned ends: the one at `path` is newer. Rank 0 calls it."""
        prefix = os.path.join(self.folder, f"{self._name}-step=")  # noqa: PTH118
        found = self._read()
        older = [each for each in found if each.path.startswith(prefix) and each.path != path]
        for each in older:
            if _exists(each.path):
                _files(each.path).rm(each.path, recursive=True)
        self._write([each for each in found if each not in older])

    def newest_common(self) -> Checkpoint | None:
        """Return the newest checkpoint that all ranks have; None without. All ranks call it."""
        own = [each for each in self._read() if _exists(each.path)]
        chosen, lacking = newest_on_all_ranks(own)
        if lacking is not None:
            rank, newest = lacking
            what = f"from step {chosen.step}" if chosen is not None else "anew"
            self._say(
                f"rank {rank} does not have {newest.path}, so the training begins {what}: let ModelCheckpoint save"
                " to storage that all pods share"
            )
        return chosen

    @property
    def _list(self) -> str:
        return os.path.join(self.folder, f"{self._name}.json")  # noqa: PTH118

    def _read(self) -> list[Checkpoint]:
        if not _exists(self._list):
            return []
        with _open(self._list, "r") as file:
            return [Checkpoint(*entry) for entry in json.load(file)]

    def _write(self, checkpoints: list[Checkpoint]) -> None:
        partial = f"{self._list}.partial"
        if not _is_url(self.folder):
            Path(self.folder).mkdir(parents=True, exist_ok=True)
        with _open(partial, "w") as file:
            json.dump(checkpoints[-_KEPT:], file)
        if _is_url(partial):
            _files(partial).mv(partial, self._list)
        else:
            Path(partial).replace(self._list)


def _is_url(path: str) -> bool:
    return "://" in path


def _files(path: str) -> Any:
    import fsspec  # type: ignore[import-untyped]

    return fsspec.core.url_to_fs(path)[0]


def _exists(path: str) -> bool:
    return bool(_files(path).exists(path)) if _is_url(path) else Path(path).exists()


def _open(path: str, mode: str) -> Any:
    return _files(path).open(path, mode) if _is_url(path) else Path(path).open(mode)

"""Groups that follow each other in a worker: each one after the first gets a prefix of its own in the round's store."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from elasticjob._runtime.agent.start_workers.in_workers.group_prefixes import count_groups, prefix_groups
from elasticjob._runtime.agent.start_workers.in_workers.one_world import SeparateWorldError

ADDRESS = ("10.0.0.1", 500)


class RoundStore:
    """The store of one round, as far as groups are counted there."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def add(self, key: str, number: int) -> int:
        self.numbers[key] = self.numbers.get(key, 0) + number
        return self.numbers[key]


class Worker:
    """A process of rank 1 with torch's two functions."""

    def __init__(self) -> None:
        self.store = RoundStore()
        self._torch = ModuleType("torch")
        self._torch.__dict__.update(
            _create_c10d_store=lambda *_args: self.store,
            _update_default_pg=lambda _group: None,
            get_backend=lambda group: group.backend,
        )
        prefix_groups(self._torch)
        count_groups(self._torch)
        self.end()

    def begin(self) -> str:
        """Get a store for a group; return the prefix of its keys."""
        create: Callable[..., object] = self._torch.__dict__["_create_c10d_store"]
        store = create(*ADDRESS, 1, 2)
        return "" if store is self.store else str(store)

    def end(self, backend: str = "gloo") -> None:
        """Have formed the group."""
        self._torch.__dict__["_update_default_pg"](SimpleNamespace(backend=backend))

    def destroy(self) -> None:
        self._torch.__dict__["_update_default_pg"](None)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    monkeypatch.setenv("ELASTICJOB_WORLD", f"RANK=1 WORLD_SIZE=2 MASTER_ADDR={ADDRESS[0]} MASTER_PORT={ADDRESS[1]}")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setitem(sys.modules, "torch.distributed", SimpleNamespace(PrefixStore=lambda prefix, _store: prefix))
    return Worker()


def test_each_group_of_a_process_has_its_own_prefix(worker: Worker) -> None:
    prefixes = []
    for _ in range(3):
        prefixes.append(worker.begin())
        worker.end()
    assert prefixes == ["", "stage_1", "stage_2"]


def test_a_second_attempt_at_a_group_keeps_its_prefix(worker: Worker) -> None:
    assert [worker.begin(), worker.begin()] == ["", ""]
    worker.end()
    assert [worker.begin(), worker.begin()] == ["stage_1", "stage_1"]


def test_a_group_that_plans_a_training_is_none_of_the_round(worker: Worker) -> None:
    assert worker.begin() == ""
    worker.end("fake")
    assert worker.begin() == ""


@pytest.mark.parametrize(("formed", "next_prefix"), [(True, "stage_1"), (False, "")])
def test_another_process_of_the_worker_goes_on_after_the_groups_that_were_formed(
    formed: bool, next_prefix: str, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worker.begin() == ""
    if formed:
        worker.end()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert worker.begin() == next_prefix
    worker.end()
    assert worker.begin() == ("stage_2" if formed else "stage_1")


def test_a_group_of_another_store_is_not_counted_in_the_store_of_a_round_that_has_ended(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = worker.store
    assert worker.begin() == ""  # the round ends before the group is formed
    monkeypatch.setenv("ELASTICJOB_WORLD", os.environ["ELASTICJOB_WORLD"].replace("500", "501"))
    worker.store = RoundStore()
    worker.end()
    assert ended.numbers == {"groups_of_rank_1": 0}


@pytest.mark.parametrize("left", ["alive", "destroyed", "ended"])
def test_two_processes_of_a_worker_do_not_both_train(
    left: str, worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    other = subprocess.Popen(["sleep", "60"])
    try:
        monkeypatch.setattr(os, "getpid", lambda: other.pid)
        assert worker.begin() == ""
        worker.end()
        if left == "destroyed":
            worker.destroy()
        if left == "ended":
            other.kill()
            other.wait()
        monkeypatch.setattr(os, "getpid", lambda: -1)
        if left == "alive":
            with pytest.raises(SeparateWorldError, match="would train twice"):
                worker.begin()
        else:
            assert worker.begin() == "stage_1"
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("formed", [True, False])
def test_a_process_that_stays_counts_from_0_in_the_next_round(worker: Worker, formed: bool) -> None:
    worker.begin()
    worker.end()
    worker.begin()
    if formed:
        worker.end()
    worker.store = RoundStore()  # a rank that starts in this round finds the same
    assert worker.begin() == ""
    worker.end()
    assert worker.begin() == "stage_1"


def test_a_group_that_a_rank_starts_below_itself_counts_for_no_rank(
    monkeypatch: pytest.MonkeyPatch, worker: Worker
) -> None:
    assert worker.begin() == ""
    worker.end()
    counted = dict(worker.store.numbers)
    monkeypatch.setenv("ELASTICJOB_TRAINS", "1")  # as in a program that the rank, process 1, has started
    assert "below_rank_1_process_1" in worker.begin()
    assert worker.store.numbers == counted

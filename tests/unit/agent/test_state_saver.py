"""The agent saves the copies of its workers: at the end, and while training continues."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from elasticjob._runtime.agent.reporting.state_saver import StateSaver
from elasticjob._runtime.contract.names import ExitCode
from elasticjob._runtime.contract.snapshot_format import state_file
from elasticjob._runtime.contract.snapshot_format.state_file import BlockChangedError, read_file_header
from support.training.state_blocks import memory, write


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def test_the_last_copy_is_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    path = str(tmp_path / "state")
    await StateSaver([memory(5, path), memory(6, path), memory()], lambda: False).save_last()
    assert read_file_header(path).step == 6
    assert caplog.messages == [f"training state saved to {path}"]


async def test_storage_that_fails_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await StateSaver([memory(5, str(tmp_path / "absent" / "state"))], lambda: False).save_last()
    assert "training state was not saved: [Errno 2]" in caplog.messages[0]


async def test_storage_that_hangs_delays_the_end_for_a_limited_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    storage, threads = threading.Event(), []

    def hang(_memory: object) -> str:
        threads.append(threading.current_thread())
        storage.wait(60)
        return "late"

    monkeypatch.setattr(state_file, "save_to_recorded_path", hang)
    await StateSaver([memory(5, "x")], lambda: False).save_last(0.05)
    assert caplog.messages == ["training state was not saved: the storage did not accept it within 0 s"]
    assert threads[0].daemon, "the process does not wait for it"
    storage.set()
    threads[0].join(20)


async def test_the_first_node_saves_as_often_as_the_copy_asks_for(tmp_path: Path) -> None:
    path, first = str(tmp_path / "state"), [False]
    asked = []
    block = memory(5, path, save_minutes=0.0005)

    def is_first_node() -> bool:
        asked.append(read_file_header(path).step)
        return first[-1]

    saver = asyncio.create_task(StateSaver([block, memory()], is_first_node).run(0.01))
    await until(lambda: len(asked) >= 3)
    assert set(asked) == {-1}
    first.append(True)
    await until(lambda: read_file_header(path).step == 5)
    write(block, 7, path, sequence=2, save_minutes=0.0005)
    await until(lambda: read_file_header(path).step == 7)
    saver.cancel()


async def test_without_an_interval_only_the_end_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "state")
    checks = []

    def recorded_interval(descriptors: Sequence[int]) -> float:
        checks.append(read_file_header(path).step)
        return interval(descriptors)

    interval = state_file.recorded_interval
    monkeypatch.setattr(state_file, "recorded_interval", recorded_interval)
    saver = asyncio.create_task(StateSaver([memory(5, path)], lambda: True).run(0.01))
    await until(lambda: len(checks) >= 3)
    assert set(checks) == {-1}
    saver.cancel()


@pytest.mark.parametrize("code", ExitCode)
async def test_every_end_but_success_saves(code: ExitCode) -> None:
    saved = []

    class Saver(StateSaver):
        async def save_last(self, timeout: float = 0.0) -> None:
            saved.append(code)

    await Saver([], lambda: True).save_at_exit(code)
    assert saved == ([] if code is ExitCode.SUCCEEDED else [code])


async def test_a_copy_that_changes_while_it_is_saved_is_saved_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    changes: list[str | BlockChangedError] = [BlockChangedError()] * 2
    results = iter([*changes, "path", *changes, BlockChangedError()])

    def save(_memory: object) -> str:
        result = next(results)
        if isinstance(result, BlockChangedError):
            raise result
        return result

    monkeypatch.setattr(state_file, "save_to_recorded_path", save)
    saver = StateSaver([memory(5, "path")], lambda: True)
    await saver.save_last()
    await saver.save_last()
    assert caplog.messages == [
        "training state saved to path",
        "training state was not saved: the script commits twice before the storage has taken a copy",
    ]

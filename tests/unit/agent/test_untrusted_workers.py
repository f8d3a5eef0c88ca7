"""Files, packets and memory of a worker that are not what our own code writes."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from elasticjob._runtime.agent.monitoring.exits.worker_exits import left_at, read_error_file, script_succeeded
from elasticjob._runtime.agent.monitoring.progress import hangs
from elasticjob._runtime.agent.monitoring.progress.worker_progress import WorkerProgress
from elasticjob._runtime.agent.reporting.worker_output import FileSink
from elasticjob._runtime.agent.start_workers.shims import shim_server
from elasticjob._runtime.contract.names import RoundId, script_returned_file, success_recorded_file
from elasticjob._runtime.contract.shared_memory.progress_page import NO_LIMIT, FilePage, PageWord, open_page, write_text
from elasticjob._runtime.contract.shared_memory.untrusted_file import read_regular_file
from elasticjob._runtime.contract.snapshot_format import state_block, state_file
from elasticjob._runtime.system.code_root import CODE_ROOT

ROUND = RoundId(1, 0, 1)


def link(path: Path) -> None:
    (path.parent / "target").write_text("{}")
    path.symlink_to(path.parent / "target")


OTHER_FILES: list[Callable[[Path], object]] = [os.mkfifo, Path.mkdir, link, lambda path: path.symlink_to("/dev/zero")]


@pytest.mark.parametrize("create", OTHER_FILES)
def test_only_regular_files_are_read_and_none_is_waited_for(create: Callable[[Path], object], tmp_path: Path) -> None:
    error_file = str(tmp_path / "error.json")
    for path in (error_file, success_recorded_file(error_file), script_returned_file(error_file)):
        create(Path(path))
        for made in tmp_path.glob("target"):
            made.unlink()
    results: list[object] = []

    def read() -> None:
        results.extend([read_error_file(error_file), script_succeeded(error_file, 1), left_at(error_file, 1)])
        results.append(hangs.read_from(error_file, 0))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(20)
    assert results == [None, False, None, ""]


def test_a_file_is_read_up_to_a_limit(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("0123456789")
    assert read_regular_file(str(tmp_path / "log"), 4, start=2).data == b"2345"


@pytest.fixture
async def progress(tmp_path: Path) -> AsyncIterator[WorkerProgress]:
    found = WorkerProgress(tmp_path, 2)
    found.begin_round(ROUND)
    yield found
    found.close()


def connect(progress: WorkerProgress, hello: bytes) -> list[int]:
    """Send a hello, let the agent handle it, and return the descriptors that it answers with."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(progress.path)
        connection.sendall(hello)
        peer, _ = progress.listener.accept()
        progress.handshake(peer)
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 16)
        return descriptors


HELLO: dict[str, Any] = {"local_rank": 0, "round": str(ROUND)}


@pytest.mark.parametrize(
    "hello",
    [
        b"[" * 1000,
        b"\xff",
        b"7",
        b'"received"',
        b'["received"]',
        json.dumps(HELLO | {"local_rank": 10**400}).encode(),
        json.dumps(HELLO | {"local_rank": 1e300}).encode(),
        json.dumps(HELLO | {"local_rank": 2}).encode(),
        json.dumps(HELLO | {"local_rank": -1}).encode(),
        json.dumps(HELLO | {"round": 7}).encode(),
        json.dumps(HELLO | {"received": {"size": 10**400, "seconds": 1, "rank": 0, "interface": ""}}).encode(),
        json.dumps(HELLO | {"received": {"size": 1, "seconds": 10**400, "rank": 0, "interface": ""}}).encode(),
        json.dumps(HELLO | {"received": None}).encode(),
    ],
)
async def test_a_hello_that_is_none_is_refused(progress: WorkerProgress, hello: bytes) -> None:
    assert connect(progress, hello) == []
    assert progress.ranks == {}


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize(
    "text",
    [
        b"[" * 2000,
        b"\xff",
        b"7",
        b'{"total":1}',
        b'{"total":1e999,"metrics":{}}',
        b'{"total":null,"metrics":[]}',
        b'{"total":{},"metrics":{}}',
    ],
)
async def test_a_description_that_is_none_is_ignored(
    progress: WorkerProgress, text: bytes, fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elasticjob._runtime.contract.shared_memory.progress_page.has_fixed_size", lambda _: fixed)
    page, *others = connect(progress, json.dumps(HELLO).encode())
    write_text(open_page(page), text)
    assert progress.training() is None
    write_text(open_page(page), b'{"total":123456789012345678901234567890,"metrics":{"lo\\u001bss":"\\ud800"}}')
    found = progress.training()
    assert found is not None
    assert found.total == NO_LIMIT - 2
    assert [(metric.name, metric.value) for metric in found.metrics] == [(r"lo\x1bss", "?")]
    for descriptor in (page, *others):
        os.close(descriptor)


@pytest.mark.parametrize("fixed", [True, False])
async def test_any_numbers_in_a_page_are_steps_that_can_be_reported(
    progress: WorkerProgress, fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elasticjob._runtime.contract.shared_memory.progress_page.has_fixed_size", lambda _: fixed)
    descriptors = connect(progress, json.dumps(HELLO).encode())
    words = open_page(descriptors[0])
    assert isinstance(progress.ranks[0].words, FilePage) is not fixed
    for word in PageWord:
        if word not in (PageWord.LIMIT, PageWord.DEADLINE, PageWord.TEXT_VERSION):
            words[word] = (1 << 63) - 1
    step = await progress.hold(1)
    assert step == NO_LIMIT - 1
    assert progress.stop_at(step)
    assert words[PageWord.LIMIT] == step
    for descriptor in descriptors:
        os.close(descriptor)


CUTS_OFF = f"""
import asyncio, errno, json, os, pathlib, socket, sys
sys.path.insert(0, {CODE_ROOT!r})
if sys.argv[2] == "no memfd":
    def refuse(*_):
        raise PermissionError(errno.EPERM, "seccomp")
    os.memfd_create = refuse
from elasticjob._runtime.agent.monitoring.progress.worker_progress import WorkerProgress
from elasticjob._runtime.contract.names import RoundId

async def main():
    progress = WorkerProgress(pathlib.Path(sys.argv[1]))
    progress.begin_round(RoundId(1, 0, 1))
    reader, writer = await asyncio.open_unix_connection(progress.path)
    with socket.socket(socket.AF_UNIX) as worker:
        worker.connect(progress.path)
        worker.sendall(json.dumps({{"local_rank": 0, "round": "1.0.1"}}).encode())
        while not progress.ranks:
            await asyncio.sleep(0.01)
        _, (page, *_), _, _ = socket.recv_fds(worker, 1, 16)
        try:
            os.ftruncate(page, 0)
            print("cut off", end=" ")
        except PermissionError:
            print("refused", end=" ")
        progress.reports(), progress.heartbeats(), progress.training(), progress.set_deadline(3.0)
        print("lives")

asyncio.run(main())
"""


@pytest.mark.parametrize(("memory", "effect"), [("memfd", "refused"), ("no memfd", "cut off")])
def test_a_page_that_a_worker_cuts_off_does_not_kill_the_agent(memory: str, effect: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", CUTS_OFF, str(tmp_path), memory]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, f"{effect} lives\n"), done.stderr


@pytest.mark.parametrize(
    ("content", "json_size"),
    [(b"[" * 100_000, 100_000), (b'{"save_minutes": 1' + b"0" * 400 + b"}", 419), (b"", 1 << 40), (b"\xff", 1)],
)
def test_a_state_that_a_script_has_overwritten_is_not_saved(content: bytes, json_size: int, tmp_path: Path) -> None:
    size = state_block.HEADER_SIZE + json_size
    with (tmp_path / "memory").open("w+b") as memory:
        os.truncate(memory.fileno(), size)
        os.pwrite(memory.fileno(), content, state_block.HEADER_SIZE)
        state_block.finish_write(memory.fileno(), state_block.BlockHeader(1, 1, json_size, size))
        for read in (state_file.recorded_interval, state_file.save_to_recorded_path):
            with suppress(OSError, ValueError):  # as documented
                assert not read([memory.fileno()])


@pytest.mark.parametrize("number", [0, 200, 255])
def test_a_shim_that_relays_a_number_that_is_no_signal_breaks_nothing(number: int) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as process:
        for group in (True, False):
            shim_server.send_signal(process.pid, number, group=group)
        assert process.poll() is None
        process.kill()


async def test_storage_that_reports_a_failed_write_at_the_end_ends_no_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[object] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    sink = FileSink(tmp_path / "worker.log")
    monkeypatch.setattr("elasticjob._runtime.agent.reporting.worker_output.os", WithoutClose)
    sink.put(b"line\n")
    sink.finish()
    sink.join(20)
    assert not sink.writing
    assert not errors


class WithoutClose:
    """The module os, whose `close` fails."""

    open, write = os.open, os.write
    O_WRONLY, O_CREAT, O_APPEND, O_CLOEXEC = os.O_WRONLY, os.O_CREAT, os.O_APPEND, os.O_CLOEXEC

    @staticmethod
    def close(descriptor: int) -> None:
        os.close(descriptor)
        raise OSError(errno.EDQUOT, "no room")
